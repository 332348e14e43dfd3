//! Errors of tokenisation and chat templates.

use std::path::PathBuf;

use crate::error::CheckpointError;

/// Failure to tokenise or detokenise text, or to render a chat template.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file of the checkpoint cannot be read or has a wrong field.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// `tokenizer.json` is not a tokenizer, or it failed on a text.
    #[error("{}: {message}", path.display())]
    Tokenizer {
        /// Tokenizer's file.
        path: PathBuf,
        /// Message of the tokenizer library.
        message: String,
    },
    /// A token id that the model does not have.
    #[error("invalid token id {id}: expected 0 to {}", vocab_size.saturating_sub(1))]
    TokenId {
        /// Token id.
        id: u32,
        /// Rows of the model's embedding.
        vocab_size: usize,
    },
    /// The tokenizer produced a token that the model has no embedding for.
    #[error(
        "{}: token id {id} is beyond the model's vocabulary of {vocab_size}; check that tokenizer and weights belong \
         to one model",
        path.display()
    )]
    Vocabulary {
        /// Tokenizer's file.
        path: PathBuf,
        /// Token id.
        id: u32,
        /// Rows of the model's embedding.
        vocab_size: usize,
    },
    /// The tokenizer library panicked on this text.
    #[error("cannot tokenize a text of {bytes} bytes: the tokenizer's pattern exceeds its step limit")]
    Untokenizable {
        /// Bytes of the text.
        bytes: usize,
    },
    /// The template rejected the conversation with `raise_exception`, so the request is at fault. Holds the
    /// template's message.
    #[error("chat template rejected the conversation: {0}")]
    Refused(String),
    /// The template is invalid, fails on this conversation, or exceeds the limits of a rendering.
    #[error("{}: chat template failed: {message}", path.display())]
    Template {
        /// File that holds the template.
        path: PathBuf,
        /// Cause, with the line if it is known.
        message: String,
    },
    /// The model has several named templates, none of which applies to this conversation.
    #[error(
        "{}: cannot choose a chat template: missing the name `default` among {names}; name one of them `default`",
        path.display()
    )]
    NoDefaultTemplate {
        /// File that holds the first template.
        path: PathBuf,
        /// Names of the templates.
        names: String,
    },
    /// `chat_template_kwargs` of a request set a variable that other fields of the request set.
    #[error("invalid `chat_template_kwargs`: cannot replace `{name}`; use the request's own field for it")]
    TemplateVariable {
        /// Name of the variable.
        name: String,
    },
}
