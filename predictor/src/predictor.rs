//! Trait of predictors, and the baselines DOP and EF.

use crate::error::PredictError;
use crate::history::History;
use crate::phase::{ByPhase, Phase};
use crate::shares::UsageShares;

/// Predictor of the expert shares of a request.
pub trait Predictor: Send + Sync {
    /// Returns the name of the predictor in tables and files.
    fn name(&self) -> &'static str;

    /// Predicts the shares of a phase for a request with this prompt, given as token ids.
    ///
    /// # Errors
    /// The prompt is empty or has a token that the model does not have.
    fn predict(&self, prompt: &[u32], phase: Phase) -> Result<UsageShares, PredictError>;

    /// Returns its memory without the model's own tensors, in bytes.
    fn bytes(&self) -> u64;
}

/// DOP of the Remoe paper: predicts the mean of the history for every prompt.
#[derive(Debug, Clone)]
pub struct Popularity {
    mean: ByPhase<UsageShares>,
}

impl Popularity {
    /// Computes the mean over all prompts of `history`.
    ///
    /// # Errors
    /// The history is empty.
    pub fn from_history(history: &History) -> Result<Self, PredictError> {
        if history.is_empty() {
            return Err(PredictError::History { records: 0, needed: 1 });
        }
        let mean = |phase| {
            let mut sum = vec![0.0_f64; history.layers() * history.experts()];
            for slot in history.slots() {
                let row = history.share_row(slot, phase);
                sum.iter_mut().zip(row).for_each(|(sum, share)| *sum += f64::from(*share));
            }
            let count = history.len() as f64;
            let mean = sum.into_iter().map(|sum| (sum / count) as f32).collect();
            UsageShares::from_weights(history.experts(), mean)
        };
        Ok(Self { mean: ByPhase::try_each(mean)? })
    }

    /// Restores saved means.
    pub(crate) fn from_shares(mean: ByPhase<UsageShares>) -> Self {
        Self { mean }
    }

    /// Returns the mean of a phase.
    #[must_use]
    pub fn shares(&self, phase: Phase) -> &UsageShares {
        self.mean.get(phase)
    }
}

impl Predictor for Popularity {
    fn name(&self) -> &'static str {
        "dop"
    }

    fn predict(&self, prompt: &[u32], phase: Phase) -> Result<UsageShares, PredictError> {
        if prompt.is_empty() { Err(PredictError::EmptyPrompt) } else { Ok(self.mean.get(phase).clone()) }
    }

    fn bytes(&self) -> u64 {
        Phase::ALL.map(|phase| size_of_val(self.mean.get(phase).values()) as u64).iter().sum()
    }
}

/// EF of the Remoe paper: predicts equal shares for all experts.
#[derive(Debug, Clone)]
pub struct Uniform {
    shares: UsageShares,
}

impl Uniform {
    /// Creates the predictor for a model with `layers` layers of `experts` experts.
    #[must_use]
    pub fn new(layers: usize, experts: usize) -> Self {
        Self { shares: UsageShares::uniform(layers, experts) }
    }
}

impl Predictor for Uniform {
    fn name(&self) -> &'static str {
        "ef"
    }

    fn predict(&self, prompt: &[u32], _: Phase) -> Result<UsageShares, PredictError> {
        if prompt.is_empty() { Err(PredictError::EmptyPrompt) } else { Ok(self.shares.clone()) }
    }

    fn bytes(&self) -> u64 {
        0
    }
}
