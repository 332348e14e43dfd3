//! Measured speed of a replica or of loads, and the timeouts that follow from it.

use std::time::Duration;

/// Timeout before the first measurement.
const UNMEASURED: Duration = Duration::from_secs(2);
/// Factor from the usual time to the timeout: replicas also serve other main functions.
const SLACK: f64 = 8.0;
/// Longest timeout, regardless of the amount of work.
const MAX_TIMEOUT: Duration = Duration::from_secs(30);
/// Weight of the newest measurement in the average.
const NEWEST_WEIGHT: f64 = 0.25;
/// Factor by which the best measurement grows with each measurement, so that it is forgotten slowly.
const BEST_GROWTH: f64 = 1.05;

/// Seconds per unit of work. The caller defines the unit.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ReplicaPace(Option<Measured>);

#[derive(Debug, Clone, Copy)]
struct Measured {
    /// Exponentially weighted average, in seconds per unit.
    usual: f64,
    /// Shortest recent measurement, in seconds per unit.
    best: f64,
}

impl ReplicaPace {
    /// Records that `units` units took `took`.
    pub(super) fn observe(&mut self, units: u64, took: Duration) {
        let new = took.as_secs_f64() / units.max(1) as f64;
        self.0 = Some(match self.0 {
            None => Measured { usual: new, best: new },
            Some(old) => Measured {
                usual: old.usual + NEWEST_WEIGHT * (new - old.usual),
                best: new.min(old.best * BEST_GROWTH),
            },
        });
    }

    /// Returns the shortest expected time of `units` units in seconds; `None` before the first measurement.
    pub(super) fn best_seconds(self, units: u64) -> Option<f64> {
        self.0.map(|measured| measured.best * units as f64)
    }

    /// Returns how long to wait for `units` units before trying something else: a multiple of their usual time, and at
    /// least `least`.
    pub(super) fn timeout(self, units: u64, least: Duration) -> Duration {
        let Some(measured) = self.0 else {
            return UNMEASURED.max(least);
        };
        let seconds = (measured.usual * units as f64 * SLACK).min(MAX_TIMEOUT.as_secs_f64());
        Duration::from_secs_f64(seconds).max(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Duration = Duration::from_millis(250);

    #[test]
    fn unmeasured_pace_has_default_timeout() {
        assert_eq!(ReplicaPace::default().timeout(1, LEAST), UNMEASURED);
        assert_eq!(ReplicaPace::default().timeout(u64::MAX, LEAST), UNMEASURED);
        assert_eq!(ReplicaPace::default().best_seconds(5), None);
    }

    #[test]
    fn timeout_follows_work_and_speed_within_bounds() {
        let mut pace = ReplicaPace::default();
        pace.observe(100, Duration::from_secs(1));
        assert_eq!(pace.timeout(1, LEAST), LEAST);
        assert_eq!(pace.timeout(100, LEAST), Duration::from_secs(8));
        assert_eq!(pace.timeout(200, LEAST), Duration::from_secs(16));
        assert_eq!(pace.timeout(1 << 40, LEAST), MAX_TIMEOUT);
        // The function becomes ten times slower: the timeout follows.
        (0..20).for_each(|_| pace.observe(100, Duration::from_secs(10)));
        assert_eq!(pace.timeout(100, LEAST), MAX_TIMEOUT);
        (0..40).for_each(|_| pace.observe(100, Duration::from_secs(1)));
        let timeout = pace.timeout(100, LEAST);
        assert!(timeout > Duration::from_secs(7) && timeout < Duration::from_secs(9), "{timeout:?}");
    }

    #[test]
    fn one_interrupted_measurement_does_not_change_the_best() {
        let mut pace = ReplicaPace::default();
        pace.observe(1, Duration::from_micros(10));
        pace.observe(1, Duration::from_secs(1));
        assert!(pace.best_seconds(1).is_some_and(|seconds| seconds < 12e-6));
        // If it stays slow, the best measurement follows.
        (0..300).for_each(|_| pace.observe(1, Duration::from_secs(1)));
        assert!(pace.best_seconds(1).is_some_and(|seconds| seconds > 0.9));
    }
}
