//! Where experts were computed, and what that took.

use std::time::Duration;

/// Time that iterations spent on routed experts. Requests that share an iteration share its time: each
/// counts it whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpertTime {
    /// In the kernels beside the engine.
    pub local: Duration,
    /// Waiting for remote functions, after local kernels and shared experts were done.
    pub waited: Duration,
    /// Time that remote functions report to have computed, all of them together.
    pub remote: Duration,
    /// Answers of remote functions.
    pub calls: u64,
}

impl ExpertTime {
    /// The longer of both times each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            local: self.local.max(other.local),
            waited: self.waited.max(other.waited),
            remote: self.remote.max(other.remote),
            calls: self.calls.max(other.calls),
        }
    }
}

impl std::ops::AddAssign for ExpertTime {
    fn add_assign(&mut self, other: Self) {
        self.local += other.local;
        self.waited += other.waited;
        self.remote += other.remote;
        self.calls += other.calls;
    }
}

/// (token, expert) pairs by where they were computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpertTally {
    /// By the kernels beside the engine.
    pub local: u64,
    /// By remote functions.
    pub remote: u64,
    /// Placed remotely, computed locally because no replica answered.
    pub fallback: u64,
    /// Messages that were sent again, to another replica.
    pub retries: u64,
}

impl std::ops::AddAssign for ExpertTally {
    fn add_assign(&mut self, other: Self) {
        self.local += other.local;
        self.remote += other.remote;
        self.fallback += other.fallback;
        self.retries += other.retries;
    }
}
