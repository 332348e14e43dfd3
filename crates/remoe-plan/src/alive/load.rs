//! How fast main functions serve what they have.
//!
//! The engine (`engine.rs`) lets every decoding request take one step in every iteration, and prompts go on
//! between two of them. While a batch of n requests is kept full, each of n prefills and `steps` steps of n rows
//! pass over every request, and a request takes
//!
//! `s(n) = n * prefill + steps * step(n)`
//!
//! seconds. The main completes n / s(n) requests a second. With n = rate * s(n) (Little) this is the
//! fixed point n = rate * steps * step(n) / (1 - rate * prefill). Batches vary, which `poisson.rs` adds.
//!
//! **Full batch.** Prompts get a slice of each iteration, so they feed at most n = slice * steps / prefill streams.
//! A main with more slots serves no more requests for them.

use super::engine::slice_seconds;
use super::{Alive, Time};

/// Seconds of a request, and how many are served at once.
#[derive(Debug, Clone, PartialEq)]
pub struct Service {
    /// Seconds of a request's prefill.
    pub prefill_seconds: f64,
    /// At index n - 1 the seconds of a decode step with n requests in the batch, not falling with n.
    /// Beyond the last the last one stands.
    pub step_seconds: Vec<f64>,
    /// Decode steps of a request, in the mean.
    pub steps: f64,
    /// Requests that one main serves at once.
    pub concurrency: u32,
    /// Main functions.
    pub mains: u32,
}

/// Halvings in the search for the largest batch: to a billionth.
const HALVINGS: usize = 30;

/// Main functions that requests are spread over.
pub(super) struct Mains<'a> {
    service: &'a Service,
    /// How many.
    pub count: f64,
    /// Slots of each.
    pub slots: f64,
    /// Streams that prompts can feed, 1 to the slots.
    full: f64,
    target_itl: Option<f64>,
}

impl<'a> Mains<'a> {
    /// Mains that aim at an inter-token latency of `target_itl` seconds beside prompts, three decode iterations where
    /// there is none.
    pub(super) fn paced(service: &'a Service, target_itl: Option<f64>) -> Self {
        let (count, slots) = (f64::from(service.mains.max(1)), f64::from(service.concurrency.max(1)));
        let mut mains = Self { service, count, slots, full: slots, target_itl };
        mains.full = mains.full_batch();
        mains
    }

    /// The largest batch that prompts can feed: steps get longer with their batch, so it is found by halving.
    fn full_batch(&self) -> f64 {
        let prefill = self.service.prefill_seconds;
        let feeds = |batch: f64| self.slice_seconds(batch) * self.service.steps >= batch * prefill;
        let (mut low, mut high) = (1.0, self.slots);
        if feeds(high) {
            return high;
        }
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            if feeds(middle) { low = middle } else { high = middle }
        }
        low
    }

    /// Seconds of prompts between two decode iterations of `batch` requests.
    fn slice_seconds(&self, batch: f64) -> f64 {
        slice_seconds(self.step_seconds(batch), self.target_itl)
    }

    /// Seconds of a decode step with `batch` requests, 1 at least; linear between whole ones.
    fn step_seconds(&self, batch: f64) -> f64 {
        let below = (batch as usize).saturating_sub(1);
        let steps = &self.service.step_seconds;
        let last = steps.last().copied().unwrap_or(0.0);
        let at = |index: usize| steps.get(index).copied().unwrap_or(last);
        let part = batch.fract();
        if part == 0.0 { at(below) } else { at(below) + part * (at(below + 1) - at(below)) }
    }

    /// Seconds that a request takes in a batch of `batch`.
    pub(super) fn seconds(&self, batch: f64) -> f64 {
        batch * self.service.prefill_seconds + self.service.steps * self.step_seconds(batch)
    }

    /// Requests that one main completes in a second while `present` are there, served or waiting.
    pub(super) fn main_rate(&self, present: f64) -> f64 {
        let batch = present.min(self.full);
        batch / self.seconds(batch)
    }

    /// As above for all mains, with requests spread by chance.
    ///
    /// A request meets (present - 1) / mains others in the mean. This is exact for one main, and for
    /// many where steps take as long whatever the batch, or where each serves one request at a time
    /// (product form: C(N + M - 1, N) placements of N requests, all alike).
    pub(super) fn rate(&self, present: f64) -> f64 {
        let others = (present - 1.0) / self.count;
        present / (1.0 + others) * self.main_rate(1.0 + others)
    }

    /// The squared coefficient of variation of what requests take in full batches: only their decode
    /// steps vary, geometrically.
    pub(super) fn variation(&self) -> f64 {
        self.decoding(self.full).powi(2)
    }

    /// The part that decode steps have in the time of a request, in a batch of `batch`.
    fn decoding(&self, batch: f64) -> f64 {
        let seconds = self.seconds(batch);
        if seconds > 0.0 { self.service.steps * self.step_seconds(batch) / seconds } else { 1.0 }
    }

    /// Seconds by which `before` prompts that came together with a request's hold it up.
    ///
    /// Prefills come first and in order, so all of them pass before any such request goes. Where lengths
    /// are exponential in everything each goes after half of them: right for requests that are nothing but
    /// a prefill, too early for others.
    pub(super) fn held_up(&self, before: f64) -> f64 {
        let before = before.min((self.slots - 1.0) / 2.0);
        before * self.service.prefill_seconds * self.decoding(1.0 + before)
    }

    /// Requests that all mains complete in a second at most.
    pub(super) fn most_per_second(&self) -> f64 {
        self.count * self.main_rate(self.slots)
    }

    /// Nothing ever comes.
    pub(super) fn unused(&self, awake: bool) -> Alive {
        let time = Time { alive: if awake { 1.0 } else { 0.0 }, ..Time::default() };
        // What one request would take, alone.
        let service_seconds = self.seconds(1.0);
        let tpot_seconds = self.tpot_seconds(service_seconds);
        let first_token_seconds = self.service.prefill_seconds;
        Alive { service_seconds, first_token_seconds, tpot_seconds, ..self.figures(1.0, 0.0, &time) }
    }

    /// More comes than can be served.
    pub(super) fn full(&self, utilisation: f64) -> Alive {
        let per_second = self.most_per_second();
        let time = Time { alive: 1.0, served: self.slots, queued: f64::INFINITY, ..Time::default() };
        Alive { saturated: true, ..self.figures(per_second, utilisation, &time) }
    }

    /// Seconds from a slot to the first token, at `per_second` requests to a main whose time goes as `time` says. An
    /// estimate for searches: [`super::latency`] has the time.
    ///
    /// Prompts are a queue whose server is slower while requests decode (M/G/1). Requests are taken to decode or not
    /// as if each came by itself.
    fn first_token_seconds(&self, per_second: f64, time: &Time) -> f64 {
        let prefill = self.service.prefill_seconds;
        let others = self.slots - 1.0;
        let decoding = (time.served - per_second * prefill).clamp(0.0, others);
        let any = -(-decoding).exp_m1();
        let batch = if any > 0.0 { (decoding / any).min(self.slots) } else { 1.0 };
        let (step, slice) = (self.step_seconds(batch), self.slice_seconds(batch));
        let beside = if slice > 0.0 { any * step / slice } else { 0.0 };
        let iteration = prefill * (1.0 + beside);
        let step = any * step;
        // Those that waited for a slot (in M/M/c so many do) get it between iterations, one by one.
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

    /// Latencies of requests, by Little's law from where time goes.
    pub(super) fn figures(&self, per_second: f64, utilisation: f64, time: &Time) -> Alive {
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
