//! Tokenizer and chat template of the checkpoint.

use remoe_model::Checkpoint;
use remoe_model::text::{ChatTemplate, Rendering, TextError, Tokenizer, tools_for_template};
use remoe_proto::{ErrorCode, ServiceError};
use serde_json::Value;
use std::sync::Arc;

/// The checkpoint's tokenizer, with its chat template if it has one.
pub struct ModelText {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
}

impl ModelText {
    /// Opens the tokenizer and chat template of the checkpoint; `None` without a tokenizer.
    ///
    /// # Errors
    /// Fails if a file is unreadable or invalid.
    pub fn open(checkpoint: &Checkpoint) -> Result<Option<Self>, TextError> {
        let store = checkpoint.store();
        let vocab_size = checkpoint.config().vocab_size;
        let Some(tokenizer) = Tokenizer::open_in(store, vocab_size)? else {
            return Ok(None);
        };
        Ok(Some(Self { tokenizer: Arc::new(tokenizer), template: ChatTemplate::open_in(store)? }))
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Returns the source of the chat template.
    pub fn template(&self) -> Option<&str> {
        self.template.as_ref().map(ChatTemplate::source)
    }

    /// Reports if the chat template reads the variable `name`.
    pub fn reads(&self, name: &str) -> bool {
        self.template.as_ref().is_some_and(|template| template.reads(name))
    }

    /// Encodes `text` to token ids. If `special`, adds the tokens of the tokenizer's post-processor.
    ///
    /// # Errors
    /// Fails if the tokenizer does, or if it gives ids that the model lacks.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, ServiceError> {
        self.tokenizer.encode(text, special).map_err(text_error)
    }

    /// Renders `messages` as a prompt.
    ///
    /// # Errors
    /// Fails if there is no template, or if the template refuses the messages or is invalid.
    pub fn render_chat(&self, messages: &[Value], rendering: Rendering<'_>) -> Result<String, ServiceError> {
        let template = self.template.as_ref().ok_or_else(|| {
            ServiceError::invalid(
                "messages",
                "missing chat template; use /v1/completions, or add chat_template.jinja to the model folder",
            )
        })?;
        let tools = rendering.tools.map(tools_for_template);
        let rendering = Rendering { tools: tools.as_deref(), ..rendering };
        template.render_with(messages, rendering).map_err(text_error)
    }
}

/// Converts a text error for the client. If the template refuses or fails on messages, the client is at fault; invalid
/// files are internal errors.
fn text_error(error: TextError) -> ServiceError {
    match error {
        TextError::TemplateVariable { .. } => {
            ServiceError::invalid("chat_template_kwargs", error.to_string())
        }
        TextError::Refused(_) | TextError::Template { .. } | TextError::NoDefaultTemplate { .. } => {
            ServiceError::invalid("messages", error.to_string())
        }
        TextError::TokenId { .. } | TextError::Untokenizable { .. } => {
            ServiceError::invalid("prompt", error.to_string())
        }
        TextError::Checkpoint(_) | TextError::Tokenizer { .. } | TextError::Vocabulary { .. } => {
            ServiceError::new(ErrorCode::Internal, error.to_string())
        }
    }
}
