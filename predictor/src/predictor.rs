//! The trait of predictors, and the implementations that need no more than a sentence.

use crate::error::PredictError;
use crate::history::History;
use crate::phase::{ByPhase, Phase};
use crate::shares::Shares;

/// Says how the work of a request will spread over the experts.
pub trait Predictor: Send + Sync {
    /// Returns the name of the predictor in tables and files.
    fn name(&self) -> &'static str;

    /// The predicted shares of a phase of the request with this prompt, given as token ids.
    ///
    /// # Errors
    /// The prompt is empty or has a token that the model does not have.
    fn predict(&self, prompt: &[u32], phase: Phase) -> Result<Shares, PredictError>;

    /// Memory that it keeps in bytes, the model's own tensors not counted.
    fn bytes(&self) -> u64;
}

/// DOP of the Remoe paper: the mean of the history, whatever the prompt.
#[derive(Debug, Clone)]
pub struct Popularity {
    mean: ByPhase<Shares>,
}

impl Popularity {
    /// The mean over all prompts of `history`.
    ///
    /// # Errors
    /// The history is empty.
    pub fn of(history: &History) -> Result<Self, PredictError> {
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
            Shares::from_weights(history.experts(), mean)
        };
        Ok(Self { mean: ByPhase::try_each(mean)? })
    }

    /// Means that were saved.
    pub(crate) fn from_shares(mean: ByPhase<Shares>) -> Self {
        Self { mean }
    }

    /// The mean of a phase.
    #[must_use]
    pub fn shares(&self, phase: Phase) -> &Shares {
        self.mean.of(phase)
    }
}

impl Predictor for Popularity {
    fn name(&self) -> &'static str {
        "dop"
    }

    fn predict(&self, prompt: &[u32], phase: Phase) -> Result<Shares, PredictError> {
        if prompt.is_empty() { Err(PredictError::EmptyPrompt) } else { Ok(self.mean.of(phase).clone()) }
    }

    fn bytes(&self) -> u64 {
        Phase::ALL.map(|phase| size_of_val(self.mean.of(phase).values()) as u64).iter().sum()
    }
}

/// EF of the Remoe paper: every expert alike.
#[derive(Debug, Clone)]
pub struct Uniform {
    shares: Shares,
}

impl Uniform {
    /// For a model with these layers and experts.
    #[must_use]
    pub fn new(layers: usize, experts: usize) -> Self {
        Self { shares: Shares::uniform(layers, experts) }
    }
}

impl Predictor for Uniform {
    fn name(&self) -> &'static str {
        "ef"
    }

    fn predict(&self, prompt: &[u32], _: Phase) -> Result<Shares, PredictError> {
        if prompt.is_empty() { Err(PredictError::EmptyPrompt) } else { Ok(self.shares.clone()) }
    }

    fn bytes(&self) -> u64 {
        0
    }
}
