//! Conversion between time stamps of the cluster and the Unix time of pure steps.

use jiff::{SignedDuration, Timestamp};
use std::time::Duration;

/// Returns the time since 1970; zero if `time` is before that.
pub(super) fn since_1970(time: Timestamp) -> Duration {
    Duration::try_from(time.duration_since(Timestamp::UNIX_EPOCH)).unwrap_or_default()
}

/// Returns the time stamp `since_1970` after 1970, clamped to the latest possible one.
pub(super) fn timestamp(since_1970: Duration) -> Timestamp {
    let since = SignedDuration::try_from(since_1970).ok();
    since.and_then(|since| Timestamp::UNIX_EPOCH.checked_add(since).ok()).unwrap_or(Timestamp::MAX)
}
