//! Pauses between searches for a plan that follows expert usage.

use jiff::Timestamp;

/// Times before which no other plan is looked for. An operator that starts has none, and looks once more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cooldown {
    /// For the usage of answered requests.
    pub drift: Timestamp,
    /// For the usage of requests that wake functions.
    pub wake: Timestamp,
}
