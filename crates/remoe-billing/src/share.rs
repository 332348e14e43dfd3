//! A request's share of a function: nanoseconds of work and nano-dollars, by phase.

use serde::{Deserialize, Serialize};
use std::ops::AddAssign;

/// A request's share of one function.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// `main`, or the name of the group; empty where the program did not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tier: String,
    /// Nanoseconds.
    pub work: Phases,
    /// Nano-dollars.
    pub cost: Phases,
    /// Nanoseconds that the function has worked for anybody since it serves.
    pub busy: u64,
}

/// An amount of prompts, and one of generating.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phases {
    /// Until the first token.
    pub prefill: u64,
    /// After it.
    pub decode: u64,
}

/// A part of the work for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Computing its prompt, until the first token.
    Prefill,
    /// Tokens are generated.
    Decode,
}

impl Phases {
    /// The amount of one of them.
    pub fn of(&mut self, phase: Phase) -> &mut u64 {
        match phase {
            Phase::Prefill => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        }
    }

    /// Both together.
    #[must_use]
    pub fn sum(self) -> u64 {
        self.prefill.saturating_add(self.decode)
    }
}

/// Adds `more` to `sum`, which stays at the largest number there is: the figures of a function must not end the program that
/// adds it up.
pub(crate) fn grow(sum: &mut u64, more: u64) {
    *sum = sum.saturating_add(more);
}

/// All `amounts` together, by the rule of [`grow`].
pub(crate) fn sum(amounts: impl IntoIterator<Item = u64>) -> u64 {
    amounts.into_iter().fold(0, u64::saturating_add)
}

impl AddAssign for Phases {
    fn add_assign(&mut self, other: Self) {
        grow(&mut self.prefill, other.prefill);
        grow(&mut self.decode, other.decode);
    }
}

/// Time that a price is asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// The time that a function is alive.
    #[default]
    Alive,
    /// The time that it works.
    Work,
}
