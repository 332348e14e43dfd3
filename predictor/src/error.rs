//! Errors of predictions and of the training history.

/// Reason that a prediction, a training or a build failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PredictError {
    /// The prompt has no token.
    #[error("empty prompt: expected at least one token")]
    EmptyPrompt,
    /// A token is not in the vocabulary.
    #[error(
        "invalid token id {id}: the vocabulary has {vocabulary} tokens; tokenize the prompt for this model"
    )]
    Token {
        /// Id of the token.
        id: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
    /// The training history is too small.
    #[error("training history too small: expected at least {needed} prompts, got {records}; record more")]
    History {
        /// Number of prompts found.
        records: usize,
        /// Number of prompts needed.
        needed: usize,
    },
    /// An option is invalid.
    #[error("option `{option}` is {value}, {message}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// Value of the option.
        value: String,
        /// Allowed values.
        message: String,
    },
    /// A value has another size than its counterpart.
    #[error("{what} has {found} values, expected {expected}")]
    Size {
        /// Description of the value.
        what: &'static str,
        /// Expected size.
        expected: usize,
        /// Actual size.
        found: usize,
    },
    /// A weight of the model is not finite.
    #[error("{what} has a value that is not finite, first at row {row}; the checkpoint is damaged")]
    NotFinite {
        /// Description of the tensor.
        what: &'static str,
        /// First affected row.
        row: usize,
    },
    /// Activation counts are invalid.
    #[error("activation counts: {0}")]
    Activations(String),
    /// The text form of shares is invalid.
    #[error("expert shares: {0}")]
    Text(String),
    /// The system refused a thread.
    #[error("cannot start a thread to grow the tree: {0}")]
    Thread(String),
    /// A saved predictor is invalid or of another version.
    #[error("saved predictor: {0}")]
    Saved(String),
}

impl PredictError {
    pub(crate) fn option(option: &'static str, value: impl ToString, message: impl Into<String>) -> Self {
        Self::Option { option, value: value.to_string(), message: message.into() }
    }

    /// Returns [`Self::Size`] unless the sizes are equal.
    pub(crate) fn require_size(what: &'static str, expected: usize, found: usize) -> Result<(), Self> {
        if expected == found { Ok(()) } else { Err(Self::Size { what, expected, found }) }
    }
}

/// Largest quote from a file in a message, in bytes.
const QUOTED_BYTES: usize = 500;

/// Truncates a text for a message.
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
