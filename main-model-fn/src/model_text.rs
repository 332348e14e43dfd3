//! Text in and out of token ids: tokenizer and chat template of the checkpoint.

use remoe_model::Checkpoint;
use remoe_model::text::{ChatTemplate, Rendering, TextError, Tokenizer, tools_for_template};
use remoe_proto::{ErrorCode, ServiceError};
use serde_json::Value;
use std::sync::Arc;

/// The checkpoint's tokenizer, and its chat template where it has one.
pub struct ModelText {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
}

impl ModelText {
    /// Opens the tokenizer and chat template of the checkpoint; `None` without a tokenizer.
    ///
    /// # Errors
    /// A file is unreadable or broken.
    pub fn open(checkpoint: &Checkpoint) -> Result<Option<Self>, TextError> {
        let store = checkpoint.store();
        let vocab_size = checkpoint.config().vocab_size;
        let Some(tokenizer) = Tokenizer::open_in(store, vocab_size)? else {
            return Ok(None);
        };
        Ok(Some(Self { tokenizer: Arc::new(tokenizer), template: ChatTemplate::open_in(store)? }))
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The chat template's text.
    pub fn template(&self) -> Option<&str> {
        self.template.as_ref().map(ChatTemplate::source)
    }

    /// Reports if the chat template reads the variable `name`.
    pub fn reads(&self, name: &str) -> bool {
        self.template.as_ref().is_some_and(|template| template.reads(name))
    }

    /// Ids of `text`; `special` adds what the tokenizer's post-processor adds.
    ///
    /// # Errors
    /// The tokenizer refuses, or gives ids that the model does not have.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, ServiceError> {
        self.tokenizer.encode(text, special).map_err(refused)
    }

    /// `messages` as a prompt.
    ///
    /// # Errors
    /// There is no template, it refuses the messages, or it is broken.
    pub fn render_chat(&self, messages: &[Value], rendering: Rendering<'_>) -> Result<String, ServiceError> {
        let template = self.template.as_ref().ok_or_else(|| {
            ServiceError::invalid(
                "messages",
                "missing chat template; use /v1/completions, or add chat_template.jinja to the model folder",
            )
        })?;
        let tools = rendering.tools.map(tools_for_template);
        let rendering = Rendering { tools: tools.as_deref(), ..rendering };
        template.render_with(messages, rendering).map_err(refused)
    }
}

/// Converts a text error for the client: messages that the template refuses or fails on are the client's fault,
/// broken files are ours.
fn refused(error: TextError) -> ServiceError {
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
