//! Recent expert usage: shares of experts in which older requests weigh less.

use crate::joint_usage::JointUsage;
use remoe_predictor::{Activations, Phase, PredictError, Shares};

/// A request weighs half as much after so many others.
const HALF_LIFE: f64 = 24.0;
/// A request weighs at most so many times what those before it weighed on average, so that one whose counts are not to be
/// believed does not move what all the others used.
const HEAVIEST: f64 = 8.0;
/// Tokens of a request, where none has been seen.
const USUAL_TOKENS: f64 = 512.0;

/// Pairs of (token, expert), the latest most.
#[derive(Debug, Clone, PartialEq)]
pub struct ObservedUsage {
    experts: usize,
    top_k: usize,
    /// [layers, experts] row after row.
    pairs: Vec<f64>,
    /// Requests, forgotten alike: how many there are to go by.
    requests: f64,
    /// Weight of a request of the usual length in the mean, which decays alike.
    usual: f64,
}

impl ObservedUsage {
    /// Nothing yet, of a model with so many layers with experts, experts in each and of a token.
    #[must_use]
    pub fn new(layers: usize, experts: usize, top_k: usize) -> Self {
        Self { experts, top_k, pairs: vec![0.0; layers * experts], requests: 0.0, usual: 1.0 }
    }

    /// A request has ended. Every pair counts, so that long requests weigh what they are worth, up to a limit.
    pub fn add(&mut self, activations: &Activations) {
        let kept = 0.5_f64.powf(1.0 / HALF_LIFE);
        let counts = || activations.counts(Phase::Prefill).iter().zip(activations.counts(Phase::Decode));
        let of = |(prefill, decode): (&u32, &u32)| f64::from(*prefill) + f64::from(*decode);
        let usual = self.usual * USUAL_TOKENS * (self.layers() * self.top_k) as f64;
        let mean = (self.pairs.iter().sum::<f64>() + usual) / (self.requests + self.usual);
        let all = counts().map(of).sum::<f64>();
        let weight = (HEAVIEST * mean / all.max(1.0)).min(1.0);
        for (pairs, counts) in self.pairs.iter_mut().zip(counts()) {
            *pairs = *pairs * kept + weight * of(counts);
        }
        self.requests = self.requests * kept + 1.0;
        self.usual *= kept;
    }

    fn layers(&self) -> usize {
        (self.pairs.len() / self.experts.max(1)).max(1)
    }

    /// Requests to go by: their weights' sum, which is at most about 35.
    #[must_use]
    pub fn requests(&self) -> f64 {
        self.requests
    }

    /// Returns the observed usage; `None` before the first request.
    ///
    /// # Errors
    /// The model has no experts.
    pub fn mix(&self) -> Result<Option<JointUsage>, PredictError> {
        if self.requests == 0.0 {
            return Ok(None);
        }
        let shares =
            Shares::from_weights(self.experts, self.pairs.iter().map(|pairs| *pairs as f32).collect())?;
        let tokens = self.pairs.iter().sum::<f64>() / (self.layers() * self.top_k.max(1)) as f64;
        Ok(Some(JointUsage { shares, requests: self.requests, tokens }))
    }
}
