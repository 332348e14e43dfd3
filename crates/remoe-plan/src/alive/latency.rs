//! Times of requests under load, from a small simulation with the same random numbers on every call.
//!
//! Requests come to engines (`engine.rs`) as [`Arrivals`] say. Gaps between bursts and sizes of bursts take the
//! quantiles of their distributions, each once, in a random order that is always the same. So a call is a pure
//! function, and plans that differ little have times that differ little.
//!
//! **Control variate.** The same requests go through a queue with one server and the engine's greatest throughput.
//! The mean wait of that queue is known (Pollaczek and Khinchine; bursts: Chaudhry and Templeton, A First Course in
//! Bulk Queues, 1983). The difference between the known and the simulated mean corrects the mean of the engine, by
//! the slope of a regression over batches of requests. Quantiles move with the mean. With one slot and constant
//! requests the mean is that of M/D/1.

use super::engine::{Engine, PrefillingRequest};
use super::load::{Mains, Service};
use super::recorded::spread;
use crate::problem::{Arrivals, Quantile};
use serde::Serialize;

/// Requests that are simulated without bursts, and at most.
const REQUESTS: f64 = 4_000.0;
const MOST_REQUESTS: f64 = 12_000.0;
/// Bursts that are simulated, at least.
const LEAST_BURSTS: f64 = 16.0;
/// Requests after which a simulation asks whether to go on.
const ASK_EVERY: usize = 64;
/// Batches of requests in the regression.
const BATCHES: usize = 32;
/// Corrections of waits by the control variate, at most and at least, as factors.
const MOST_CORRECTED: f64 = 2.0;

/// Seconds over requests: the mean and quantiles.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Quantiles {
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// The 95th percentile.
    pub p95: f64,
    /// The 99th percentile.
    pub p99: f64,
}

impl Quantiles {
    /// Returns figures of requests that all take so long.
    pub fn constant(seconds: f64) -> Self {
        Self { mean: seconds, p50: seconds, p95: seconds, p99: seconds }
    }

    /// The figure that a limit names: the mean where it names none.
    #[must_use]
    pub fn at(&self, quantile: Option<Quantile>) -> f64 {
        match quantile {
            None => self.mean,
            Some(Quantile::P50) => self.p50,
            Some(Quantile::P95) => self.p95,
            Some(Quantile::P99) => self.p99,
        }
    }

    /// Each of the figures by `change`.
    pub fn map(self, change: impl Fn(f64) -> f64) -> Self {
        Self { mean: change(self.mean), p50: change(self.p50), p95: change(self.p95), p99: change(self.p99) }
    }

    /// Brings `values` into another order. Without any all figures are 0.
    fn of(values: &mut [f64]) -> Self {
        let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
        let mut at = |share: f64| {
            let rank = ((share * values.len() as f64).ceil() as usize).saturating_sub(1);
            if rank < values.len() { *values.select_nth_unstable_by(rank, f64::total_cmp).1 } else { 0.0 }
        };
        Self { mean, p50: at(0.5), p95: at(0.95), p99: at(0.99) }
    }
}

/// Latencies of requests under load.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Latency {
    /// Time to first token of requests that find functions ready, with the wait for a slot.
    pub ttft: Quantiles,
    /// Time to first token of all requests, with starts from nothing.
    pub ttft_with_starts: Quantiles,
    /// Time per output token of a request, in the mean over its decode steps. 0 without decode steps.
    pub tpot: Quantiles,
}

impl Latency {
    /// Returns the latencies of requests that each wait for so many `seconds` more.
    pub fn after(self, seconds: f64) -> Self {
        let later = |times: Quantiles| times.map(|time| time + seconds);
        Self { ttft: later(self.ttft), ttft_with_starts: later(self.ttft_with_starts), ..self }
    }
}

/// Returns the latencies of requests that come as `arrivals` say to main functions that serve as `service` says and
/// take `start_seconds` from nothing to ready.
///
/// `target_itl` is the inter-token latency that the engine aims at beside prompts, in seconds. Without one it is
/// three decode iterations.
///
/// A call takes up to a few milliseconds. None where more requests come than can be served.
#[must_use]
pub fn latency(
    arrivals: &Arrivals,
    service: &Service,
    start_seconds: f64,
    target_itl: Option<f64>,
) -> Option<Latency> {
    latency_unless(arrivals, service, start_seconds, target_itl, &|_| false)
}

/// [`latency`], given up where `ends` says so, which is told how many requests came since it was asked.
pub fn latency_unless(
    arrivals: &Arrivals,
    service: &Service,
    start_seconds: f64,
    target_itl: Option<f64>,
    ends: &dyn Fn(usize) -> bool,
) -> Option<Latency> {
    let mains = Mains::paced(service, target_itl);
    let per_second = super::mean_per_second(arrivals);
    if per_second <= 0.0 {
        let step =
            if service.steps > 0.0 { service.step_seconds.first().copied().unwrap_or(0.0) } else { 0.0 };
        let ttft = Quantiles::constant(service.prefill_seconds);
        return Some(Latency { ttft, ttft_with_starts: ttft, tpot: Quantiles::constant(step) });
    }
    if per_second >= mains.most_per_second() {
        return None;
    }
    let mut deployment = SimulatedDeployment::new(arrivals, service, start_seconds, target_itl);
    let control = match &arrivals.recorded_seconds {
        Some(times) => {
            let first = times.first().copied().unwrap_or(0.0);
            for (index, time) in times.iter().enumerate() {
                if index.is_multiple_of(ASK_EVERY) && ends(ASK_EVERY) {
                    return None;
                }
                deployment.arrive(time - first, service.prefill_seconds, service.steps.round());
            }
            None
        }
        None => Some(deployment.random(arrivals, &mains, ends)?),
    };
    Some(deployment.latency(control.as_ref()))
}

/// The queue whose mean wait is known, beside the engines.
struct Control {
    /// Wait of each request.
    waits: Vec<f64>,
    /// Their mean over all time.
    expected: f64,
}

struct SimulatedDeployment<'a> {
    service: &'a Service,
    engines: Vec<Engine<'a>>,
    idle_seconds: f64,
    start_seconds: f64,
    is_awake: bool,
    ready: f64,
    last_arrival: f64,
    /// When each request came, and when functions were ready for it.
    arrived: Vec<(f64, f64)>,
}

impl<'a> SimulatedDeployment<'a> {
    fn new(arrivals: &Arrivals, service: &'a Service, start_seconds: f64, target_itl: Option<f64>) -> Self {
        let mains = service.mains.clamp(1, MOST_REQUESTS as u32) as usize;
        Self {
            service,
            engines: vec![Engine::new(service, target_itl); mains],
            idle_seconds: arrivals.idle_seconds.unwrap_or(f64::INFINITY),
            start_seconds,
            is_awake: arrivals.idle_seconds.is_none(),
            ready: 0.0,
            last_arrival: 0.0,
            arrived: Vec::new(),
        }
    }

    /// A request of so many seconds of prefill and decode steps comes. Returns the position of its main function.
    fn arrive(&mut self, now: f64, prefill: f64, steps: f64) -> usize {
        let index = self.arrived.len();
        let chosen = (spread(index as u64) % self.engines.len() as u64) as usize;
        if self.is_awake && now - self.last_arrival >= self.idle_seconds {
            self.engines.iter_mut().for_each(|engine| engine.advance(now));
            let last_done = self.engines.iter().map(|engine| engine.last_done).fold(self.ready, f64::max);
            let is_idle = self.engines.iter().all(Engine::is_idle);
            self.is_awake = !(is_idle && last_done + self.idle_seconds <= now);
        }
        self.last_arrival = now;
        if !self.is_awake {
            (self.is_awake, self.ready) = (true, now + self.start_seconds);
            self.engines.iter_mut().for_each(|engine| engine.now = self.ready);
        }
        self.arrived.push((now, now.max(self.ready)));
        let engine = &mut self.engines[chosen];
        engine.advance(now);
        engine.arrive(PrefillingRequest { index, left: prefill, steps });
        chosen
    }

    /// Lets random requests come, to the engines and to the control queue. None if `ends` says so.
    fn random(
        &mut self,
        arrivals: &Arrivals,
        mains: &Mains<'_>,
        ends: &dyn Fn(usize) -> bool,
    ) -> Option<Control> {
        let size = arrivals.burst.max(1.0);
        let count =
            (REQUESTS.max(MOST_REQUESTS.min(REQUESTS * size)) / size).ceil().max(LEAST_BURSTS) as usize;
        let (gaps, sizes) = (shuffled(count, 1), shuffled(count, 2));
        let together = |further: &f64| {
            let geometric = if size > 1.0 { further.ln() / (1.0 - 1.0 / size).ln() } else { 0.0 };
            1 + geometric.min(MOST_REQUESTS) as usize
        };
        let requests = sizes.iter().map(together).sum();
        let input = Lengths::new(arrivals.input_variation, requests, 3);
        let output = Lengths::new(arrivals.output_variation, requests, 4);
        let (prefill, steps) = (self.service.prefill_seconds, self.service.steps);
        let main_rate = mains.most_per_second() / mains.count;
        // Of the time that a request costs, its prefill's part.
        let part = (prefill * main_rate).min(1.0);
        let mut owed = vec![(0.0_f64, 0.0_f64); self.engines.len()];
        let (mut now, mut waits) = (0.0, Vec::new());
        for (gap, further) in gaps.iter().zip(&sizes) {
            now -= gap.ln() * size / arrivals.per_second;
            for _ in 0..together(further) {
                let index = self.arrived.len();
                if index.is_multiple_of(ASK_EVERY) && ends(ASK_EVERY) {
                    return None;
                }
                let (of_input, of_output) = (input.factor(index), output.factor(index));
                let whole = if steps > 0.0 { (steps * of_output).round().max(1.0) } else { 0.0 };
                let chosen = self.arrive(now, prefill * of_input, whole);
                let (work, since) = &mut owed[chosen];
                *work = (*work - (now - *since)).max(0.0);
                waits.push(*work);
                *work += (part * of_input + (1.0 - part) * of_output) / main_rate;
                *since = now;
            }
        }
        let load = arrivals.per_second / mains.most_per_second();
        let variation =
            (part * arrivals.input_variation).powi(2) + ((1.0 - part) * arrivals.output_variation).powi(2);
        // Of a burst each request goes to one of the main functions by chance.
        let further = (size - 1.0) / mains.count;
        let expected = (load * (1.0 + variation) / 2.0 + further) / ((1.0 - load) * main_rate);
        Some(Control { waits, expected })
    }

    /// Lets all requests end.
    fn latency(mut self, control: Option<&Control>) -> Latency {
        let mut all = vec![f64::NAN; self.arrived.len()];
        let mut steps = Vec::new();
        for engine in &mut self.engines {
            engine.advance(f64::INFINITY);
            for (index, time) in &engine.first_tokens {
                all[*index] = time - self.arrived[*index].0;
            }
            steps.append(&mut engine.steps_took);
        }
        let correction = control.map_or(0.0, |control| control.correction(&all));
        let is_warm = |(arrived, ready): &(f64, f64)| arrived >= ready;
        let mut warm: Vec<f64> = all
            .iter()
            .zip(&self.arrived)
            .filter(|(_, times)| is_warm(times))
            .map(|(seconds, _)| *seconds)
            .collect();
        if warm.is_empty() {
            warm = all
                .iter()
                .zip(&self.arrived)
                .map(|(ttft, (arrived, ready))| ttft - (ready - arrived))
                .collect();
        }
        let corrected = |values: &mut [f64]| {
            let found = Quantiles::of(values);
            let least = values.iter().copied().reduce(f64::min).unwrap_or(0.0);
            let wait = found.mean - least;
            let factor = if wait > 0.0 { 1.0 + correction / wait } else { 1.0 };
            let factor = factor.clamp(1.0 / MOST_CORRECTED, MOST_CORRECTED);
            found.map(|seconds| least + (seconds - least) * factor)
        };
        let ttft = corrected(&mut warm);
        Latency {
            ttft,
            ttft_with_starts: if warm.len() == all.len() { ttft } else { corrected(&mut all) },
            tpot: Quantiles::of(&mut steps),
        }
    }
}

impl Control {
    /// Seconds by which the mean of `found` is wrong, from how wrong the mean of the waits is.
    fn correction(&self, found: &[f64]) -> f64 {
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let (wait, seconds) = (mean(&self.waits), mean(found));
        let size = (found.len() / BATCHES).max(1);
        let (mut square, mut product) = (0.0, 0.0);
        for (waits, found) in self.waits.chunks(size).zip(found.chunks(size)) {
            let apart = mean(waits) - wait;
            square += apart * apart;
            product += apart * (mean(found) - seconds);
        }
        let slope = if square > 0.0 { (product / square).clamp(0.0, MOST_CORRECTED) } else { 0.0 };
        slope * (self.expected - wait)
    }
}

/// Lengths of requests over their mean: lognormal with a coefficient of variation.
struct Lengths {
    deviation: f64,
    stream: u64,
    /// Part of each request's draw that decides how far it is from typical.
    radii: Vec<f64>,
}

impl Lengths {
    /// Lengths of `count` requests, in an order of its own for each `stream`.
    fn new(variation: f64, count: usize, stream: u64) -> Self {
        let deviation = (variation * variation).ln_1p().sqrt();
        Self {
            deviation,
            stream: stream + 8,
            radii: if variation > 0.0 { shuffled(count, stream) } else { Vec::new() },
        }
    }

    /// The factor of the request at `index`: Box and Muller.
    fn factor(&self, index: usize) -> f64 {
        let Some(radius) = self.radii.get(index) else { return 1.0 };
        let normal = (-2.0 * radius.ln()).sqrt()
            * (std::f64::consts::TAU * unit((self.stream << 48) + index as u64)).cos();
        (self.deviation * normal - self.deviation * self.deviation / 2.0).exp()
    }
}

/// A number above 0 and at most 1.
fn unit(index: u64) -> f64 {
    ((spread(index) >> 11) + 1) as f64 / (1_u64 << 53) as f64
}

/// The midpoints of `count` equal parts of the unit interval, in a random order of its own for each `stream`.
fn shuffled(count: usize, stream: u64) -> Vec<f64> {
    let mut points: Vec<f64> = (0..count).map(|index| (index as f64 + 0.5) / count as f64).collect();
    for last in (1..count).rev() {
        let other = spread((stream << 48) + last as u64) % (last as u64 + 1);
        points.swap(last, other as usize);
    }
    points
}
