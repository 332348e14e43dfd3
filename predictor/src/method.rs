//! Prediction methods of a trained predictor.

use serde::{Deserialize, Serialize};

/// Prediction methods of a trained predictor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Mean of the training history (DOP of the paper).
    Dop,
    /// Similar-prompt search with the fitted temperature.
    Sps,
    /// Token table.
    Tokens,
    /// Weighted mixture of the other three.
    Blend,
}

impl Method {
    /// All methods.
    pub const ALL: [Self; 4] = [Self::Dop, Self::Sps, Self::Tokens, Self::Blend];

    /// Returns the name in tables and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dop => "dop",
            Self::Sps => "sps",
            Self::Tokens => "tokens",
            Self::Blend => "blend",
        }
    }
}
