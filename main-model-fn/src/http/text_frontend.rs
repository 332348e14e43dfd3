//! Text as the HTTP front needs it.

use crate::grammar::Tokens;
use crate::model_text::ModelText;
use remoe_model::text::{Rendering, TextError};
use remoe_proto::{ErrorCode, ServiceError};
use serde_json::Value;
use std::sync::Arc;

/// Turns text into token ids and back. Its calls may take long; the front makes them off its
/// asynchronous threads.
pub(crate) trait TextFrontend: Send + Sync {
    /// Ids of `text`; `special` adds what the tokenizer's post-processor adds.
    ///
    /// # Errors
    /// The tokenizer refuses.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, ServiceError>;

    /// Most bytes of a text per token that it becomes, where there is such a bound.
    fn bytes_per_token(&self) -> Option<usize>;

    /// Text of `ids`, special tokens written out (`special`) or left out.
    ///
    /// # Errors
    /// An id is no token.
    fn decode(&self, ids: &[u32], special: bool) -> Result<String, ServiceError>;

    /// The bytes that a token stands for, alone; parts of a character are no UTF-8.
    ///
    /// # Errors
    /// The id is no token.
    fn token_bytes(&self, id: u32) -> Result<Vec<u8>, ServiceError>;

    /// Reports if the token gives no text unless special tokens are asked for.
    fn is_special(&self, id: u32) -> bool;

    /// The id of a token as the tokenizer writes it.
    fn token_id(&self, token: &str) -> Option<u32>;

    /// The chat template's text.
    fn template(&self) -> Option<&str>;

    /// Reports if the chat template reads the variable `name`.
    fn reads(&self, name: &str) -> bool;

    /// `messages` as a prompt.
    ///
    /// # Errors
    /// There is no template, it refuses the messages, or it is broken.
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
        text.map_err(outside)
    }

    fn token_bytes(&self, id: u32) -> Result<Vec<u8>, ServiceError> {
        self.tokenizer().token_bytes(id).map_err(outside)
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

/// The tokens of a text front, for grammars.
pub(super) struct TextTokens(pub(super) Arc<dyn TextFrontend>);

impl Tokens for TextTokens {
    fn bytes(&self, id: u32) -> Vec<u8> {
        self.0.token_bytes(id).unwrap_or_default()
    }

    fn is_special(&self, id: u32) -> bool {
        self.0.is_special(id)
    }
}

/// Ids of `content`, which stands in `field`. What is too long for `context` tokens whatever it says is
/// refused before it is read.
///
/// # Errors
/// It does not fit, or the tokenizer refuses.
pub(super) fn encode(
    text: &dyn TextFrontend,
    context: usize,
    field: &str,
    content: &str,
    special: bool,
) -> Result<Vec<u32>, ServiceError> {
    if let Some(most) = text.bytes_per_token() {
        let least = content.len().div_ceil(most.max(1));
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

fn outside(error: TextError) -> ServiceError {
    match error {
        TextError::TokenId { .. } => ServiceError::invalid("prompt", error.to_string()),
        _ => ServiceError::new(ErrorCode::Internal, error.to_string()),
    }
}
