//! Shares of requests in functions: nanoseconds of work and nano-dollars, by phase.

use serde::{Deserialize, Serialize};
use std::ops::AddAssign;

/// Share of a request in one function.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// `main`, or the name of the group; empty in reports of main functions, which do not know tiers.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tier: String,
    /// Nanoseconds of work for the request.
    pub work: Phases,
    /// Cost of that work in nano-dollars.
    pub cost: Phases,
    /// Nanoseconds that the function has worked for all requests since it began to serve.
    pub busy: u64,
}

/// Amounts of the two phases of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phases {
    /// Amount until the first token.
    pub prefill: u64,
    /// Amount after the first token.
    pub decode: u64,
}

/// Phase of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Computation of the prompt, until the first token.
    Prefill,
    /// Generation of tokens.
    Decode,
}

impl Phases {
    /// Returns the amount of `phase`.
    pub fn phase_mut(&mut self, phase: Phase) -> &mut u64 {
        match phase {
            Phase::Prefill => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        }
    }

    /// Returns the sum of both phases.
    #[must_use]
    pub fn sum(self) -> u64 {
        self.prefill.saturating_add(self.decode)
    }
}

/// Adds `more` to `sum`, saturating: numbers that a function reports must not cause an overflow.
pub(crate) fn grow(sum: &mut u64, more: u64) {
    *sum = sum.saturating_add(more);
}

/// Returns the sum of `amounts`, saturating like [`grow`].
pub(crate) fn sum(amounts: impl IntoIterator<Item = u64>) -> u64 {
    amounts.into_iter().fold(0, u64::saturating_add)
}

impl AddAssign for Phases {
    fn add_assign(&mut self, other: Self) {
        grow(&mut self.prefill, other.prefill);
        grow(&mut self.decode, other.decode);
    }
}

/// Billing basis: the time of a function that is paid for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// All time that a function is alive.
    #[default]
    Alive,
    /// Only the time that it works.
    Work,
}
