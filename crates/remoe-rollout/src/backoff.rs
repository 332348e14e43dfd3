//! Pauses before restarts.

use std::time::Duration;

/// The pauses before a function is started again.
#[derive(Debug, Clone, Copy)]
pub struct Backoff {
    /// The first one.
    pub first: Duration,
    /// They double up to this.
    pub longest: Duration,
}

impl Backoff {
    /// The pause after so many failures in a row; after none there is none.
    pub fn after(self, failures: u32) -> Duration {
        let Some(doublings) = failures.checked_sub(1) else { return Duration::ZERO };
        self.first.saturating_mul(2_u32.saturating_pow(doublings)).min(self.longest)
    }
}
