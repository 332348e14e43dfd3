//! Accuracy of predicted experts.

use crate::error::PredictError;

/// Hit rates over tokens, each 0 to 1. Table 3 of DuoServe-MoE reports `all` and `any`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HitRates {
    /// Share of the used experts that were predicted.
    pub mean: f64,
    /// Share of tokens with all experts predicted.
    pub all: f64,
    /// Share of tokens with at least one expert predicted.
    pub any: f64,
}

impl HitRates {
    /// Compares `predicted` with `actual`, both [tokens, `top_k`]. All rates are 0 without tokens.
    ///
    /// # Errors
    /// The sizes differ, or do not hold complete tokens.
    pub fn measure(predicted: &[u16], actual: &[u16], top_k: usize) -> Result<Self, PredictError> {
        PredictError::require_size("a prediction of experts", actual.len(), predicted.len())?;
        let whole = actual.len().next_multiple_of(top_k.max(1));
        PredictError::require_size("a list of experts", whole, actual.len())?;
        let (mut hits, mut all, mut any, mut tokens) = (0, 0, 0, 0);
        for (predicted, actual) in predicted.chunks(top_k.max(1)).zip(actual.chunks(top_k.max(1))) {
            let found = actual.iter().filter(|expert| predicted.contains(expert)).count();
            hits += found;
            all += usize::from(found == actual.len());
            any += usize::from(found > 0);
            tokens += 1;
        }
        let rate = |count: usize, total: usize| count as f64 / total.max(1) as f64;
        Ok(Self { mean: rate(hits, actual.len()), all: rate(all, tokens), any: rate(any, tokens) })
    }
}
