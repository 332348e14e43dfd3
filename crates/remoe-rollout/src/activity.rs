//! Progress of functions that start: weights may take as long as they take to arrive, but not stand still.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// The last progress of functions that read or fetch weights, as a watcher of them notes it.
#[derive(Debug, Clone, Default)]
pub struct Activity(Arc<Mutex<LastActivity>>);

#[derive(Debug, Default)]
struct LastActivity {
    last: Option<Instant>,
    what: String,
}

impl Activity {
    /// Notes that more has arrived; `what` has in all, for people.
    pub fn moved(&self, what: String) {
        *self.noted() = LastActivity { last: Some(Instant::now()), what };
    }

    /// Notes `what` has arrived at first, for people, which is no progress.
    pub fn begins(&self, what: String) {
        self.noted().what = what;
    }

    /// Returns what has arrived so far, for people; empty where nothing has.
    #[must_use]
    pub fn what(&self) -> String {
        self.noted().what.clone()
    }

    /// Returns when `silence` will have passed since the last progress, or since `started` where that was later.
    #[must_use]
    pub fn deadline(&self, started: Instant, silence: Duration) -> Instant {
        let last = self.noted().last.map_or(started, |last| last.max(started));
        // Beyond the clock: practically never.
        last.checked_add(silence).unwrap_or_else(|| last + Duration::from_secs(1 << 30))
    }

    /// Tells if there was progress within so long.
    #[must_use]
    pub fn moved_within(&self, time: Duration) -> bool {
        self.noted().last.is_some_and(|last| last.elapsed() < time)
    }

    fn noted(&self) -> MutexGuard<'_, LastActivity> {
        // Every change is a single assignment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadline_follows_progress() {
        let (activity, started, silence) = (Activity::default(), Instant::now(), Duration::from_secs(8));
        assert_eq!(activity.deadline(started, silence), started + silence);
        activity.moved("1 of 2 MB".to_owned());
        assert!(activity.deadline(started, silence) > started + silence);
        // A function that starts after that has all of the time.
        let later = started + Duration::from_secs(3600);
        assert_eq!(activity.deadline(later, silence), later + silence);
    }
}
