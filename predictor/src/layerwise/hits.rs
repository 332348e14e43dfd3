//! How many of the experts that came were foreseen.

use crate::error::PredictError;

/// Accuracy over tokens, each 0 to 1; DuoServe-MoE's table 3 has `all` and `any`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HitRates {
    /// Share of the experts used that were predicted.
    pub mean: f64,
    /// Share of tokens all of whose experts were predicted.
    pub all: f64,
    /// Share of tokens at least one of whose experts was predicted.
    pub any: f64,
}

impl HitRates {
    /// Compares `predicted` with `actual`, both [tokens, `top_k`]; all rates are 0 for no token.
    ///
    /// # Errors
    /// The two have different sizes, or no whole number of tokens.
    pub fn of(predicted: &[u16], actual: &[u16], top_k: usize) -> Result<Self, PredictError> {
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
        let rate = |count: usize, of: usize| count as f64 / of.max(1) as f64;
        Ok(Self { mean: rate(hits, actual.len()), all: rate(all, tokens), any: rate(any, tokens) })
    }
}
