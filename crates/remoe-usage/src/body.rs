//! The prompt in a request's body, as token ids.

use remoe_model::text::{ChatTemplate, TextError, Tokenizer};
use remoe_model::{Checkpoint, Store};
use serde::Deserialize;
use serde_json::{Value, json};

/// Tokens that a prediction looks at, from the beginning: what a prompt is about shows by then.
const MOST_TOKENS: usize = 2048;
/// Bytes of text that are tokenised for that.
const MOST_TEXT: usize = 16 * MOST_TOKENS;

/// Reads prompts as the model's main function will, as far as predictions need it.
#[derive(Debug)]
pub struct Prompts {
    tokenizer: Option<Tokenizer>,
    template: Option<ChatTemplate>,
    vocabulary: usize,
}

/// The fields that are looked at.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Body {
    prompt: Value,
    messages: Vec<Value>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
}

/// A prompt, as far as predictions look at it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ObservedPrompt {
    /// Beginning of the prompt; empty if it cannot be read.
    pub(crate) tokens: Vec<u32>,
    /// How many tokens the whole has.
    pub(crate) length: usize,
    /// That is an estimate: the text is too long to be tokenised for this.
    pub(crate) is_estimated: bool,
}

/// Parts of a body that predictions need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PredictionInput {
    /// Prompt to be answered.
    pub(crate) prompt: ObservedPrompt,
    /// Tokens of the answer, at most.
    pub(crate) most_output: Option<u64>,
}

impl Prompts {
    /// Reads tokenizer and chat template of the model in `checkpoint`.
    ///
    /// # Errors
    /// A file of its text is unreadable or broken.
    pub fn open(checkpoint: &Checkpoint) -> Result<Self, TextError> {
        Self::open_in(checkpoint.store(), checkpoint.config().vocab_size)
    }

    /// As [`Self::open`], for a model with `vocabulary` tokens whose files are in `store`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_in(store: &dyn Store, vocabulary: usize) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::open_in(store, vocabulary)?;
        Ok(Self { tokenizer, template: ChatTemplate::open_in(store)?, vocabulary })
    }

    /// For a model without text: prompts are lists of ids below `vocabulary`.
    #[must_use]
    pub fn of_ids(vocabulary: usize) -> Self {
        Self { tokenizer: None, template: None, vocabulary }
    }

    /// Reads the prompt and the answer's limit from `body`. A prompt that cannot be read has no tokens: the main
    /// function reports what is wrong with it.
    pub(crate) fn read(&self, body: &[u8]) -> PredictionInput {
        let body: Body = serde_json::from_slice(body).unwrap_or_default();
        let prompt = match &body.prompt {
            Value::Null => self.chat(&body.messages),
            Value::String(text) => self.encode(text, true),
            // One of several prompts stands for all of them.
            Value::Array(list) => match list.first() {
                Some(Value::String(text)) => self.encode(text, true),
                Some(Value::Array(ids)) => self.ids(ids),
                _ => self.ids(list),
            },
            _ => ObservedPrompt::default(),
        };
        PredictionInput { prompt, most_output: body.max_completion_tokens.or(body.max_tokens) }
    }

    fn chat(&self, messages: &[Value]) -> ObservedPrompt {
        let messages: Vec<Value> = messages.iter().map(plain).collect();
        let template = self.template.as_ref().filter(|_| !messages.is_empty());
        let text = template.and_then(|template| template.render(&messages, true).ok());
        // The template writes special tokens itself.
        text.map_or_else(ObservedPrompt::default, |text| self.encode(&text, false))
    }

    fn encode(&self, text: &str, special: bool) -> ObservedPrompt {
        let end = (0..=text.len().min(MOST_TEXT)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        let beginning = text.get(..end).unwrap_or_default();
        let tokenizer = self.tokenizer.as_ref();
        let mut tokens =
            tokenizer.and_then(|tokenizer| tokenizer.encode(beginning, special).ok()).unwrap_or_default();
        let is_estimated = end < text.len();
        let length = match is_estimated {
            true => tokens.len().saturating_mul(text.len()) / end.max(1),
            false => tokens.len(),
        };
        tokens.truncate(MOST_TOKENS);
        ObservedPrompt { tokens, length, is_estimated }
    }

    fn ids(&self, list: &[Value]) -> ObservedPrompt {
        let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let known = |id: &u32| (*id as usize) < self.vocabulary;
        let tokens = list
            .iter()
            .take(MOST_TOKENS)
            .map(id)
            .collect::<Option<Vec<_>>>()
            .unwrap_or_default()
            .into_iter()
            .filter(known)
            .collect();
        ObservedPrompt { tokens, length: list.len(), is_estimated: false }
    }
}

/// A message with one text, as templates take it.
fn plain(message: &Value) -> Value {
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
