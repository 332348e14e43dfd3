//! A group of remote functions that ends by itself, while the main function is always there.
//!
//! Requests that use any of its experts come at random, `l` a second. The first one that finds the group asleep starts
//! it; from then on the group is alive until no such request has been there for the idle window W, nor has it been
//! ready for less than W. It is ready after T seconds. Requests that come before that are served by the main function's
//! fallback meanwhile and take C seconds in all, others S (C is at least S).
//!
//! **Alive per wake.** From a moment at which a request of S seconds begins, the group lives for the busy period of M/D/inf
//! with service L = S + W, B = (e^lL - 1) / l in the mean (Takács, Introduction to the Theory of Queues, 1962). From a
//! moment at which it would end after x seconds without further requests it lives for
//!
//! `E(x) = (1 - e^-lx) e^lL / l` where x is at most L, `x - L + B` beyond.
//!
//! At the end of the start the last request came v = min(Exp(l), T) seconds ago, so that x = max(W, C + W - v), and
//! alive are T and the mean of E(x) over v. Asleep it is 1 / l per wake. All pieces have integrals in closed form.

/// Load of a group that ends by itself, in seconds and requests per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Alone {
    /// Requests that use any of its experts.
    pub per_second: f64,
    /// Without any for so long it ends.
    pub idle_seconds: f64,
    /// From nothing to ready.
    pub start_seconds: f64,
    /// A request, when the group is ready.
    pub service_seconds: f64,
    /// A request that comes while it is not.
    pub cold_seconds: f64,
}

/// Life of such a group: means over all time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AloneTime {
    /// Share of the time in which it is alive, starts included.
    pub share: f64,
    /// Starts per second.
    pub wakes_per_second: f64,
    /// Share of the requests that use it which it is not ready for.
    pub cold_share: f64,
}

/// Beyond e^this a group never ends.
const NEVER: f64 = 40.0;

impl Alone {
    /// How much of the time the group is alive, and how many requests find it not ready.
    #[must_use]
    pub fn time(&self) -> AloneTime {
        let rate = self.per_second;
        if rate <= 0.0 {
            return AloneTime { share: 0.0, wakes_per_second: 0.0, cold_share: 0.0 };
        }
        let lives = self.service_seconds + self.idle_seconds;
        if rate * lives > NEVER {
            return AloneTime { share: 1.0, wakes_per_second: 0.0, cold_share: 0.0 };
        }
        let start = self.start_seconds;
        let alive = start + self.after_start();
        let cycle = alive + 1.0 / rate;
        AloneTime {
            share: alive / cycle,
            wakes_per_second: 1.0 / cycle,
            cold_share: ((1.0 + rate * start) / (rate * cycle)).min(1.0),
        }
    }

    /// Seconds alive from the end of a start on.
    fn after_start(&self) -> f64 {
        let Self { per_second: rate, idle_seconds: idle, start_seconds: start, .. } = *self;
        let cold = self.cold_seconds.max(self.service_seconds);
        let lives = self.service_seconds + idle;
        // e^lL / l, and the busy period B.
        let grown = (rate * lives).exp() / rate;
        let busy = (rate * lives).exp_m1() / rate;
        let late = (cold - self.service_seconds).min(start);
        let until = cold.min(start);
        let survive = |seconds: f64| (-rate * seconds).exp();
        // Where v < C - S: x is beyond L.
        let passed = -(-rate * late).exp_m1();
        let beyond =
            (cold - self.service_seconds) * passed - (passed / rate - late * survive(late)) + passed * busy;
        // Up to v = C the last request is still there, or has gone for less than a window.
        let within = grown * (survive(late) - survive(until) - rate * survive(cold + idle) * (until - late));
        // Then the group has only been ready for less than a window.
        let ready = grown * -(-rate * idle).exp_m1() * (survive(until) - survive(start));
        let only_first =
            survive(start) * self.ends_after((cold + idle - start).max(idle), lives, busy, grown);
        beyond + within + ready + only_first
    }

    /// E(x).
    fn ends_after(&self, seconds: f64, lives: f64, busy: f64, grown: f64) -> f64 {
        if seconds > lives { seconds - lives + busy } else { grown * -(-self.per_second * seconds).exp_m1() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_those_of_simpler_forms() {
        let alone = Alone {
            per_second: 0.01,
            idle_seconds: 60.0,
            start_seconds: 0.0,
            service_seconds: 5.0,
            cold_seconds: 5.0,
        };
        // Nothing to start: Takács's busy period.
        let busy = (0.01_f64 * 65.0).exp_m1() / 0.01;
        assert!((alone.time().share - busy / (busy + 100.0)).abs() < 1e-12);
        assert_eq!(Alone { per_second: 0.0, ..alone }.time().share, 0.0);
        assert_eq!(Alone { per_second: 10.0, ..alone }.time().share, 1.0);
        // A longer window lives longer, and fewer requests meet it asleep.
        let longer = Alone { idle_seconds: 90.0, ..alone };
        assert!(
            longer.time().share > alone.time().share && longer.time().cold_share < alone.time().cold_share
        );
    }
}
