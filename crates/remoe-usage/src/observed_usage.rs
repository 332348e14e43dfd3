//! Recent expert usage: shares of experts in which older requests weigh less.

use crate::joint_usage::JointUsage;
use remoe_predictor::{Activations, Phase, PredictError, UsageShares};

/// Number of later requests after which a request's weight has halved.
const HALF_LIFE: f64 = 24.0;
/// Limit of a request's weight, as a multiple of the mean weight before it. It bounds the influence of a request with
/// false counts.
const MAX_WEIGHT_RATIO: f64 = 8.0;
/// Assumed tokens per request before the first one.
const ASSUMED_TOKENS: f64 = 512.0;

/// Decayed counts of (token, expert) assignments of recent requests.
#[derive(Debug, Clone, PartialEq)]
pub struct ObservedUsage {
    experts: usize,
    top_k: usize,
    /// [layers, experts] row after row.
    pairs: Vec<f64>,
    /// Decayed number of requests.
    requests: f64,
    /// Weight of the assumed request in the mean, which decays alike.
    assumed_weight: f64,
}

impl ObservedUsage {
    /// Creates empty counts for a model with `layers` layers of `experts` experts, of which a token uses `top_k`.
    #[must_use]
    pub fn new(layers: usize, experts: usize, top_k: usize) -> Self {
        Self { experts, top_k, pairs: vec![0.0; layers * experts], requests: 0.0, assumed_weight: 1.0 }
    }

    /// Adds the activations of an ended request. Its weight grows with its tokens up to [`MAX_WEIGHT_RATIO`] times the mean.
    pub fn add(&mut self, activations: &Activations) {
        let decay = 0.5_f64.powf(1.0 / HALF_LIFE);
        let counts = || activations.counts(Phase::Prefill).iter().zip(activations.counts(Phase::Decode));
        let pairs_of = |(prefill, decode): (&u32, &u32)| f64::from(*prefill) + f64::from(*decode);
        let assumed_pairs = self.assumed_weight * ASSUMED_TOKENS * (self.layers() * self.top_k) as f64;
        let mean = (self.pairs.iter().sum::<f64>() + assumed_pairs) / (self.requests + self.assumed_weight);
        let request_pairs = counts().map(pairs_of).sum::<f64>();
        let weight = (MAX_WEIGHT_RATIO * mean / request_pairs.max(1.0)).min(1.0);
        for (pairs, counts) in self.pairs.iter_mut().zip(counts()) {
            *pairs = *pairs * decay + weight * pairs_of(counts);
        }
        self.requests = self.requests * decay + 1.0;
        self.assumed_weight *= decay;
    }

    fn layers(&self) -> usize {
        (self.pairs.len() / self.experts.max(1)).max(1)
    }

    /// Returns the decayed number of requests, at most about 35.
    #[must_use]
    pub fn requests(&self) -> f64 {
        self.requests
    }

    /// Returns the usage of recent requests. Returns `None` before the first request.
    ///
    /// # Errors
    /// The model has no experts.
    pub fn joint_usage(&self) -> Result<Option<JointUsage>, PredictError> {
        if self.requests == 0.0 {
            return Ok(None);
        }
        let shares =
            UsageShares::from_weights(self.experts, self.pairs.iter().map(|pairs| *pairs as f32).collect())?;
        let tokens = self.pairs.iter().sum::<f64>() / (self.layers() * self.top_k.max(1)) as f64;
        Ok(Some(JointUsage { shares, requests: self.requests, tokens }))
    }
}
