//! Back-off between pods of the same replica. It follows from the incarnation in their names, so it needs no state.

use jiff::SignedDuration;
use remoe_rollout::backoff::Backoff;
use std::time::Duration;

/// Pause between the creation of a pod and that of its replacement. The first replacement is immediate.
pub(crate) const REPLACEMENT_BACKOFF: Backoff =
    Backoff { first: Duration::from_secs(10), longest: Duration::from_secs(300) };

/// Returns how long a pod of this `incarnation` must have existed before it is replaced.
pub(crate) fn pause(incarnation: u32) -> SignedDuration {
    SignedDuration::try_from(REPLACEMENT_BACKOFF.after(incarnation)).unwrap_or(SignedDuration::MAX)
}
