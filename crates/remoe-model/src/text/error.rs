//! Errors of text.

use std::path::PathBuf;

use crate::error::CheckpointError;

/// Why text could not be tokenised, detokenised or put into a template.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file of the checkpoint cannot be read or has a wrong field.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// `tokenizer.json` is not a tokenizer, or it failed on a text.
    #[error("{}: {message}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// Message of the tokenizer.
        message: String,
    },
    /// A token id that the model does not have.
    #[error("invalid token id {id}: expected 0 to {}", vocab_size.saturating_sub(1))]
    TokenId {
        /// The id.
        id: u32,
        /// Rows of the model's embedding.
        vocab_size: usize,
    },
    /// The tokenizer gave a token that the model has no embedding for.
    #[error(
        "{}: token id {id} is beyond the model's vocabulary of {vocab_size}; check that tokenizer and weights belong \
         to one model",
        path.display()
    )]
    Vocabulary {
        /// The tokenizer's file.
        path: PathBuf,
        /// The id.
        id: u32,
        /// Rows of the model's embedding.
        vocab_size: usize,
    },
    /// The tokenizer panicked on this text.
    #[error("cannot tokenize a text of {bytes} bytes: the tokenizer's pattern exceeds its step limit")]
    Untokenizable {
        /// Bytes of the text.
        bytes: usize,
    },
    /// The template refused the conversation (`raise_exception`): the request is wrong.
    #[error("chat template rejected the conversation: {0}")]
    Refused(String),
    /// The template itself is broken, or it ran longer than allowed.
    #[error("{}: chat template failed: {message}", path.display())]
    Template {
        /// The file that the template came from.
        path: PathBuf,
        /// Failure, and its line.
        message: String,
    },
    /// The model has several templates, none of which is for this conversation.
    #[error(
        "{}: cannot choose a chat template: missing the name `default` among {names}; name one of them `default`",
        path.display()
    )]
    NoDefaultTemplate {
        /// The file that the first template came from.
        path: PathBuf,
        /// Their names.
        names: String,
    },
    /// A request sets a variable of the template that other fields of it set.
    #[error("invalid `chat_template_kwargs`: cannot replace `{name}`; use the request's own field for it")]
    TemplateVariable {
        /// The variable.
        name: String,
    },
}
