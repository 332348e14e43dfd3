//! Random arrivals: bursts at the moments of a Poisson process, sizes geometric.
//!
//! **Requests present** are a birth-death process with bursts. Between n and n + 1 as many requests pass
//! upwards as downwards: with p(n) the share of time with n requests there, bursts at rate `l` and
//! q = 1 - 1 / burst (a burst goes on with chance q, so q^j brings it more than j further),
//!
//! `rate(n + 1) p(n + 1) = l a(n) + w P(K > n)`, `a(n) = p(n) + q a(n - 1)`,
//!
//! where `w` is the wakes per second and K the requests that a start brings with it: the burst that began
//! it and all that come while it lasts. Those are a compound Poisson number with the recursion of the
//! Pólya-Aeppli distribution (Johnson, Kemp, Kotz, Univariate Discrete Distributions, 9.7). Beyond
//! the slots p falls geometrically and is summed as such.
//!
//! Single requests of any length that share a processor at a speed that depends on their number have just
//! this p (Cohen, The multiple phase service network with generalized processor sharing, 1979); waiting
//! for slots, bursts and starts make it depend on how lengths vary, and exponential ones are meant then.
//!
//! **Asleep.** Whenever the last request goes, chance e^-lW lets W seconds pass without another. Per such
//! moment e^-lW wakes follow, and (1 - e^-lW) / l seconds idle but awake. With unbounded slots and a
//! constant S this is Takács's busy period of M/G/inf, T + (e^l(S+W) - 1) / l alive per 1 / l asleep
//! (Introduction to the Theory of Queues, 1962). No exponential of a large number occurs: the chance is at
//! most 1, and p is scaled as it grows.
//!
//! **Several mains.** How much of the time none has anything is that of one process with the rate of all
//! (`Mains::rate`). The load is that of one main with its part of the requests: a burst of which each
//! request goes to one of M mains by chance brings one main none, or geometrically many, 1 + (burst - 1) / M
//! in the mean. Mains are taken as independent beyond that.
//!
//! **Errors** against engines that run iteration by iteration: `tests/it/alive.rs`, and the table of the README.
//! Waits and times to the first token are estimates for a search: `latency.rs` has them.

use super::Time;
use super::load::Mains;
use crate::problem::Arrivals;

/// Rarer events than e^-this are taken not to happen.
const NEVER: f64 = 40.0;
/// Share that is left out of sums.
const NEGLIGIBLE: f64 = 1e-15;
/// Requests over slots from which several mains are full however requests are spread.
const BEYOND: f64 = 4.0;
/// More requests than these during one start are taken for a fluid.
const FLUID: f64 = 100_000.0;

/// Bursts as they come to a queue.
#[derive(Clone, Copy)]
struct Bursts {
    per_second: f64,
    /// Chance that a burst has a further request.
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

/// Where time goes with random arrivals that are fewer than the mains can serve.
pub(super) fn expect(arrivals: &Arrivals, start_seconds: f64, mains: &Mains<'_>) -> Time {
    let (per_second, size) = (arrivals.per_second, arrivals.burst.max(1.0));
    let bursts = Bursts::new(per_second, size);
    let part_size = 1.0 + (size - 1.0) / mains.count;
    let part = Bursts::new(per_second / mains.count, part_size);
    let all = Queue {
        bursts,
        slots: if mains.count > 1.0 { BEYOND * mains.count * mains.slots } else { mains.slots },
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
    // Allen-Cunneen: waits go with the variation of arrivals, 2 b - 1 for geometric bursts, plus that of
    // work, here below 1 because prefills do not vary. What starts add to them is a term of its own
    // (decomposition, Fuhrmann and Cooper 1985) and stays.
    let excess = one_awake.queued * (1.0 - mains.variation()) / (2.0 * part_size);
    // Prompts of a burst, and of what a start brings.
    let warm = part.requests_per_second() * mains.held_up(part_size - 1.0);
    let never_asleep = Time {
        alive: 1.0,
        served: one_awake.served,
        held_up: warm,
        before: part_size - 1.0,
        queued: one_awake.queued - excess,
        ..Time::default()
    };
    let windows = match arrivals.idle_seconds {
        Some(idle) if bursts.per_second * idle < NEVER => bursts.per_second * idle,
        _ => return never_asleep,
    };
    let all_awake = all.awake();
    if all_awake.idle < NEGLIGIBLE {
        return never_asleep;
    }

    // Per moment at which the last request goes.
    let wakes = (-windows).exp();
    let idle = -(-windows).exp_m1() / bursts.per_second;
    let all_started = all.started(start_seconds, 1.0);
    let awake = idle / all_awake.idle + wakes * all_started.time;
    let alive = awake + wakes * start_seconds;
    let whole = alive + wakes / bursts.per_second;

    // The time that all are awake, for one of them: part of it after starts, the rest as ever.
    let wakes = wakes / whole;
    let reached = size / (mains.count * part_size);
    let started = one.started(start_seconds, reached);
    let rest = (awake / whole - wakes * started.time).max(0.0);
    let cold = wakes * (size + per_second * start_seconds);
    let brought = WakeBatch::new(part, start_seconds, reached);
    let cold_held_up = cold / mains.count * mains.held_up(brought.before());
    Time {
        alive: alive / whole,
        wakes,
        cold,
        held_up: (1.0 - cold / per_second).max(0.0) * warm + cold_held_up,
        before: part_size - 1.0
            + (cold / per_second).min(1.0) * (brought.before() - part_size + 1.0).max(0.0),
        // All of the first burst wait for the whole start, the others for half of it in the mean.
        awaiting_start: wakes * start_seconds * (size + per_second * start_seconds / 2.0),
        served: rest * one_awake.served + wakes * started.served,
        queued: (rest * one_awake.queued + wakes * started.queued - excess).max(0.0),
    }
}

/// Requests that come and are served.
struct Queue<R> {
    bursts: Bursts,
    /// From so many on, further ones wait.
    slots: f64,
    /// Requests completed in a second with that many.
    most: f64,
    rate: R,
}

/// Time with requests, by their number.
#[derive(Default)]
struct TimeSums {
    /// All of it.
    time: f64,
    /// With none.
    idle: f64,
    /// Times the number that is served.
    served: f64,
    /// Times the number that waits.
    queued: f64,
    /// a(n): time from which bursts lead beyond n.
    leading: f64,
}

impl TimeSums {
    fn add(&mut self, time: f64, present: f64, slots: f64) {
        self.time += time;
        self.served += time * present.min(slots);
        self.queued += time * (present - slots).max(0.0);
    }

    /// All that lies beyond `present` requests, where the rate stays `most` and no start adds any.
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
    /// Shares of the time of a queue that never sleeps.
    fn awake(&self) -> TimeSums {
        /// Sums are made small again beyond this.
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

    /// Seconds after a start of `start_seconds` which are there because of it: until the last request has
    /// gone. The burst that began the start brings any here with chance `reached`.
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
            let more = if settled { 0.0 } else { brought.more() };
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
    /// Chance that a burst has a further request.
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
    fn more(&self) -> f64 {
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
