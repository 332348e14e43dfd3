//! How fast a function works, as its answers say, and how long to wait for it. Pure.

use std::time::Duration;

/// Patience with a replica whose speed is not known.
const UNMEASURED: Duration = Duration::from_secs(2);
/// Work may take so many times what was measured before it counts as late: replicas also serve others.
const SLACK: f64 = 8.0;
/// However much work there is, another way is looked for after this time.
const LONGEST: Duration = Duration::from_secs(30);
/// The weight of the newest measurement.
const NEWEST: f64 = 0.25;
/// By how much each measurement forgets the shortest.
const FORGET: f64 = 1.05;

/// Seconds per unit of work, whatever a unit is.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ReplicaPace(Option<Measured>);

#[derive(Debug, Clone, Copy)]
struct Measured {
    /// Smoothed.
    usual: f64,
    /// The shortest of late.
    best: f64,
}

impl ReplicaPace {
    /// Takes note of `units` that took `took`.
    pub(super) fn observe(&mut self, units: u64, took: Duration) {
        let new = took.as_secs_f64() / units.max(1) as f64;
        self.0 = Some(match self.0 {
            None => Measured { usual: new, best: new },
            Some(old) => {
                Measured { usual: old.usual + NEWEST * (new - old.usual), best: new.min(old.best * FORGET) }
            }
        });
    }

    /// Returns the shortest time that `units` take, in seconds: without interference on a busy machine. `None` before
    /// the first measurement.
    pub(super) fn at_best(self, units: u64) -> Option<f64> {
        self.0.map(|measured| measured.best * units as f64)
    }

    /// How long to wait for `units` before something else is tried: some times what they usually
    /// take, `least` at least.
    pub(super) fn patience(self, units: u64, least: Duration) -> Duration {
        let Some(measured) = self.0 else {
            return UNMEASURED.max(least);
        };
        let seconds = (measured.usual * units as f64 * SLACK).min(LONGEST.as_secs_f64());
        Duration::from_secs_f64(seconds).max(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Duration = Duration::from_millis(250);

    #[test]
    fn what_is_not_measured_gets_the_constant() {
        assert_eq!(ReplicaPace::default().patience(1, LEAST), UNMEASURED);
        assert_eq!(ReplicaPace::default().patience(u64::MAX, LEAST), UNMEASURED);
        assert_eq!(ReplicaPace::default().at_best(5), None);
    }

    #[test]
    fn patience_follows_work_and_speed_between_its_bounds() {
        let mut pace = ReplicaPace::default();
        pace.observe(100, Duration::from_secs(1));
        assert_eq!(pace.patience(1, LEAST), LEAST);
        assert_eq!(pace.patience(100, LEAST), Duration::from_secs(8));
        assert_eq!(pace.patience(200, LEAST), Duration::from_secs(16));
        assert_eq!(pace.patience(1 << 40, LEAST), LONGEST);
        // The function becomes ten times as slow: patience follows.
        (0..20).for_each(|_| pace.observe(100, Duration::from_secs(10)));
        assert_eq!(pace.patience(100, LEAST), LONGEST);
        (0..40).for_each(|_| pace.observe(100, Duration::from_secs(1)));
        let patience = pace.patience(100, LEAST);
        assert!(patience > Duration::from_secs(7) && patience < Duration::from_secs(9), "{patience:?}");
    }

    #[test]
    fn one_interrupted_measurement_does_not_change_the_best() {
        let mut pace = ReplicaPace::default();
        pace.observe(1, Duration::from_micros(10));
        pace.observe(1, Duration::from_secs(1));
        assert!(pace.at_best(1).is_some_and(|seconds| seconds < 12e-6));
        // What stays slow is slow.
        (0..300).for_each(|_| pace.observe(1, Duration::from_secs(1)));
        assert!(pace.at_best(1).is_some_and(|seconds| seconds > 0.9));
    }
}
