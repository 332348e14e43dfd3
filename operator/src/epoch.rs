//! Times of the cluster as pure steps count them: since 1970.

use jiff::{SignedDuration, Timestamp};
use std::time::Duration;

/// How long after 1970 `time` is; zero: before that.
pub(super) fn since_1970(time: Timestamp) -> Duration {
    Duration::try_from(time.duration_since(Timestamp::UNIX_EPOCH)).unwrap_or_default()
}

/// The time so long after 1970; the last one that can be written where it is later.
pub(super) fn timestamp(since_1970: Duration) -> Timestamp {
    let since = SignedDuration::try_from(since_1970).ok();
    since.and_then(|since| Timestamp::UNIX_EPOCH.checked_add(since).ok()).unwrap_or(Timestamp::MAX)
}
