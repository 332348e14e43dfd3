//! Latencies of requests under load, from a small simulation with the same random numbers on every call.
//!
//! Requests arrive at engines (`engine.rs`) as in [`Arrivals`]. Gaps between bursts and sizes of bursts take the quantiles
//! of their distributions, each once, in a fixed pseudo-random order. So a call is a pure function, and similar plans have
//! similar latencies.
//!
//! **Control variate.** The same requests pass through a queue with one server and the engine's greatest throughput.
//! The mean wait of that queue is known (Pollaczek and Khinchine; bursts: Chaudhry and Templeton, A First Course in
//! Bulk Queues, 1983). The difference between the known and the simulated mean corrects the mean of the engine, by
//! the slope of a regression over batches of requests. Quantiles move with the mean. With one slot and constant
//! requests the mean is that of M/D/1.

use super::engine::{Engine, PrefillingRequest};
use super::load::{MainFunctions, Service};
use super::recorded::hash;
use crate::problem::{Arrivals, Quantile};
use serde::Serialize;

/// Simulated requests without bursts.
const REQUESTS: f64 = 4_000.0;
/// Maximum number of simulated requests.
const MAX_REQUESTS: f64 = 12_000.0;
/// Minimum number of simulated bursts.
const MIN_BURSTS: f64 = 16.0;
/// Number of requests between two checks if the simulation must end.
const CHECK_EVERY: usize = 64;
/// Batches of requests in the regression.
const BATCHES: usize = 32;
/// Largest correction of waits by the control variate, as a factor in both directions.
const MAX_CORRECTION: f64 = 2.0;

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
    /// Returns the quantiles of a constant.
    pub fn constant(seconds: f64) -> Self {
        Self { mean: seconds, p50: seconds, p95: seconds, p99: seconds }
    }

    /// Returns the given quantile, or the mean without one.
    #[must_use]
    pub fn at(&self, quantile: Option<Quantile>) -> f64 {
        match quantile {
            None => self.mean,
            Some(Quantile::P50) => self.p50,
            Some(Quantile::P95) => self.p95,
            Some(Quantile::P99) => self.p99,
        }
    }

    /// Applies `change` to each figure.
    pub fn map(self, change: impl Fn(f64) -> f64) -> Self {
        Self { mean: change(self.mean), p50: change(self.p50), p95: change(self.p95), p99: change(self.p99) }
    }

    /// Computes the quantiles of `values`, which it reorders. Without values all figures are 0.
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
    /// Time to first token of warm requests, including the wait for a slot.
    pub ttft: Quantiles,
    /// Time to first token of all requests, including cold starts.
    pub ttft_with_starts: Quantiles,
    /// Time per output token of a request: the mean over its decode steps, or 0 without decode steps.
    pub tpot: Quantiles,
}

impl Latency {
    /// Returns the latencies if each request waits for `seconds` more.
    pub fn after(self, seconds: f64) -> Self {
        let later = |times: Quantiles| times.map(|time| time + seconds);
        Self { ttft: later(self.ttft), ttft_with_starts: later(self.ttft_with_starts), ..self }
    }
}

/// Simulates the latencies of requests under `arrivals`, with cold starts of `start_seconds`.
///
/// `target_itl`: target inter-token latency of the engine during prefills, in seconds; three decode iterations if absent.
///
/// A call takes up to a few milliseconds. Returns `None` if more requests arrive than can be served.
#[must_use]
pub fn latency(
    arrivals: &Arrivals,
    service: &Service,
    start_seconds: f64,
    target_itl: Option<f64>,
) -> Option<Latency> {
    latency_unless(arrivals, service, start_seconds, target_itl, &|_| false)
}

/// Simulates as [`latency`], and returns `None` as soon as `ends` returns true. It gets the requests since its last call.
pub fn latency_unless(
    arrivals: &Arrivals,
    service: &Service,
    start_seconds: f64,
    target_itl: Option<f64>,
    ends: &dyn Fn(usize) -> bool,
) -> Option<Latency> {
    let mains = MainFunctions::with_target(service, target_itl);
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
                if index.is_multiple_of(CHECK_EVERY) && ends(CHECK_EVERY) {
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

/// Control variate: a queue with a known mean wait that gets the same requests.
struct Control {
    /// Wait of each request.
    waits: Vec<f64>,
    /// Known mean wait.
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
    /// Arrival of each request, and the time at which functions were ready for it.
    arrived: Vec<(f64, f64)>,
}

impl<'a> SimulatedDeployment<'a> {
    fn new(arrivals: &Arrivals, service: &'a Service, start_seconds: f64, target_itl: Option<f64>) -> Self {
        let mains = service.mains.clamp(1, MAX_REQUESTS as u32) as usize;
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

    /// Simulates the arrival of a request. Returns the index of its main function.
    fn arrive(&mut self, now: f64, prefill: f64, steps: f64) -> usize {
        let index = self.arrived.len();
        let chosen = (hash(index as u64) % self.engines.len() as u64) as usize;
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

    /// Simulates random arrivals at the engines and at the control queue. Returns `None` if `ends` returns true.
    fn random(
        &mut self,
        arrivals: &Arrivals,
        mains: &MainFunctions<'_>,
        ends: &dyn Fn(usize) -> bool,
    ) -> Option<Control> {
        let size = arrivals.burst.max(1.0);
        let count = (REQUESTS.max(MAX_REQUESTS.min(REQUESTS * size)) / size).ceil().max(MIN_BURSTS) as usize;
        let (gaps, sizes) = (shuffled(count, 1), shuffled(count, 2));
        let together = |further: &f64| {
            let geometric = if size > 1.0 { further.ln() / (1.0 - 1.0 / size).ln() } else { 0.0 };
            1 + geometric.min(MAX_REQUESTS) as usize
        };
        let requests = sizes.iter().map(together).sum();
        let input = Lengths::new(arrivals.input_variation, requests, 3);
        let output = Lengths::new(arrivals.output_variation, requests, 4);
        let (prefill, steps) = (self.service.prefill_seconds, self.service.steps);
        let main_rate = mains.most_per_second() / mains.count;
        // Share of the prefill in the work of a request.
        let part = (prefill * main_rate).min(1.0);
        let mut control_work = vec![(0.0_f64, 0.0_f64); self.engines.len()];
        let (mut now, mut waits) = (0.0, Vec::new());
        for (gap, further) in gaps.iter().zip(&sizes) {
            now -= gap.ln() * size / arrivals.per_second;
            for _ in 0..together(further) {
                let index = self.arrived.len();
                if index.is_multiple_of(CHECK_EVERY) && ends(CHECK_EVERY) {
                    return None;
                }
                let (of_input, of_output) = (input.factor(index), output.factor(index));
                let whole = if steps > 0.0 { (steps * of_output).round().max(1.0) } else { 0.0 };
                let chosen = self.arrive(now, prefill * of_input, whole);
                let (work, since) = &mut control_work[chosen];
                *work = (*work - (now - *since)).max(0.0);
                waits.push(*work);
                *work += (part * of_input + (1.0 - part) * of_output) / main_rate;
                *since = now;
            }
        }
        let load = arrivals.per_second / mains.most_per_second();
        let variation =
            (part * arrivals.input_variation).powi(2) + ((1.0 - part) * arrivals.output_variation).powi(2);
        // Each request of a burst goes to a random main function.
        let further = (size - 1.0) / mains.count;
        let expected = (load * (1.0 + variation) / 2.0 + further) / ((1.0 - load) * main_rate);
        Some(Control { waits, expected })
    }

    /// Simulates until all requests are done, and returns their latencies.
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
            let factor = factor.clamp(1.0 / MAX_CORRECTION, MAX_CORRECTION);
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
    /// Returns the correction in seconds of the mean of `found`, by a regression on the error of the mean wait.
    fn correction(&self, found: &[f64]) -> f64 {
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let (wait, seconds) = (mean(&self.waits), mean(found));
        let size = (found.len() / BATCHES).max(1);
        let (mut square, mut product) = (0.0, 0.0);
        for (waits, found) in self.waits.chunks(size).zip(found.chunks(size)) {
            let deviation = mean(waits) - wait;
            square += deviation * deviation;
            product += deviation * (mean(found) - seconds);
        }
        let slope = if square > 0.0 { (product / square).clamp(0.0, MAX_CORRECTION) } else { 0.0 };
        slope * (self.expected - wait)
    }
}

/// Lengths of requests relative to their mean: lognormal with a coefficient of variation.
struct Lengths {
    deviation: f64,
    stream: u64,
    /// Radius of each request's normal variable (Box and Muller).
    radii: Vec<f64>,
}

impl Lengths {
    /// Draws the lengths of `count` requests. Each `stream` has its own order.
    fn new(variation: f64, count: usize, stream: u64) -> Self {
        let deviation = (variation * variation).ln_1p().sqrt();
        Self {
            deviation,
            stream: stream + 8,
            radii: if variation > 0.0 { shuffled(count, stream) } else { Vec::new() },
        }
    }

    /// Returns the relative length of the request at `index` (Box and Muller).
    fn factor(&self, index: usize) -> f64 {
        let Some(radius) = self.radii.get(index) else { return 1.0 };
        let normal = (-2.0 * radius.ln()).sqrt()
            * (std::f64::consts::TAU * unit((self.stream << 48) + index as u64)).cos();
        (self.deviation * normal - self.deviation * self.deviation / 2.0).exp()
    }
}

/// Returns a pseudo-random number above 0 and up to 1.
fn unit(index: u64) -> f64 {
    ((hash(index) >> 11) + 1) as f64 / (1_u64 << 53) as f64
}

/// Returns the midpoints of `count` equal parts of the unit interval, shuffled. Each `stream` has its own order.
fn shuffled(count: usize, stream: u64) -> Vec<f64> {
    let mut points: Vec<f64> = (0..count).map(|index| (index as f64 + 0.5) / count as f64).collect();
    for last in (1..count).rev() {
        let other = hash((stream << 48) + last as u64) % (last as u64 + 1);
        points.swap(last, other as usize);
    }
    points
}
