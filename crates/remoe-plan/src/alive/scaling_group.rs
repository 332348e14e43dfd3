//! Time alive of a group of remote functions that scales to zero, while the main function stays alive.
//!
//! Requests that use any of its experts arrive at random, `l` per second. The first one that finds the group at zero starts
//! it. The group is ready after T seconds. It stays alive until there was no such request for the idle window W, and it has
//! been ready for at least W. Requests that arrive before it is ready use the main function's local fallback and take C
//! seconds, others take S (C is at least S).
//!
//! **Time alive per wake.** From a moment at which a request of S seconds begins, the group is alive for the busy period of M/D/inf
//! with service L = S + W, B = (e^lL - 1) / l in the mean (Takács, Introduction to the Theory of Queues, 1962). From a
//! moment at which it would stop after x seconds without further requests it is alive for
//!
//! `E(x) = (1 - e^-lx) e^lL / l` where x is at most L, `x - L + B` beyond.
//!
//! At the end of the start the last request arrived v = min(Exp(l), T) seconds ago, so that x = max(W, C + W - v). The group
//! is alive for T plus the mean of E(x) over v, and at zero for 1 / l per wake. All parts have integrals in closed form.

/// Load of a group that scales to zero, in seconds and requests per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScalingGroup {
    /// Requests per second that use any of its experts.
    pub per_second: f64,
    /// Idle window.
    pub idle_seconds: f64,
    /// Cold start.
    pub start_seconds: f64,
    /// Service time of a request if the group is ready.
    pub service_seconds: f64,
    /// Service time of a request that arrives before the group is ready.
    pub cold_seconds: f64,
}

/// Time alive of such a group: means over all time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScalingGroupTime {
    /// Share of the time in which it is alive, including starts.
    pub share: f64,
    /// Cold starts per second.
    pub wakes_per_second: f64,
    /// Share of its requests that arrive before it is ready.
    pub cold_share: f64,
}

/// Exponent from which a group is assumed never to stop: e^-40 is negligible.
const NEVER: f64 = 40.0;

impl ScalingGroup {
    /// Computes the share of the time in which the group is alive, and the share of cold requests.
    #[must_use]
    pub fn time(&self) -> ScalingGroupTime {
        let rate = self.per_second;
        if rate <= 0.0 {
            return ScalingGroupTime { share: 0.0, wakes_per_second: 0.0, cold_share: 0.0 };
        }
        let min_alive = self.service_seconds + self.idle_seconds;
        if rate * min_alive > NEVER {
            return ScalingGroupTime { share: 1.0, wakes_per_second: 0.0, cold_share: 0.0 };
        }
        let start = self.start_seconds;
        let alive = start + self.after_start();
        let cycle = alive + 1.0 / rate;
        ScalingGroupTime {
            share: alive / cycle,
            wakes_per_second: 1.0 / cycle,
            cold_share: ((1.0 + rate * start) / (rate * cycle)).min(1.0),
        }
    }

    /// Returns the mean seconds alive after a start.
    fn after_start(&self) -> f64 {
        let Self { per_second: rate, idle_seconds: idle, start_seconds: start, .. } = *self;
        let cold = self.cold_seconds.max(self.service_seconds);
        // L = S + W: the least time alive after an arrival.
        let min_alive = self.service_seconds + idle;
        // e^lL / l, and the busy period B.
        let grown = (rate * min_alive).exp() / rate;
        let busy = (rate * min_alive).exp_m1() / rate;
        let late = (cold - self.service_seconds).min(start);
        let until = cold.min(start);
        let survive = |seconds: f64| (-rate * seconds).exp();
        // Where v < C - S: x is beyond L.
        let passed = -(-rate * late).exp_m1();
        let beyond =
            (cold - self.service_seconds) * passed - (passed / rate - late * survive(late)) + passed * busy;
        // v < C: the last request is in service, or ended less than a window ago.
        let within = grown * (survive(late) - survive(until) - rate * survive(cold + idle) * (until - late));
        // v > C: the group has been ready for less than a window.
        let ready = grown * -(-rate * idle).exp_m1() * (survive(until) - survive(start));
        let only_first =
            survive(start) * self.mean_alive((cold + idle - start).max(idle), min_alive, busy, grown);
        beyond + within + ready + only_first
    }

    /// Returns E(x) for x = `seconds`.
    fn mean_alive(&self, seconds: f64, min_alive: f64, busy: f64, grown: f64) -> f64 {
        if seconds > min_alive {
            seconds - min_alive + busy
        } else {
            grown * -(-self.per_second * seconds).exp_m1()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_alive_equals_known_limits() {
        let alone = ScalingGroup {
            per_second: 0.01,
            idle_seconds: 60.0,
            start_seconds: 0.0,
            service_seconds: 5.0,
            cold_seconds: 5.0,
        };
        // Without a start it is Takács's busy period.
        let busy = (0.01_f64 * 65.0).exp_m1() / 0.01;
        assert!((alone.time().share - busy / (busy + 100.0)).abs() < 1e-12);
        assert_eq!(ScalingGroup { per_second: 0.0, ..alone }.time().share, 0.0);
        assert_eq!(ScalingGroup { per_second: 10.0, ..alone }.time().share, 1.0);
        // A longer window means more time alive, and fewer cold requests.
        let longer = ScalingGroup { idle_seconds: 90.0, ..alone };
        assert!(
            longer.time().share > alone.time().share && longer.time().cold_share < alone.time().cold_share
        );
    }
}
