//! Counts and times of computed experts.

use std::time::Duration;

/// Time that iterations spent on routed experts. Each request of an iteration counts the iteration's whole time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpertTime {
    /// Time in this process's kernels.
    pub local: Duration,
    /// Time spent waiting for remote functions after the local work was done.
    pub waited: Duration,
    /// Compute time that remote functions report, summed over functions.
    pub remote: Duration,
    /// Number of answers of remote functions.
    pub calls: u64,
}

impl ExpertTime {
    /// Returns the maximum of each field.
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

/// Numbers of (token, expert) pairs by where they were computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpertTally {
    /// Computed by this process, as placed.
    pub local: u64,
    /// Computed by remote functions.
    pub remote: u64,
    /// Computed by this process as fallback, although placed remotely.
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
