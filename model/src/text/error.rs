//! What can be wrong with text.

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
        /// What it said.
        message: String,
    },
    /// A token id that the model does not have.
    #[error("token id {id} is not in the vocabulary of {vocab_size} tokens")]
    TokenId {
        /// The id.
        id: u32,
        /// Rows of the model's embedding.
        vocab_size: usize,
    },
    /// The tokenizer gave a token that the model has no embedding for.
    #[error("{}: token id {id} is beyond the model's vocabulary of {vocab_size}; tokenizer and weights do not belong together", path.display())]
    Vocabulary {
        /// The tokenizer's file.
        path: PathBuf,
        /// The id.
        id: u32,
        /// Rows of the model's embedding.
        vocab_size: usize,
    },
    /// The tokenizer panicked on this text.
    #[error(
        "the model's tokenizer cannot take this text of {bytes} bytes: a pattern in it needs more steps than there may be"
    )]
    Untokenizable {
        /// Bytes of the text.
        bytes: usize,
    },
    /// The template refused the conversation (`raise_exception`): the request is wrong.
    #[error("the model's chat template refuses the conversation: {0}")]
    Refused(String),
    /// The template itself is broken, or it ran longer than allowed.
    #[error("{}: the chat template failed: {message}", path.display())]
    Template {
        /// The file that the template came from.
        path: PathBuf,
        /// What failed and in which line.
        message: String,
    },
}
