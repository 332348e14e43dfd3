//! Predictors that a trained one can answer with.

use serde::{Deserialize, Serialize};

/// Predictors that a trained one can answer with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// The mean of the history.
    Dop,
    /// Similar past prompts, with the fitted temperature.
    Sps,
    /// The token table.
    Tokens,
    /// The mixture of the three.
    Blend,
}

impl Method {
    /// Every method.
    pub const ALL: [Self; 4] = [Self::Dop, Self::Sps, Self::Tokens, Self::Blend];

    /// Name in tables and files.
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
