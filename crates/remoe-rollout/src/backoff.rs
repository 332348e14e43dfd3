//! Exponential back-off before restarts.

use std::time::Duration;

/// Exponential back-off.
#[derive(Debug, Clone, Copy)]
pub struct Backoff {
    /// First pause.
    pub first: Duration,
    /// Maximum pause; pauses double up to it.
    pub longest: Duration,
}

impl Backoff {
    /// Returns the pause after this many consecutive failures; zero after none.
    pub fn after(self, failures: u32) -> Duration {
        let Some(doublings) = failures.checked_sub(1) else { return Duration::ZERO };
        self.first.saturating_mul(2_u32.saturating_pow(doublings)).min(self.longest)
    }
}
