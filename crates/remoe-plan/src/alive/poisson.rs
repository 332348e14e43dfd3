//! Mean state under random arrivals: bursts of geometric sizes in a Poisson process.
//!
//! **Requests present** are a birth-death process with bursts. The flows between n and n + 1 requests are equal in both
//! directions. Let p(n) be the share of time with n requests, `l` the rate of bursts and q = 1 - 1 / burst: a burst continues
//! with probability q. Then
//!
//! `rate(n + 1) p(n + 1) = l a(n) + w P(K > n)`, `a(n) = p(n) + q a(n - 1)`,
//!
//! where `w` is the rate of cold starts and K the number of requests at the end of a start: the burst that began it and all
//! arrivals during it. These are a compound Poisson number with the recursion of the Pólya-Aeppli distribution (Johnson,
//! Kemp, Kotz, Univariate Discrete Distributions, 9.7). Beyond the slots p falls geometrically.
//!
//! Without bursts, starts and waiting, p holds for any distribution of lengths (Cohen, The multiple phase service network
//! with generalized processor sharing, 1979). Otherwise lengths are assumed to be exponential.
//!
//! **At zero.** After the last request, W seconds pass without another one with probability e^-lW. Per such moment there are
//! e^-lW cold starts, and (1 - e^-lW) / l seconds idle but alive. With unbounded slots and a constant S this is Takács's busy
//! period of M/G/inf, T + (e^l(S+W) - 1) / l alive per 1 / l at zero (Introduction to the Theory of Queues, 1962). No
//! exponential of a large number occurs: the probability is at most 1, and p is scaled as it grows.
//!
//! **Several main functions.** The share of time without any request is that of one process with the rate of all
//! (`MainFunctions::rate`). The load is that of one main function with its part of the requests. If each request of a burst
//! goes to one of M main functions at random, one of them gets none, or a geometric number with the mean 1 + (burst - 1) / M.
//! Apart from that main functions are assumed to be independent.
//!
//! **Errors** against simulated engines: `tests/it/alive.rs`, and the table of the README. Waits and times to first token
//! are estimates for a search; `latency.rs` simulates them.

use super::TimeShares;
use super::load::MainFunctions;
use crate::problem::Arrivals;

/// Exponent from which events are neglected: e^-40.
const NEVER: f64 = 40.0;
/// Share that sums neglect.
const NEGLIGIBLE: f64 = 1e-15;
/// Requests per slot from which all main functions are assumed to be full.
const FULL_LOAD: f64 = 4.0;
/// Number of requests during one start above which they are modelled as a fluid.
const FLUID: f64 = 100_000.0;

/// Arrivals of bursts at a queue.
#[derive(Clone, Copy)]
struct Bursts {
    per_second: f64,
    /// Probability that a burst has a further request.
    further: f64,
}

impl Bursts {
    fn new(requests_per_second: f64, size: f64) -> Self {
        Self { per_second: requests_per_second / size, further: 1.0 - 1.0 / size }
    }

    fn requests_per_second(self) -> f64 {
        self.per_second / (1.0 - self.further)
    }
}

/// Computes the mean state under random arrivals, which must be fewer than the main functions can serve.
pub(super) fn expected_time_shares(
    arrivals: &Arrivals,
    start_seconds: f64,
    mains: &MainFunctions<'_>,
) -> TimeShares {
    let (per_second, size) = (arrivals.per_second, arrivals.burst.max(1.0));
    let bursts = Bursts::new(per_second, size);
    let part_size = 1.0 + (size - 1.0) / mains.count;
    let part = Bursts::new(per_second / mains.count, part_size);
    let all = Queue {
        bursts,
        slots: if mains.count > 1.0 { FULL_LOAD * mains.count * mains.slots } else { mains.slots },
        most: mains.most_per_second(),
        rate: |present| mains.rate(present),
    };
    let one = Queue {
        bursts: part,
        slots: mains.slots,
        most: mains.main_rate(mains.slots),
        rate: |present| mains.main_rate(present),
    };
    let one_awake = one.awake();
    // Allen-Cunneen: waits are proportional to the variation of arrivals, 2 b - 1 for geometric bursts, plus that of work,
    // which is below 1 because prefills do not vary. Starts add a separate term (decomposition, Fuhrmann and Cooper 1985).
    let excess = one_awake.queued * (1.0 - mains.variation()) / (2.0 * part_size);
    // Delay by the prompts of the same burst.
    let warm = part.requests_per_second() * mains.held_up(part_size - 1.0);
    let never_asleep = TimeShares {
        alive: 1.0,
        served: one_awake.served,
        held_up: warm,
        before: part_size - 1.0,
        queued: one_awake.queued - excess,
        ..TimeShares::default()
    };
    let windows = match arrivals.idle_seconds {
        Some(idle) if bursts.per_second * idle < NEVER => bursts.per_second * idle,
        _ => return never_asleep,
    };
    let all_awake = all.awake();
    if all_awake.idle < NEGLIGIBLE {
        return never_asleep;
    }

    // Means per moment at which the last request ends.
    let wakes = (-windows).exp();
    let idle = -(-windows).exp_m1() / bursts.per_second;
    let all_started = all.started(start_seconds, 1.0);
    let awake = idle / all_awake.idle + wakes * all_started.time;
    let alive = awake + wakes * start_seconds;
    let whole = alive + wakes / bursts.per_second;

    // Time alive of one main function: after starts, and the rest.
    let wakes = wakes / whole;
    let reached = size / (mains.count * part_size);
    let started = one.started(start_seconds, reached);
    let rest = (awake / whole - wakes * started.time).max(0.0);
    let cold = wakes * (size + per_second * start_seconds);
    let brought = WakeBatch::new(part, start_seconds, reached);
    let cold_held_up = cold / mains.count * mains.held_up(brought.before());
    TimeShares {
        alive: alive / whole,
        wakes,
        cold,
        held_up: (1.0 - cold / per_second).max(0.0) * warm + cold_held_up,
        before: part_size - 1.0
            + (cold / per_second).min(1.0) * (brought.before() - part_size + 1.0).max(0.0),
        // The first burst waits for the whole start, other requests for half of it in the mean.
        awaiting_start: wakes * start_seconds * (size + per_second * start_seconds / 2.0),
        served: rest * one_awake.served + wakes * started.served,
        queued: (rest * one_awake.queued + wakes * started.queued - excess).max(0.0),
    }
}

/// A queue of requests.
struct Queue<R> {
    bursts: Bursts,
    /// Number of requests that are served at once.
    slots: f64,
    /// Service rate with all slots in use.
    most: f64,
    /// Service rate by the number of requests.
    rate: R,
}

/// Sums of time over the number of requests.
#[derive(Default)]
struct TimeSums {
    /// Total time.
    time: f64,
    /// Time without requests.
    idle: f64,
    /// Time times served requests.
    served: f64,
    /// Time times waiting requests.
    queued: f64,
    /// a(n): time from which a burst leads beyond n requests.
    leading: f64,
}

impl TimeSums {
    fn add(&mut self, time: f64, present: f64, slots: f64) {
        self.time += time;
        self.served += time * present.min(slots);
        self.queued += time * (present - slots).max(0.0);
    }

    /// Adds the time with more than `present` requests, where the rate is constant and starts add no requests.
    fn add_rest(&mut self, present: f64, queue_slots: f64, most: f64, bursts: Bursts) {
        let step = bursts.per_second / most;
        let left = 1.0 - bursts.further - step;
        let time = step * self.leading / left;
        self.time += time;
        self.served += time * queue_slots;
        self.queued += time * ((present - queue_slots).max(0.0) + 1.0 / left);
    }

    fn scale(&mut self, factor: f64) {
        for sum in [&mut self.time, &mut self.idle, &mut self.served, &mut self.queued, &mut self.leading] {
            *sum *= factor;
        }
    }
}

impl<R: Fn(f64) -> f64> Queue<R> {
    /// Returns the time shares of a queue that never scales to zero.
    fn awake(&self) -> TimeSums {
        /// Bound above which sums are rescaled.
        const LARGE: f64 = 1e200;
        let mut sums = TimeSums { time: 1.0, idle: 1.0, leading: 1.0, ..TimeSums::default() };
        let mut present = 0.0;
        while present < self.slots && sums.leading > NEGLIGIBLE * NEGLIGIBLE * sums.time {
            present += 1.0;
            let time = self.bursts.per_second * sums.leading / (self.rate)(present);
            sums.add(time, present, self.slots);
            sums.leading = time + self.bursts.further * sums.leading;
            if sums.time > LARGE {
                sums.scale(1.0 / LARGE);
            }
        }
        if present >= self.slots {
            sums.add_rest(present, self.slots, self.most, self.bursts);
        }
        sums.scale(1.0 / sums.time);
        sums
    }

    /// Returns the seconds that a start of `start_seconds` adds, until its last request ends.
    ///
    /// `reached`: probability that the burst that began the start has a request for this queue.
    fn started(&self, start_seconds: f64, reached: f64) -> TimeSums {
        let mut sums = TimeSums::default();
        let mut brought = WakeBatch::new(self.bursts, start_seconds, reached);
        if brought.mean > FLUID {
            sums.time = brought.mean / (self.most - self.bursts.requests_per_second());
            sums.served = sums.time * self.slots;
            sums.queued = sums.time * brought.mean / 2.0;
            return sums;
        }
        let mut present = 0.0;
        loop {
            let settled = brought.is_settled();
            let more = if settled { 0.0 } else { brought.probability_of_more() };
            if settled && present >= self.slots {
                sums.add_rest(present, self.slots, self.most, self.bursts);
                break;
            }
            if settled && sums.leading <= NEGLIGIBLE * NEGLIGIBLE * sums.time {
                break;
            }
            present += 1.0;
            let rate = if present > self.slots { self.most } else { (self.rate)(present) };
            let time = (self.bursts.per_second * sums.leading + more) / rate;
            sums.add(time, present, self.slots);
            sums.leading = time + self.bursts.further * sums.leading;
            brought.next();
        }
        sums
    }
}

/// How many requests a start brings with it, from none upwards.
struct WakeBatch {
    /// In the mean.
    mean: f64,
    /// Bursts while it lasts, in the mean.
    bursts: f64,
    /// Probability that a burst has a further request.
    further: f64,
    /// Chance that the burst that began it brings any.
    reached: f64,
    count: f64,
    /// Chances that as many, and one fewer, come while it lasts; times `scale` they are what they are.
    chances: (f64, f64),
    /// e^`exponent`.
    scale: f64,
    exponent: f64,
    /// Chance that it is this many with those that began it.
    exactly: f64,
    /// Chance that it is this many at most.
    at_most: f64,
}

impl WakeBatch {
    fn new(bursts: Bursts, start_seconds: f64, reached: f64) -> Self {
        let count = bursts.per_second * start_seconds;
        let scale = (-count).exp();
        let none = (1.0 - reached) * scale;
        Self {
            mean: (count + reached) / (1.0 - bursts.further),
            bursts: count,
            further: bursts.further,
            reached,
            count: 0.0,
            chances: (1.0, 0.0),
            scale,
            exponent: -count,
            exactly: none,
            at_most: none,
        }
    }

    /// How many stand before one of them, in the mean over them: half of E[K (K - 1)] / E[K].
    fn before(&self) -> f64 {
        // Of sizes of bursts 2 b^2 - b is the mean square.
        let size = 1.0 / (1.0 - self.further);
        let square = size * (2.0 * size - 1.0);
        let first = self.reached * (square - self.reached * size * size);
        let variance = first + self.bursts * square;
        ((variance / self.mean + self.mean - 1.0) / 2.0).max(0.0)
    }

    /// The chance of more.
    fn probability_of_more(&self) -> f64 {
        (1.0 - self.at_most).max(0.0)
    }

    /// Reports if the remaining probability is negligible.
    fn is_settled(&self) -> bool {
        self.count > self.mean && self.exactly < NEGLIGIBLE * (1.0 - self.further)
    }

    fn next(&mut self) {
        /// Chances are made small again beyond e^this.
        const LARGE: f64 = 400.0;
        let (now, before) = self.chances;
        let q = self.further;
        let factor = self.bursts * (1.0 - q) + 2.0 * q * self.count;
        let next = (factor * now - q * q * (self.count - 1.0) * before) / (self.count + 1.0);
        // The first burst brings none, or geometrically many beside those that come later.
        self.exactly = q * self.exactly
            + self.scale * (self.reached * (1.0 - q) * now + (1.0 - self.reached) * (next - q * now));
        self.at_most += self.exactly;
        self.count += 1.0;
        self.chances = (next, now);
        if next > LARGE.exp() {
            self.chances = (next / LARGE.exp(), now / LARGE.exp());
            self.exponent += LARGE;
            self.scale = self.exponent.exp();
        }
    }
}
