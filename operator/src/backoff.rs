//! Back-off between pods that fill the same place: counted in their names, not remembered.

use jiff::SignedDuration;
use remoe_rollout::backoff::Backoff;
use std::time::Duration;

/// Pause after the creation of a pod before another one fills its place. The first replacement is immediate.
pub(crate) const PAUSES: Backoff =
    Backoff { first: Duration::from_secs(10), longest: Duration::from_secs(300) };

/// Returns how long a pod of this `incarnation` must have existed before it is replaced.
pub(crate) fn pause(incarnation: u32) -> SignedDuration {
    SignedDuration::try_from(PAUSES.after(incarnation)).unwrap_or(SignedDuration::MAX)
}
