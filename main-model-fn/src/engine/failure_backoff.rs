//! Backoff of a request whose iterations fail because its experts are out of reach.

use std::time::{Duration, Instant};

/// Time without progress after which a request fails. By then, replicas with an open circuit have been retried.
const MAX_STALL: Duration = Duration::from_secs(30);
/// First pause before a retry.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Longest pause: the pause doubles with each failure.
const MAX_PAUSE: Duration = Duration::from_secs(4);

/// State of a request between a failed iteration and its next progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FailureBackoff {
    /// Start of the first failed iteration, moved forward by times of progress.
    since: Instant,
    pause: Duration,
    /// Earliest time of the next retry.
    pub(crate) until: Instant,
}

impl FailureBackoff {
    /// Excludes `time`, in which the request made progress, from the time without progress.
    pub(crate) fn exclude(&mut self, time: Duration) {
        self.since += time;
    }

    /// Returns the state after one more failed iteration, from `started` to `now`; `None` if the request must fail.
    pub(crate) fn after(previous: Option<Self>, started: Instant, now: Instant) -> Option<Self> {
        let since = previous.map_or(started, |previous| previous.since);
        let pause = previous.map_or(FIRST_PAUSE, |previous| (previous.pause * 2).min(MAX_PAUSE));
        (now.duration_since(since) < MAX_STALL).then(|| Self { since, pause, until: now + pause })
    }
}

/// Selects the requests of the next iteration by their backoffs.
///
/// Requests that retry never share an iteration with others, so that these do not wait for experts which only the former
/// need. If both kinds are ready, `prefer_retries` selects one.
pub(crate) fn select_participants(
    backoffs: &[Option<FailureBackoff>],
    prefer_retries: bool,
    now: Instant,
) -> Vec<bool> {
    let is_ready = |backoff: &FailureBackoff| backoff.until <= now;
    let has_others = backoffs.iter().any(Option::is_none);
    let has_retries = backoffs.iter().flatten().any(is_ready);
    let selects_retries = has_retries && (prefer_retries || !has_others);
    backoffs
        .iter()
        .map(|backoff| match backoff {
            None => !selects_retries,
            Some(backoff) => selects_retries && is_ready(backoff),
        })
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_until_the_request_fails() {
        let started = Instant::now();
        let mut now = started;
        let mut backoff = None;
        let mut pauses = Vec::new();
        while let Some(next) = FailureBackoff::after(backoff, now, now) {
            pauses.push((next.until - now).as_millis());
            backoff = Some(next);
            now = next.until;
        }
        assert_eq!(pauses[..6], [250, 500, 1000, 2000, 4000, 4000]);
        assert!(now - started >= MAX_STALL && now - started < MAX_STALL + MAX_PAUSE);
        // A single long iteration may take all of the time.
        assert_eq!(FailureBackoff::after(None, started, started + MAX_STALL), None);
    }

    #[test]
    fn retries_run_alone_and_in_turn_with_others() {
        let now = Instant::now();
        let ready = FailureBackoff::after(None, now, now).unwrap();
        let later = ready.until;
        let paused = FailureBackoff { until: later + Duration::from_secs(1), ..ready };
        let all = [None, Some(ready), Some(paused)];
        assert_eq!(select_participants(&all, false, later), [true, false, false]);
        assert_eq!(select_participants(&all, true, later), [false, true, false]);
        assert_eq!(select_participants(&all, true, now), [true, false, false], "no retry is due");
        assert_eq!(select_participants(&all[1..], false, later), [true, false], "there are no others");
        assert_eq!(select_participants(&all[1..], false, now), [false, false]);
        assert_eq!(select_participants(&[None, None], true, now), [true, true]);
    }
}
