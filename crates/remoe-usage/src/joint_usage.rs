//! Expert usage of several requests together.

use remoe_predictor::{PredictError, UsageShares};

/// Joint expert usage of several active or past requests.
#[derive(Debug, Clone, PartialEq)]
pub struct JointUsage {
    /// Mean shares, weighted by the tokens of each request and phase.
    pub shares: UsageShares,
    /// Number of requests. Past requests decay, so that older ones count less than one.
    pub requests: f64,
    /// Number of tokens, which decays alike.
    pub tokens: f64,
}

impl JointUsage {
    /// Returns the joint usage of these requests and `others`, weighted by tokens.
    ///
    /// # Errors
    /// The models have different layers or experts.
    pub fn with(&self, others: &Self) -> Result<Self, PredictError> {
        let tokens = self.tokens + others.tokens;
        let weight = if tokens > 0.0 { others.tokens / tokens } else { 0.0 };
        let shares = self.shares.towards(&others.shares, weight)?;
        Ok(Self { shares, requests: self.requests + others.requests, tokens })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn joint_usage_is_weighted_by_tokens() {
        let usage = |weights: [f32; 2], tokens| JointUsage {
            shares: UsageShares::from_weights(2, weights.to_vec()).unwrap(),
            requests: 2.0,
            tokens,
        };
        let both = usage([1.0, 0.0], 300.0).with(&usage([0.0, 1.0], 100.0)).unwrap();
        assert_eq!((both.requests, both.tokens), (4.0, 400.0));
        let rows = both.shares.to_rows();
        assert!((rows[0][0] - 0.75).abs() < 1e-3, "{rows:?}");
        let other = JointUsage { shares: UsageShares::uniform(1, 3), ..usage([1.0, 1.0], 1.0) };
        assert!(both.with(&other).is_err());
    }
}
