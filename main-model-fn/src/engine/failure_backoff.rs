//! Tolerance of a request for iterations that fail because experts that it needs are out of reach. Pure.

use std::time::{Duration, Instant};

/// A request that could not go on for this long fails: by then a replica that was taken out has been
/// tried again.
const BUDGET: Duration = Duration::from_secs(30);
/// How long a request waits before it is tried again, the first time ..
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// .. and, failing again and again, at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(4);

/// A request's failed iterations since the last one that brought it on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FailureBackoff {
    /// When the first of them began.
    since: Instant,
    pause: Duration,
    /// It is not tried again before.
    pub(crate) until: Instant,
}

impl FailureBackoff {
    /// For `time` it made progress.
    pub(crate) fn went_on(&mut self, time: Duration) {
        self.since += time;
    }

    /// After one more failed iteration, from `started` to `now`; none when that was one too many.
    pub(crate) fn after(previous: Option<Self>, started: Instant, now: Instant) -> Option<Self> {
        let since = previous.map_or(started, |previous| previous.since);
        let pause = previous.map_or(FIRST_PAUSE, |previous| (previous.pause * 2).min(LONGEST_PAUSE));
        (now.duration_since(since) < BUDGET).then(|| Self { since, pause, until: now + pause })
    }
}

/// Selects the requests that take part in the next iteration, given their setbacks: those that were set back go by
/// themselves, so that no other request waits for experts that only they need, and only once they have rested.
/// `apart` says whose turn it is if there are both.
pub(crate) fn takes_part(setbacks: &[Option<FailureBackoff>], apart: bool, now: Instant) -> Vec<bool> {
    let rested = |failure_backoff: &FailureBackoff| failure_backoff.until <= now;
    let sound = setbacks.iter().any(Option::is_none);
    let back = setbacks.iter().flatten().any(rested);
    let theirs = back && (apart || !sound);
    setbacks
        .iter()
        .map(|failure_backoff| match failure_backoff {
            None => !theirs,
            Some(failure_backoff) => theirs && rested(failure_backoff),
        })
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_the_budget_ends() {
        let started = Instant::now();
        let mut now = started;
        let mut failure_backoff = None;
        let mut pauses = Vec::new();
        while let Some(next) = FailureBackoff::after(failure_backoff, now, now) {
            pauses.push((next.until - now).as_millis());
            failure_backoff = Some(next);
            now = next.until;
        }
        assert_eq!(pauses[..6], [250, 500, 1000, 2000, 4000, 4000]);
        assert!(now - started >= BUDGET && now - started < BUDGET + LONGEST_PAUSE);
        // One iteration alone may use it up.
        assert_eq!(FailureBackoff::after(None, started, started + BUDGET), None);
    }

    #[test]
    fn who_was_set_back_goes_alone_and_in_turns() {
        let now = Instant::now();
        let rested = FailureBackoff::after(None, now, now).unwrap();
        let later = rested.until;
        let resting = FailureBackoff { until: later + Duration::from_secs(1), ..rested };
        let all = [None, Some(rested), Some(resting)];
        assert_eq!(takes_part(&all, false, later), [true, false, false]);
        assert_eq!(takes_part(&all, true, later), [false, true, false]);
        assert_eq!(takes_part(&all, true, now), [true, false, false], "no request has waited");
        assert_eq!(takes_part(&all[1..], false, later), [true, false], "there is no other request");
        assert_eq!(takes_part(&all[1..], false, now), [false, false]);
        assert_eq!(takes_part(&[None, None], true, now), [true, true]);
    }
}
