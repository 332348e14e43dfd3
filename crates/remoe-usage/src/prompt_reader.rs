//! Reads the prompt in a request's body as token ids.

use remoe_model::text::{ChatTemplate, TextError, Tokenizer};
use remoe_model::{Checkpoint, Store};
use serde::Deserialize;
use serde_json::{Value, json};

/// Largest prefix of a prompt that predictions use, in tokens. It is enough to tell the topic.
const MAX_PROMPT_TOKENS: usize = 2048;
/// Largest prefix of a text that is tokenised, in bytes.
const MAX_TEXT_BYTES: usize = 16 * MAX_PROMPT_TOKENS;

/// Reader of prompts. It applies the tokenizer and the chat template as the model's main function does.
#[derive(Debug)]
pub struct PromptReader {
    tokenizer: Option<Tokenizer>,
    template: Option<ChatTemplate>,
    vocabulary: usize,
}

/// Fields of the body that predictions need.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Body {
    prompt: Value,
    messages: Vec<Value>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
}

/// Prefix of a prompt, as predictions use it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ObservedPrompt {
    /// First tokens of the prompt, at most [`MAX_PROMPT_TOKENS`]. Empty if the prompt cannot be read.
    pub(crate) tokens: Vec<u32>,
    /// Length of the whole prompt, in tokens.
    pub(crate) length: usize,
    /// True if the length is an estimate, because only a prefix of the text was tokenised.
    pub(crate) is_estimated: bool,
}

/// Prompt and output limit of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PredictionInput {
    /// Prompt of the request.
    pub(crate) prompt: ObservedPrompt,
    /// Limit of the answer in tokens, if the client sets one.
    pub(crate) max_output_tokens: Option<u64>,
}

impl PromptReader {
    /// Reads the tokenizer and the chat template of the model in `checkpoint`.
    ///
    /// # Errors
    /// A file of the tokenizer or the chat template is unreadable or invalid.
    pub fn open(checkpoint: &Checkpoint) -> Result<Self, TextError> {
        Self::open_in(checkpoint.store(), checkpoint.config().vocab_size)
    }

    /// Reads the tokenizer and the chat template from `store`, for a model with `vocabulary` tokens.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_in(store: &dyn Store, vocabulary: usize) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::open_in(store, vocabulary)?;
        Ok(Self { tokenizer, template: ChatTemplate::open_in(store)?, vocabulary })
    }

    /// Creates a reader for a model without a tokenizer: prompts are lists of ids below `vocabulary`.
    #[must_use]
    pub fn for_ids(vocabulary: usize) -> Self {
        Self { tokenizer: None, template: None, vocabulary }
    }

    /// Reads the prompt and the output limit from `body`. An unreadable prompt has no tokens; the main function
    /// reports the error to the client.
    pub(crate) fn read(&self, body: &[u8]) -> PredictionInput {
        let body: Body = serde_json::from_slice(body).unwrap_or_default();
        let prompt = match &body.prompt {
            Value::Null => self.chat(&body.messages),
            Value::String(text) => self.encode(text, true),
            // Several prompts are predicted by the first.
            Value::Array(list) => match list.first() {
                Some(Value::String(text)) => self.encode(text, true),
                Some(Value::Array(ids)) => self.ids(ids),
                _ => self.ids(list),
            },
            _ => ObservedPrompt::default(),
        };
        PredictionInput { prompt, max_output_tokens: body.max_completion_tokens.or(body.max_tokens) }
    }

    fn chat(&self, messages: &[Value]) -> ObservedPrompt {
        let messages: Vec<Value> = messages.iter().map(with_joined_text).collect();
        let template = self.template.as_ref().filter(|_| !messages.is_empty());
        let text = template.and_then(|template| template.render(&messages, true).ok());
        // The template has already added the special tokens.
        text.map_or_else(ObservedPrompt::default, |text| self.encode(&text, false))
    }

    fn encode(&self, text: &str, add_special_tokens: bool) -> ObservedPrompt {
        let end =
            (0..=text.len().min(MAX_TEXT_BYTES)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        let prefix = text.get(..end).unwrap_or_default();
        let tokenizer = self.tokenizer.as_ref();
        let mut tokens = tokenizer
            .and_then(|tokenizer| tokenizer.encode(prefix, add_special_tokens).ok())
            .unwrap_or_default();
        let is_estimated = end < text.len();
        let length = match is_estimated {
            true => tokens.len().saturating_mul(text.len()) / end.max(1),
            false => tokens.len(),
        };
        tokens.truncate(MAX_PROMPT_TOKENS);
        ObservedPrompt { tokens, length, is_estimated }
    }

    fn ids(&self, list: &[Value]) -> ObservedPrompt {
        let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let is_in_vocabulary = |id: &u32| (*id as usize) < self.vocabulary;
        let tokens = list
            .iter()
            .take(MAX_PROMPT_TOKENS)
            .map(id)
            .collect::<Option<Vec<_>>>()
            .unwrap_or_default()
            .into_iter()
            .filter(is_in_vocabulary)
            .collect();
        ObservedPrompt { tokens, length: list.len(), is_estimated: false }
    }
}

/// Joins the text parts of a message into one string, as chat templates expect.
fn with_joined_text(message: &Value) -> Value {
    let content = match message.get("content") {
        Some(Value::Array(parts)) => {
            let texts = parts.iter().filter_map(|part| part.get("text")?.as_str());
            Value::String(texts.collect::<Vec<_>>().join("\n"))
        }
        Some(content) => content.clone(),
        None => Value::String(String::new()),
    };
    json!({"role": message.get("role").cloned().unwrap_or_else(|| "user".into()), "content": content})
}
