//! Which experts several requests use.

use remoe_predictor::{PredictError, Shares};

/// Joint expert usage of several requests: present ones, or past ones.
#[derive(Debug, Clone, PartialEq)]
pub struct JointUsage {
    /// By the tokens of each phase and request.
    pub shares: Shares,
    /// Requests that it is of; of those that were, older ones count for less than one.
    pub requests: f64,
    /// Tokens that it is of, likewise.
    pub tokens: f64,
}

impl JointUsage {
    /// Returns the usage of these requests and of `others`, by their tokens.
    ///
    /// # Errors
    /// `others` are of a model with other layers or experts.
    pub fn with(&self, others: &Self) -> Result<Self, PredictError> {
        let tokens = self.tokens + others.tokens;
        let part = if tokens > 0.0 { others.tokens / tokens } else { 0.0 };
        let shares = self.shares.towards(&others.shares, part)?;
        Ok(Self { shares, requests: self.requests + others.requests, tokens })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn mixes_add_by_tokens() {
        let mix = |weights: [f32; 2], tokens| JointUsage {
            shares: Shares::from_weights(2, weights.to_vec()).unwrap(),
            requests: 2.0,
            tokens,
        };
        let both = mix([1.0, 0.0], 300.0).with(&mix([0.0, 1.0], 100.0)).unwrap();
        assert_eq!((both.requests, both.tokens), (4.0, 400.0));
        let rows = both.shares.to_rows();
        assert!((rows[0][0] - 0.75).abs() < 1e-3, "{rows:?}");
        let other = JointUsage { shares: Shares::uniform(1, 3), ..mix([1.0, 1.0], 1.0) };
        assert!(both.with(&other).is_err());
    }
}
