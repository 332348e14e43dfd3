//! Text as the HTTP front needs it.

use crate::text::TextFront;
use remoe_model::text::TextError;
use remoe_wire::{ErrorCode, ServiceError};
use serde_json::Value;

/// Turns text into token ids and back. Its calls may take long; the front makes them off its
/// asynchronous threads.
pub(crate) trait TextFrontend: Send + Sync {
    /// Ids of `text`; `special` adds what the tokenizer's post-processor adds.
    ///
    /// # Errors
    /// The tokenizer refuses.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, ServiceError>;

    /// Text of `ids`, special tokens left out.
    ///
    /// # Errors
    /// An id is no token.
    fn decode(&self, ids: &[u32]) -> Result<String, ServiceError>;

    /// The bytes that a token stands for, alone; parts of a character are no UTF-8.
    ///
    /// # Errors
    /// The id is no token.
    fn token_bytes(&self, id: u32) -> Result<Vec<u8>, ServiceError>;

    /// Whether the token gives no text.
    fn is_special(&self, id: u32) -> bool;

    /// `messages` as a prompt; `generation` opens the assistant's answer.
    ///
    /// # Errors
    /// There is no template, it refuses the messages, or it is broken.
    fn render_chat(&self, messages: &[Value], generation: bool) -> Result<String, ServiceError>;
}

impl TextFrontend for TextFront {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, ServiceError> {
        self.encode(text, special)
    }

    fn decode(&self, ids: &[u32]) -> Result<String, ServiceError> {
        self.tokenizer().decode(ids).map_err(outside)
    }

    fn token_bytes(&self, id: u32) -> Result<Vec<u8>, ServiceError> {
        self.tokenizer().token_bytes(id).map_err(outside)
    }

    fn is_special(&self, id: u32) -> bool {
        self.tokenizer().is_special(id)
    }

    fn render_chat(&self, messages: &[Value], generation: bool) -> Result<String, ServiceError> {
        self.render_chat(messages, generation)
    }
}

fn outside(error: TextError) -> ServiceError {
    match error {
        TextError::TokenId { .. } => ServiceError::invalid("prompt", error.to_string()),
        _ => ServiceError::new(ErrorCode::Internal, error.to_string()),
    }
}
