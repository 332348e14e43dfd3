//! The two phases of a request, whose work spreads differently over the experts.

use serde::{Deserialize, Serialize};

/// A phase of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The prompt's tokens.
    Prefill,
    /// The forwards of one token after them.
    Decode,
}

impl Phase {
    /// Both, in their order.
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

/// One of something for each phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByPhase<T> {
    /// The prefill's.
    pub prefill: T,
    /// The decode steps'.
    pub decode: T,
}

impl<T> ByPhase<T> {
    /// One phase's.
    #[must_use]
    pub fn of(&self, phase: Phase) -> &T {
        match phase {
            Phase::Prefill => &self.prefill,
            Phase::Decode => &self.decode,
        }
    }

    /// Returns `value` for both phases.
    #[must_use]
    pub fn both(value: T) -> Self
    where
        T: Clone,
    {
        Self { prefill: value.clone(), decode: value }
    }

    /// One phase's, to be changed.
    pub fn of_mut(&mut self, phase: Phase) -> &mut T {
        match phase {
            Phase::Prefill => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        }
    }

    /// Calls `make` for each phase.
    ///
    /// # Errors
    /// The first error of `make`.
    pub fn try_each<E>(mut make: impl FnMut(Phase) -> Result<T, E>) -> Result<Self, E> {
        Ok(Self { prefill: make(Phase::Prefill)?, decode: make(Phase::Decode)? })
    }
}
