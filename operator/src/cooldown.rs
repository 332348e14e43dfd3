//! Cooldowns between searches for a plan that follows expert usage.

use jiff::Timestamp;

/// Times before which no new plan is searched. After a restart there are none, and one search is repeated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cooldown {
    /// Cooldown of searches for the usage of answered requests.
    pub drift: Timestamp,
    /// Cooldown of searches for the usage of waiting requests.
    pub wake: Timestamp,
}
