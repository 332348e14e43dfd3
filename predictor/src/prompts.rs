//! Prompts of common data sets with one JSON object per line.
//!
//! | data set | content of a line | prompt |
//! | --- | --- | --- |
//! | Remoe | `{"prompt": "..", "kind": ".."}` | `prompt` |
//! | LMSYS-Chat-1M | `{"conversation": [{"role": "user", "content": ".."}, ..]}` | the first message of the user |
//! | ShareGPT | `{"conversations": [{"from": "human", "value": ".."}, ..]}` | the first message of the human |
//! | WikiText, C4, SlimPajama | `{"text": "..", ..}` | `text` |
//!
//! The fields tell the data set. The prompt is the first [`PROMPT_CHARACTERS`] characters, as in the Remoe paper
//! (section V-A). Lines without a prompt are skipped: blank lines and headings of WikiText, and conversations that
//! the assistant begins.

use serde::Deserialize;

/// Length of a prompt, in characters.
pub const PROMPT_CHARACTERS: usize = 500;

/// Prompt of a data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Beginning of the text.
    pub text: String,
    /// Kind of text, if the line states one.
    pub kind: Option<String>,
}

/// Error of a line that is not of a known data set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid line of a prompt set: {0}; expected an object with `prompt`, `text`, `conversation` (LMSYS-Chat-1M) or \
     `conversations` (ShareGPT)"
)]
pub struct PromptError(String);

#[derive(Deserialize)]
struct PromptLine {
    prompt: Option<String>,
    kind: Option<String>,
    text: Option<String>,
    conversation: Option<Vec<Message>>,
    conversations: Option<Vec<Message>>,
}

#[derive(Deserialize)]
struct Message {
    #[serde(alias = "from")]
    role: String,
    #[serde(alias = "value")]
    content: String,
}

/// Parses the prompt of one line. Returns `None` if it has none.
///
/// # Errors
/// The line is not a JSON object, or has none of the known fields.
pub fn of_line(line: &str) -> Result<Option<Prompt>, PromptError> {
    let line = line.trim();
    if line.is_empty() {
        return Ok(None);
    }
    let PromptLine { prompt, kind, text, conversation, conversations } =
        serde_json::from_str(line).map_err(|error| PromptError(error.to_string()))?;
    let text = match (prompt, text, conversation.or(conversations)) {
        (Some(prompt), ..) => Some(prompt),
        // Skips headings of WikiText, such as ` = Title = `.
        (None, Some(text), _) => Some(text).filter(|text| !is_heading(text)),
        (None, None, Some(messages)) => {
            let first = messages.into_iter().find(|message| message.role != "system");
            first.filter(|first| matches!(first.role.as_str(), "user" | "human")).map(|first| first.content)
        }
        (None, None, None) => return Err(PromptError("missing all known fields".to_owned())),
    };
    let text = text.map(|text| text.trim().chars().take(PROMPT_CHARACTERS).collect::<String>());
    Ok(text.filter(|text| !text.is_empty()).map(|text| Prompt { text, kind }))
}

fn is_heading(text: &str) -> bool {
    let text = text.trim();
    text.len() > 1 && text.starts_with('=') && text.ends_with('=') && !text.contains('\n')
}
