//! Simulation of a deployment's engines with random arrivals, against which the planner's latencies are compared. It
//! follows `main-model-fn/src/engine/{thread,pace,scheduler}.rs` line by line, independently of the planner.

mod main_function;

use crate::generate::SplitMix64;
use main_function::{Engine, EngineRequest};

/// A deployment and its arrivals.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    pub(crate) per_second: f64,
    pub(crate) burst: f64,
    pub(crate) idle_seconds: Option<f64>,
    pub(crate) start_seconds: f64,
    /// In the mean.
    pub(crate) prefill_seconds: f64,
    /// Standard deviation over the mean, lognormal.
    pub(crate) prefill_variation: f64,
    /// At index n - 1 with n requests that decode.
    pub(crate) step_seconds: Vec<f64>,
    /// In the mean.
    pub(crate) steps: f64,
    pub(crate) lengths: Lengths,
    pub(crate) slots: usize,
    pub(crate) mains: usize,
    /// The inter-token latency that is aimed at; three decode iterations without one.
    pub(crate) target_itl: Option<f64>,
}

/// Distribution of the number of decode steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Lengths {
    Fixed,
    Geometric,
    /// Standard deviation over the mean.
    Lognormal(f64),
}

/// Means of the observed values.
#[derive(Debug, Clone, Default)]
pub(crate) struct SimulatedFigures {
    pub(crate) share: f64,
    pub(crate) wakes_per_second: f64,
    pub(crate) cold_share: f64,
    pub(crate) cold_wait_seconds: f64,
    /// Per main.
    pub(crate) in_flight: f64,
    pub(crate) service_seconds: f64,
    pub(crate) tpot_seconds: f64,
    pub(crate) wait_seconds: f64,
    /// Times of requests that found functions ready, ascending.
    pub(crate) ttft: Vec<f64>,
    /// Times of all requests, ascending.
    pub(crate) ttft_with_starts: Vec<f64>,
    /// Times of each request, ascending.
    pub(crate) tpot: Vec<f64>,
}

fn exponential(random: &mut SplitMix64, mean: f64) -> f64 {
    -mean * (1.0 - random.unit()).ln()
}

/// Draws a number of decode steps, at least 1.
fn geometric(random: &mut SplitMix64, mean: f64) -> u64 {
    if mean <= 1.0 {
        return 1;
    }
    1 + ((1.0 - random.unit()).ln() / (1.0 - 1.0 / mean).ln()) as u64
}

fn lognormal(random: &mut SplitMix64, mean: f64, variation: f64) -> f64 {
    if variation == 0.0 {
        return mean;
    }
    let square = (1.0 + variation * variation).ln();
    let normal: f64 =
        (-2.0 * (1.0 - random.unit()).ln()).sqrt() * (std::f64::consts::TAU * random.unit()).cos();
    mean * (square.sqrt() * normal - square / 2.0).exp()
}

impl Setting {
    fn request(&self, random: &mut SplitMix64, arrived: f64, ready: f64) -> EngineRequest {
        let steps = match self.lengths {
            Lengths::Fixed => self.steps as u64,
            Lengths::Geometric => geometric(random, self.steps),
            Lengths::Lognormal(variation) => lognormal(random, self.steps, variation).round().max(1.0) as u64,
        };
        let prefill = lognormal(random, self.prefill_seconds, self.prefill_variation);
        EngineRequest::new(arrived, ready, prefill, steps)
    }
}

impl SimulatedFigures {
    pub(crate) fn mean_ttft(&self) -> f64 {
        self.ttft.iter().sum::<f64>() / self.ttft.len() as f64
    }
}

/// Returns the quantile `share` of the sorted `values`.
pub(crate) fn quantile(values: &[f64], share: f64) -> f64 {
    values[((share * values.len() as f64).ceil() as usize).clamp(1, values.len()) - 1]
}

/// Returns the requests per second that all mains complete in saturation.
pub(crate) fn saturated_per_second(setting: &Setting) -> f64 {
    const REQUESTS: usize = 4000;
    let random = &mut SplitMix64::new(5);
    let mut engine = Engine::new(setting);
    for _ in 0..REQUESTS {
        engine.arrive(setting.request(random, 0.0, 0.0));
    }
    engine.run(f64::INFINITY);
    let ended = |share: usize| engine.done[REQUESTS * share / 4].ended;
    setting.mains as f64 * (REQUESTS / 2) as f64 / (ended(3) - ended(1))
}

/// Simulates `requests` from an empty deployment; the first tenth is not counted.
pub(crate) fn observe(setting: &Setting, requests: usize, seed: u64) -> SimulatedFigures {
    let random = &mut SplitMix64::new(seed);
    let mut engines: Vec<Engine<'_>> = (0..setting.mains).map(|_| Engine::new(setting)).collect();
    let between = setting.burst / setting.per_second;
    let (mut now, mut begun) = (0.0, 0.0);
    let (mut came, mut counted, mut wakes, mut alive) = (0, 0, 0.0, 0.0);
    // When the deployment woke, where it is awake; when it was ready.
    let mut awake_since = setting.idle_seconds.is_none().then_some(0.0);
    let (mut ready, mut last_done) = (0.0_f64, 0.0_f64);
    while came < requests {
        let last = now;
        now += exponential(random, between);
        let idle = setting.idle_seconds.unwrap_or(f64::INFINITY);
        if let Some(since) = awake_since.filter(|_| now - last >= idle) {
            engines.iter_mut().for_each(|engine| engine.run(now));
            last_done = engines.iter().map(|engine| engine.last_done).fold(last_done, f64::max);
            if engines.iter().all(Engine::is_idle) && last_done + idle <= now {
                alive += last_done + idle - since;
                awake_since = None;
            }
        }
        if awake_since.is_none() {
            wakes += 1.0;
            (awake_since, ready) = (Some(now), now + setting.start_seconds);
            engines.iter_mut().for_each(|engine| engine.now = ready);
        }
        let chosen: Vec<usize> = (0..geometric(random, setting.burst))
            .map(|_| random.whole(0, setting.mains as u64 - 1) as usize)
            .collect();
        for index in chosen {
            engines[index].run(now);
            let request = setting.request(random, now, now.max(ready));
            engines[index].arrive(request);
            (came, counted) = (came + 1, counted + 1);
        }
        if begun == 0.0 && came >= requests / 10 {
            (begun, wakes, alive, counted) = (now, 0.0, 0.0, 0);
            awake_since = Some(now);
        }
    }
    let span = now - begun;
    alive += awake_since.map_or(0.0, |since| now - since);
    engines.iter_mut().for_each(|engine| engine.run(f64::INFINITY));
    let done: Vec<&EngineRequest> =
        engines.iter().flat_map(|engine| &engine.done).filter(|request| request.arrived >= begun).collect();
    let count = done.len() as f64;
    let mean =
        |of: &dyn Fn(&EngineRequest) -> f64| done.iter().map(|request| of(request)).sum::<f64>() / count;
    let sorted = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values
    };
    let is_cold = |request: &&&EngineRequest| request.ready > request.arrived;
    let cold: Vec<f64> = done.iter().filter(is_cold).map(|cold| cold.ready - cold.arrived).collect();
    let ttft = |request: &&EngineRequest| request.first_token - request.arrived;
    let steps: f64 = done.iter().map(|request| request.steps as f64).sum();
    let decoded: f64 = done.iter().map(|request| request.ended - request.first_token).sum();
    let service_seconds = mean(&|request| request.ended - request.began);
    SimulatedFigures {
        share: alive / span,
        wakes_per_second: wakes / span,
        cold_share: cold.len() as f64 / count,
        cold_wait_seconds: cold.iter().sum::<f64>() / (cold.len() as f64).max(1.0),
        in_flight: service_seconds * f64::from(counted) / span / setting.mains as f64,
        service_seconds,
        tpot_seconds: decoded / steps.max(1.0),
        wait_seconds: mean(&|request| request.began - request.ready),
        ttft: sorted(done.iter().filter(|request| !is_cold(request)).map(ttft).collect()),
        ttft_with_starts: sorted(done.iter().map(ttft).collect()),
        tpot: sorted(done.iter().filter(|request| request.steps > 0).map(|request| request.tpot()).collect()),
    }
}
