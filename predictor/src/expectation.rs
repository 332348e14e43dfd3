//! Expected expert usage of a request over both phases, as the planner takes it.

use crate::error::PredictError;
use crate::error_bars::ErrorBars;
use crate::method::Method;
use crate::phase::ByPhase;
use crate::shares::UsageShares;
use crate::trained::TrainedPredictor;

/// Expected shares of a request, or of any request of the history, with their error.
#[derive(Debug, Clone, PartialEq)]
pub struct Expectation {
    /// Shares of prefill and decode, weighted by their tokens: `prediction` of the planner.
    pub shares: UsageShares,
    /// [`ErrorBars::least_used_p95`] of both phases, weighted alike: `prediction_p95` of the planner. Absent if the
    /// errors of a phase with tokens are unknown.
    pub least_used_p95: Option<Vec<Vec<f64>>>,
}

impl TrainedPredictor {
    /// Returns the expected usage of a request with this prompt and `tokens` in each phase. Without a prompt, returns
    /// that of any request of the history. Without tokens in either phase, both count alike.
    ///
    /// # Errors
    /// The prompt is empty or has a token that the model does not have.
    pub fn expectation(
        &self,
        prompt: Option<&[u32]>,
        tokens: ByPhase<f64>,
    ) -> Result<Expectation, PredictError> {
        let predict_phase = |phase| match prompt {
            Some(prompt) => {
                let prediction = self.predict_with_errors(prompt, phase)?;
                Ok::<_, PredictError>((prediction.shares, prediction.errors))
            }
            // The errors of the mean of the history were measured as well.
            None => Ok((self.popularity().shares(phase).clone(), self.errors_of(Method::Dop, phase))),
        };
        let ByPhase { prefill, decode } = ByPhase::try_each(predict_phase)?;
        let total = tokens.prefill.max(0.0) + tokens.decode.max(0.0);
        let decode_share = if total > 0.0 { tokens.decode.max(0.0) / total } else { 0.5 };
        let interpolate = |a: f64, b: f64| a + (b - a) * decode_share;
        let factors = |a: &ErrorBars, b: &ErrorBars| {
            let layers = a.least_used_p95.iter().zip(&b.least_used_p95);
            layers.map(|(a, b)| a.iter().zip(b).map(|(a, b)| interpolate(*a, *b)).collect()).collect()
        };
        Ok(Expectation {
            shares: prefill.0.towards(&decode.0, decode_share)?,
            least_used_p95: match (prefill.1, decode.1) {
                (Some(prefill), Some(decode)) => Some(factors(prefill, decode)),
                (Some(prefill), None) if decode_share == 0.0 => Some(prefill.least_used_p95.clone()),
                _ => None,
            },
        })
    }
}
