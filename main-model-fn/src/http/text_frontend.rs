//! Text interface of the HTTP API: tokenizer and chat template.

use crate::grammar::Tokens;
use crate::model_text::ModelText;
use remoe_model::text::{Rendering, TextError};
use remoe_proto::{ErrorCode, ServiceError};
use serde_json::Value;
use std::sync::Arc;

/// Converts text to token ids and back. Calls may take long, so the API makes them on blocking threads.
pub(crate) trait TextFrontend: Send + Sync {
    /// Encodes `text`. If `special`, adds the tokens of the tokenizer's post-processor.
    ///
    /// # Errors
    /// Fails if the tokenizer does.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, ServiceError>;

    /// Returns the most bytes of text per token; `None` if there is no bound.
    fn bytes_per_token(&self) -> Option<usize>;

    /// Decodes `ids`, with special tokens if `special`.
    ///
    /// # Errors
    /// Fails if an id is not in the vocabulary.
    fn decode(&self, ids: &[u32], special: bool) -> Result<String, ServiceError>;

    /// Returns the bytes of a single token; they may be a part of a UTF-8 character.
    ///
    /// # Errors
    /// Fails if the id is not in the vocabulary.
    fn token_bytes(&self, id: u32) -> Result<Vec<u8>, ServiceError>;

    /// Reports if the token is special: it gives no text unless special tokens are requested.
    fn is_special(&self, id: u32) -> bool;

    /// Returns the id of a token by its text in the tokenizer.
    fn token_id(&self, token: &str) -> Option<u32>;

    /// Returns the source of the chat template.
    fn template(&self) -> Option<&str>;

    /// Reports if the chat template reads the variable `name`.
    fn reads(&self, name: &str) -> bool;

    /// Renders `messages` as a prompt.
    ///
    /// # Errors
    /// Fails if there is no template, or if it refuses the messages or is invalid.
    fn render_chat(&self, messages: &[Value], rendering: Rendering<'_>) -> Result<String, ServiceError>;
}

impl TextFrontend for ModelText {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, ServiceError> {
        self.encode(text, special)
    }

    fn bytes_per_token(&self) -> Option<usize> {
        self.tokenizer().bytes_per_token()
    }

    fn decode(&self, ids: &[u32], special: bool) -> Result<String, ServiceError> {
        let tokenizer = self.tokenizer();
        let text = if special { tokenizer.decode_with_special(ids) } else { tokenizer.decode(ids) };
        text.map_err(decode_error)
    }

    fn token_bytes(&self, id: u32) -> Result<Vec<u8>, ServiceError> {
        self.tokenizer().token_bytes(id).map_err(decode_error)
    }

    fn is_special(&self, id: u32) -> bool {
        self.tokenizer().is_special(id)
    }

    fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer().token_to_id(token)
    }

    fn template(&self) -> Option<&str> {
        self.template()
    }

    fn reads(&self, name: &str) -> bool {
        self.reads(name)
    }

    fn render_chat(&self, messages: &[Value], rendering: Rendering<'_>) -> Result<String, ServiceError> {
        self.render_chat(messages, rendering)
    }
}

/// Tokens of a [`TextFrontend`] for grammars.
pub(super) struct TextTokens(pub(super) Arc<dyn TextFrontend>);

impl Tokens for TextTokens {
    fn bytes(&self, id: u32) -> Vec<u8> {
        self.0.token_bytes(id).unwrap_or_default()
    }

    fn is_special(&self, id: u32) -> bool {
        self.0.is_special(id)
    }
}

/// Encodes `content`, the value of `field`. Refuses it without encoding if it cannot fit into `context` tokens.
///
/// # Errors
/// Fails if it does not fit, or if the tokenizer does.
pub(super) fn encode(
    text: &dyn TextFrontend,
    context: usize,
    field: &str,
    content: &str,
    special: bool,
) -> Result<Vec<u32>, ServiceError> {
    if let Some(bytes_per_token) = text.bytes_per_token() {
        let least = content.len().div_ceil(bytes_per_token.max(1));
        if least > context {
            return Err(ServiceError {
                code: ErrorCode::ContextLengthExceeded,
                message: format!(
                    "This model's maximum context length is {context} tokens. However, your text of {} bytes is at least {least} tokens. Please reduce its length.",
                    content.len()
                ),
                field: Some(field.to_owned()),
            });
        }
    }
    text.encode(content, special)
        .map_err(|error| if error.field.is_some() { error.about(field) } else { error })
}

/// Converts an error of decoding for the client.
fn decode_error(error: TextError) -> ServiceError {
    match error {
        TextError::TokenId { .. } => ServiceError::invalid("prompt", error.to_string()),
        _ => ServiceError::new(ErrorCode::Internal, error.to_string()),
    }
}
