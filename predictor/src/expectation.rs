//! Expected usage on which a placement is based: both phases of a request together.

use crate::error::PredictError;
use crate::error_bars::ErrorBars;
use crate::method::Method;
use crate::phase::ByPhase;
use crate::shares::Shares;
use crate::trained::Trained;

/// How the work of a request, or of a history's requests, will spread over the experts.
#[derive(Debug, Clone, PartialEq)]
pub struct Expectation {
    /// Shares of prefill and decode, weighted by their tokens: what the planner's `prediction` takes.
    pub shares: Shares,
    /// Per layer and number of experts what [`ErrorBars::least_used_p95`] says, weighted likewise: what the
    /// planner's `prediction_p95` takes. Absent where the errors of a phase that has tokens are not known.
    pub least_used_p95: Option<Vec<Vec<f64>>>,
}

impl Trained {
    /// Returns the expected usage of a request with this prompt, given as token ids, and with `tokens` of each phase.
    /// Without a prompt it is that of any request of the history. Without tokens of either phase both count alike.
    ///
    /// # Errors
    /// The prompt is empty or has a token that the model does not have.
    pub fn expectation(
        &self,
        prompt: Option<&[u32]>,
        tokens: ByPhase<f64>,
    ) -> Result<Expectation, PredictError> {
        let of_phase = |phase| match prompt {
            Some(prompt) => {
                let prediction = self.predict_with_errors(prompt, phase)?;
                Ok::<_, PredictError>((prediction.shares, prediction.errors))
            }
            // How far single requests are off the mean of the history is known too.
            None => Ok((self.popularity().shares(phase).clone(), self.errors_of(Method::Dop, phase))),
        };
        let ByPhase { prefill, decode } = ByPhase::try_each(of_phase)?;
        let all = tokens.prefill.max(0.0) + tokens.decode.max(0.0);
        let of_decode = if all > 0.0 { tokens.decode.max(0.0) / all } else { 0.5 };
        let between = |a: f64, b: f64| a + (b - a) * of_decode;
        let factors = |a: &ErrorBars, b: &ErrorBars| {
            let layers = a.least_used_p95.iter().zip(&b.least_used_p95);
            layers.map(|(a, b)| a.iter().zip(b).map(|(a, b)| between(*a, *b)).collect()).collect()
        };
        Ok(Expectation {
            shares: prefill.0.towards(&decode.0, of_decode)?,
            least_used_p95: match (prefill.1, decode.1) {
                (Some(prefill), Some(decode)) => Some(factors(prefill, decode)),
                (Some(prefill), None) if of_decode == 0.0 => Some(prefill.least_used_p95.clone()),
                _ => None,
            },
        })
    }
}
