//! Service rate of main functions.
//!
//! In the engine (`engine.rs`) every decoding request takes one step in each iteration, and prompts are prefilled between
//! two iterations. If a batch of n requests is kept full, each request takes n prefills and `steps` steps of n rows:
//!
//! `s(n) = n * prefill + steps * step(n)`
//!
//! seconds. The main function completes n / s(n) requests per second. With n = rate * s(n) (Little's law) this is the fixed
//! point n = rate * steps * step(n) / (1 - rate * prefill). `poisson.rs` adds the variation of batches.
//!
//! **Full batch.** Prompts get a time slice of each iteration, so they feed at most n = slice * steps / prefill streams.
//! More slots than that do not raise the service rate.

use super::engine::slice_seconds;
use super::{Alive, TimeShares};

/// Service times of requests, and the concurrency and number of main functions.
#[derive(Debug, Clone, PartialEq)]
pub struct Service {
    /// Seconds of a request's prefill.
    pub prefill_seconds: f64,
    /// `[n - 1]`: seconds of a decode step with a batch of n requests, not falling with n. Larger batches take the last one.
    pub step_seconds: Vec<f64>,
    /// Mean decode steps of a request.
    pub steps: f64,
    /// Requests that one main function serves at once.
    pub concurrency: u32,
    /// Number of main functions.
    pub mains: u32,
}

/// Bisection steps of the search for the largest batch: to a billionth.
const BISECTIONS: usize = 30;

/// Main functions that share the requests.
pub(super) struct MainFunctions<'a> {
    service: &'a Service,
    /// Number of main functions.
    pub count: f64,
    /// Slots of each main function.
    pub slots: f64,
    /// Largest batch that prompts can feed, from 1 to the slots.
    full: f64,
    target_itl: Option<f64>,
}

impl<'a> MainFunctions<'a> {
    /// `target_itl`: target inter-token latency during prefills, in seconds; three decode iterations if absent.
    pub(super) fn with_target(service: &'a Service, target_itl: Option<f64>) -> Self {
        let (count, slots) = (f64::from(service.mains.max(1)), f64::from(service.concurrency.max(1)));
        let mut mains = Self { service, count, slots, full: slots, target_itl };
        mains.full = mains.full_batch();
        mains
    }

    /// Returns the largest batch that prompts can feed, by bisection: steps are longer with larger batches.
    fn full_batch(&self) -> f64 {
        let prefill = self.service.prefill_seconds;
        let feeds = |batch: f64| self.slice_seconds(batch) * self.service.steps >= batch * prefill;
        let (mut low, mut high) = (1.0, self.slots);
        if feeds(high) {
            return high;
        }
        for _ in 0..BISECTIONS {
            let middle = (low + high) / 2.0;
            if feeds(middle) { low = middle } else { high = middle }
        }
        low
    }

    /// Returns the seconds of prefill between two decode iterations of `batch` requests.
    fn slice_seconds(&self, batch: f64) -> f64 {
        slice_seconds(self.step_seconds(batch), self.target_itl)
    }

    /// Returns the seconds of a decode step of `batch` requests, at least 1; linear between integers.
    fn step_seconds(&self, batch: f64) -> f64 {
        let below = (batch as usize).saturating_sub(1);
        let steps = &self.service.step_seconds;
        let last = steps.last().copied().unwrap_or(0.0);
        let at = |index: usize| steps.get(index).copied().unwrap_or(last);
        let part = batch.fract();
        if part == 0.0 { at(below) } else { at(below) + part * (at(below + 1) - at(below)) }
    }

    /// Returns the service time of a request in a batch of `batch`.
    pub(super) fn seconds(&self, batch: f64) -> f64 {
        batch * self.service.prefill_seconds + self.service.steps * self.step_seconds(batch)
    }

    /// Returns the service rate of one main function with `present` requests, served or waiting.
    pub(super) fn main_rate(&self, present: f64) -> f64 {
        let batch = present.min(self.full);
        batch / self.seconds(batch)
    }

    /// Returns the service rate of all main functions with `present` requests, assigned at random.
    ///
    /// A request shares its main function with (present - 1) / mains others in the mean. This is exact for one main function.
    /// It is also exact for many if steps do not depend on the batch, or if each serves one request at a time (product form:
    /// C(N + M - 1, N) equally likely placements of N requests).
    pub(super) fn rate(&self, present: f64) -> f64 {
        let others = (present - 1.0) / self.count;
        present / (1.0 + others) * self.main_rate(1.0 + others)
    }

    /// Returns the squared coefficient of variation of service times in full batches: only decode steps vary, geometrically.
    pub(super) fn variation(&self) -> f64 {
        self.decoding(self.full).powi(2)
    }

    /// Returns the share of decode steps in the service time of a request in a batch of `batch`.
    fn decoding(&self, batch: f64) -> f64 {
        let seconds = self.seconds(batch);
        if seconds > 0.0 { self.service.steps * self.step_seconds(batch) / seconds } else { 1.0 }
    }

    /// Returns the seconds by which `before` prompts of the same burst delay a request.
    ///
    /// Prefills run first and in order, so all of them end before any request of the burst does. The exponential model has
    /// each request end after half of them, which is right only without decode steps.
    pub(super) fn held_up(&self, before: f64) -> f64 {
        let before = before.min((self.slots - 1.0) / 2.0);
        before * self.service.prefill_seconds * self.decoding(1.0 + before)
    }

    /// Returns the largest service rate of all main functions, in requests per second.
    pub(super) fn most_per_second(&self) -> f64 {
        self.count * self.main_rate(self.slots)
    }

    /// Returns the load without arrivals. `awake`: set if functions are always alive.
    pub(super) fn unused(&self, awake: bool) -> Alive {
        let time = TimeShares { alive: if awake { 1.0 } else { 0.0 }, ..TimeShares::default() };
        // Service time of a single request.
        let service_seconds = self.seconds(1.0);
        let tpot_seconds = self.tpot_seconds(service_seconds);
        let first_token_seconds = self.service.prefill_seconds;
        Alive { service_seconds, first_token_seconds, tpot_seconds, ..self.latencies(1.0, 0.0, &time) }
    }

    /// Returns the load of saturated main functions.
    pub(super) fn full(&self, utilisation: f64) -> Alive {
        let per_second = self.most_per_second();
        let time =
            TimeShares { alive: 1.0, served: self.slots, queued: f64::INFINITY, ..TimeShares::default() };
        Alive { saturated: true, ..self.latencies(per_second, utilisation, &time) }
    }

    /// Estimates the seconds from admission to first token, at `per_second` requests to one main function.
    ///
    /// The estimate is for searches; [`super::latency`] simulates it. Prompts queue for a server that is slower while
    /// requests decode (M/G/1). Requests are assumed to decode independently of each other.
    fn first_token_seconds(&self, per_second: f64, time: &TimeShares) -> f64 {
        let prefill = self.service.prefill_seconds;
        let others = self.slots - 1.0;
        let decoding = (time.served - per_second * prefill).clamp(0.0, others);
        let any = -(-decoding).exp_m1();
        let batch = if any > 0.0 { (decoding / any).min(self.slots) } else { 1.0 };
        let (step, slice) = (self.step_seconds(batch), self.slice_seconds(batch));
        let beside = if slice > 0.0 { any * step / slice } else { 0.0 };
        let iteration = prefill * (1.0 + beside);
        let step = any * step;
        // Requests that waited for a slot (as many as in M/M/c) are admitted between iterations, one by one.
        let full = time.served / self.slots;
        let waited = if full > 0.0 {
            (time.queued * (1.0 - full).max(0.0) / (full * (1.0 + time.before))).min(1.0)
        } else {
            0.0
        };
        let load = per_second * iteration;
        let queue = if load < 1.0 { load * load / (2.0 * (1.0 - load)) } else { f64::INFINITY };
        let before = queue.min(others * load.min(1.0) / 2.0) + time.before.min(others / 2.0);
        (1.0 - waited) * (step / 2.0 + before * iteration) + iteration
    }

    fn tpot_seconds(&self, service_seconds: f64) -> f64 {
        let beyond_prefill = (service_seconds - self.service.prefill_seconds).max(0.0);
        if self.service.steps > 0.0 { beyond_prefill / self.service.steps } else { 0.0 }
    }

    /// Computes load and latencies by Little's law from the mean state `time`.
    pub(super) fn latencies(&self, per_second: f64, utilisation: f64, time: &TimeShares) -> Alive {
        let per_main = per_second / self.count;
        let in_flight = (time.served + time.held_up).min(self.slots);
        let service_seconds = in_flight / per_main;
        Alive {
            share: time.alive.min(1.0),
            wakes_per_second: time.wakes,
            cold_share: (time.cold / per_second).min(1.0),
            cold_wait_seconds: if time.cold > 0.0 { time.awaiting_start / time.cold } else { 0.0 },
            in_flight,
            service_seconds,
            first_token_seconds: self.first_token_seconds(per_main, time),
            tpot_seconds: self.tpot_seconds(time.served / per_main),
            wait_seconds: time.queued / per_main,
            utilisation,
            saturated: false,
        }
    }
}
