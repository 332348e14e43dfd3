//! Which experts several requests use.

use remoe_predictor::Shares;

/// What requests use together: those that are here, or those that were.
#[derive(Debug, Clone, PartialEq)]
pub struct Mix {
    /// By the tokens of each phase and request.
    pub shares: Shares,
    /// Requests that it is of; of those that were, older ones count for less than one.
    pub requests: f64,
    /// Tokens that it is of, likewise.
    pub tokens: f64,
}
