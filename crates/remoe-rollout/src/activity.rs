//! Progress of starting functions: loading weights may take long, but must not stall.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Last progress of functions that read or fetch weights.
#[derive(Debug, Clone, Default)]
pub struct Activity(Arc<Mutex<LastActivity>>);

#[derive(Debug, Default)]
struct LastActivity {
    last: Option<Instant>,
    what: String,
}

impl Activity {
    /// Notes progress; `what` describes the total so far, for users.
    pub fn moved(&self, what: String) {
        *self.lock() = LastActivity { last: Some(Instant::now()), what };
    }

    /// Sets the initial description for users, which is no progress.
    pub fn begins(&self, what: String) {
        self.lock().what = what;
    }

    /// Returns the description of the progress so far, for users; empty if there is none.
    #[must_use]
    pub fn what(&self) -> String {
        self.lock().what.clone()
    }

    /// Returns when `silence` will have passed since the last progress, or since `started` if that is later.
    #[must_use]
    pub fn deadline(&self, started: Instant, silence: Duration) -> Instant {
        let last = self.lock().last.map_or(started, |last| last.max(started));
        // Out of the clock's range: practically never.
        last.checked_add(silence).unwrap_or_else(|| last + Duration::from_secs(1 << 30))
    }

    /// Returns whether there was progress within the last `time`.
    #[must_use]
    pub fn moved_within(&self, time: Duration) -> bool {
        self.lock().last.is_some_and(|last| last.elapsed() < time)
    }

    fn lock(&self) -> MutexGuard<'_, LastActivity> {
        // Every change is a single assignment, so the value is consistent after a panic.
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
        // A function that starts later has the full time.
        let later = started + Duration::from_secs(3600);
        assert_eq!(activity.deadline(later, silence), later + silence);
    }
}
