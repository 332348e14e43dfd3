//! Errors of predictions, and of the history that they are made from.

/// Why nothing can be predicted, learned or built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PredictError {
    /// The prompt has no token.
    #[error("empty prompt: expected at least one token")]
    EmptyPrompt,
    /// A token that the model does not have.
    #[error(
        "invalid token id {id}: the vocabulary has {vocabulary} tokens; tokenize the prompt for this model"
    )]
    Token {
        /// The id.
        id: u32,
        /// Rows of the embedding.
        vocabulary: usize,
    },
    /// There is nothing to learn from.
    #[error("training history too small: expected at least {needed} prompts, got {records}; record more")]
    History {
        /// Prompts that are there.
        records: usize,
        /// Prompts that are needed.
        needed: usize,
    },
    /// An option that cannot be.
    #[error("option `{option}` is {value}, {message}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// Value of the option.
        value: String,
        /// Allowed values.
        message: String,
    },
    /// Two things that belong together have different sizes.
    #[error("{what} has {found} values, expected {expected}")]
    Size {
        /// The value that does not fit.
        what: &'static str,
        /// Size that was needed.
        expected: usize,
        /// Size that is there.
        found: usize,
    },
    /// A weight of the model is no number.
    #[error("{what} has a value that is not finite, first at row {row}; the checkpoint is damaged")]
    NotFinite {
        /// The tensor.
        what: &'static str,
        /// First such row.
        row: usize,
    },
    /// Activation counts that cannot be.
    #[error("activation counts: {0}")]
    Activations(String),
    /// Shares in a text that cannot be.
    #[error("expert shares: {0}")]
    Text(String),
    /// The system gives no thread.
    #[error("cannot start a thread to grow the tree: {0}")]
    Thread(String),
    /// A saved predictor that cannot be used.
    #[error("saved predictor: {0}")]
    Saved(String),
}

impl PredictError {
    pub(crate) fn option(option: &'static str, value: impl ToString, message: impl Into<String>) -> Self {
        Self::Option { option, value: value.to_string(), message: message.into() }
    }

    /// Refuses a size that is not the expected one.
    pub(crate) fn require_size(what: &'static str, expected: usize, found: usize) -> Result<(), Self> {
        if expected == found { Ok(()) } else { Err(Self::Size { what, expected, found }) }
    }
}

/// Bytes of a text from a file that a message quotes, at most: it can be as long as the file.
const QUOTED_BYTES: usize = 500;

/// The beginning of a text that a message quotes.
pub(crate) fn quoted(text: impl Into<String>) -> String {
    let mut text = text.into();
    if let Some(end) = (0..=QUOTED_BYTES).rev().find(|&end| text.is_char_boundary(end))
        && end < text.len()
    {
        text.truncate(end);
        text.push('…');
    }
    text
}
