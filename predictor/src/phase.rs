//! Phases of a request. Their work spreads differently over the experts.

use serde::{Deserialize, Serialize};

/// A phase of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Processing of the prompt.
    Prefill,
    /// Forward passes of one token each after the prompt.
    Decode,
}

impl Phase {
    /// Both phases, in order.
    pub const ALL: [Self; 2] = [Self::Prefill, Self::Decode];

    /// Returns the name of the phase in tables and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Pair of values, one for each phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByPhase<T> {
    /// Value of the prefill.
    pub prefill: T,
    /// Value of the decode steps.
    pub decode: T,
}

impl<T> ByPhase<T> {
    /// Returns the value of `phase`.
    #[must_use]
    pub fn get(&self, phase: Phase) -> &T {
        match phase {
            Phase::Prefill => &self.prefill,
            Phase::Decode => &self.decode,
        }
    }

    /// Returns a pair with `value` for both phases.
    #[must_use]
    pub fn both(value: T) -> Self
    where
        T: Clone,
    {
        Self { prefill: value.clone(), decode: value }
    }

    /// Returns the value of `phase` mutably.
    pub fn get_mut(&mut self, phase: Phase) -> &mut T {
        match phase {
            Phase::Prefill => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        }
    }

    /// Computes the value of each phase with `make`.
    ///
    /// # Errors
    /// The first error of `make`.
    pub fn try_each<E>(mut make: impl FnMut(Phase) -> Result<T, E>) -> Result<Self, E> {
        Ok(Self { prefill: make(Phase::Prefill)?, decode: make(Phase::Decode)? })
    }
}
