//! Costs of the same request without remote experts (Remoe paper, section V-C).

use crate::cost::LimitViolations;
use crate::cost::running::{Detail, Life, PhaseTimes, ServingFunctions};
use crate::error::FieldError;
use crate::model::Model;
use crate::model::sizing::Sizing;
use crate::model::{ExpertUse, used};
use crate::plan::whole_bytes;
use crate::problem::Problem;
use crate::problem::curve::{Column, Curve};
use serde::Serialize;

/// Costs without remote experts. A baseline is absent if its inputs are missing or no size holds it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Baselines {
    /// All experts on the CPUs of the main function, the rest on the GPU.
    pub mix: Option<Baseline>,
    /// Everything on CPUs.
    pub cpu: Option<Baseline>,
    /// Everything on the GPU.
    pub gpu: Option<Baseline>,
    /// Ideal offloading: experts in host memory, moved to the GPU in no time when they are used.
    pub fetch: Option<Baseline>,
}

/// Cost and times of one baseline.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Baseline {
    /// CPU memory of the main function.
    #[serde(serialize_with = "whole_bytes")]
    pub main_bytes: f64,
    /// vCPUs of the main function, if they are a decision variable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub main_vcpus: Option<f64>,
    /// Prefill of all layers.
    pub prefill_seconds: f64,
    /// All decode steps.
    pub decode_seconds: f64,
    /// Prefill and cold start.
    pub ttft_seconds: f64,
    /// One decode step; 0 if a request has none.
    pub tpot_seconds: f64,
    /// Dollars.
    pub total_cost: f64,
    /// Time alive and load, if the problem has arrivals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub life: Option<Life>,
    /// Names of the broken limits: `ttft`, `tpot`, `gpu`, and those of [`Life`].
    pub violations: Vec<String>,
}

impl Baseline {
    /// Reports if it keeps every limit.
    #[must_use]
    pub fn is_feasible(&self) -> bool {
        self.violations.is_empty()
    }
}

impl Baselines {
    /// Evaluates all baselines, each at its cheapest size.
    pub fn of(model: &Model<'_>) -> Self {
        Self::with_times(model, &AllLocalTimes::new(model))
    }

    /// Evaluates all baselines with given times.
    fn with_times(model: &Model<'_>, all_local: &AllLocalTimes) -> Self {
        Self {
            mix: mix(model, &all_local.on_cpus),
            cpu: cpu(model, &all_local.on_cpus),
            gpu: all_local.on_gpu.clone().and_then(|times| gpu(model, times)),
            fetch: all_local.on_gpu.clone().and_then(|times| fetch(model, times)),
        }
    }
}

/// Every strategy to serve without remote experts.
pub struct WithoutRemote {
    /// The baselines of the Remoe paper.
    pub baselines: Baselines,
    /// Offloading with the time of moves; see [`fetch_with_moves`].
    pub fetch: Option<Baseline>,
}

impl WithoutRemote {
    /// Evaluates every baseline at its cheapest size.
    pub fn new(model: &Model<'_>, all_local: &AllLocalTimes) -> Self {
        Self { baselines: Baselines::with_times(model, all_local), fetch: fetch_with_moves(model, all_local) }
    }
}

/// Times if all experts are local. They do not depend on prices, limits or arrivals.
pub struct AllLocalTimes {
    /// Experts on CPUs.
    on_cpus: CpuExpertTimes,
    /// Everything on the GPU; absent without GPU times of experts.
    on_gpu: Option<PhaseTimes>,
}

impl AllLocalTimes {
    /// Sums the times of all experts.
    pub fn new(model: &Model<'_>) -> Self {
        Self { on_cpus: CpuExpertTimes::new(model), on_gpu: on_gpu(model) }
    }
}

/// Returns the bytes of all routed experts.
fn all_expert_bytes(model: &Model<'_>) -> f64 {
    model.local_expert_bytes(&vec![0; model.layers.len()])
}

/// Seconds of all experts of all layers on CPUs, at the measured vCPU columns.
///
/// Interpolation along vCPUs is linear, so that sums over experts may be taken first. One pass over the experts is enough
/// for all main sizes.
struct CpuExpertTimes {
    /// `[layer][column]`: prefill seconds of all its experts.
    prefill: Vec<Vec<f64>>,
    /// `[batch][layer][column]`: seconds of a decode step, for each batch but the first.
    batches: Vec<Vec<Vec<f64>>>,
}

impl CpuExpertTimes {
    fn new(model: &Model<'_>) -> Self {
        model.add_work(model.experts() * model.batches().len());
        let sums = |used: &dyn Fn(usize, usize) -> ExpertUse| -> Vec<Vec<f64>> {
            let layers = model.layers.iter().enumerate().map(|(index, layer)| {
                let mut sums = vec![0.0; layer.curve.columns()];
                for expert in 0..model.shares[index].len() {
                    let (weight, tokens) = used(index, expert);
                    let row = layer.curve.row(tokens);
                    for (column, sum) in sums.iter_mut().enumerate() {
                        *sum += weight * layer.curve.at_column(row, column);
                    }
                }
                sums
            });
            layers.collect()
        };
        Self {
            prefill: sums(&|layer, expert| {
                (1.0, model.input * model.layers[layer].per_token() * model.shares[layer][expert])
            }),
            batches: model.used().iter().map(|used| sums(&|layer, expert| used[layer][expert])).collect(),
        }
    }

    /// Returns the times of the experts alone with `vcpus`.
    fn experts(&self, model: &Model<'_>, vcpus: f64) -> PhaseTimes {
        let columns: Vec<Column> = model.layers.iter().map(|layer| layer.curve.column(vcpus)).collect();
        let sum = |sums: &[Vec<f64>]| -> f64 {
            columns.iter().zip(sums).map(|(column, sums)| column.of(ndarray::ArrayView1::from(sums))).sum()
        };
        let single_step = model.layers.iter().zip(&columns);
        let single_step =
            single_step.map(|(layer, column)| layer.per_token() * layer.curve.seconds(1.0, *column)).sum();
        let steps = std::iter::once(single_step).chain(self.batches.iter().map(|batch| sum(batch)));
        PhaseTimes { prefill: sum(&self.prefill), steps: steps.collect() }
    }
}

/// Size, memory and price of the main function of a baseline.
struct BaselineHost {
    main: Sizing,
    /// Dollars per second, including the GPU.
    rate: f64,
    gpu_bytes: f64,
    /// Bytes that a cold start loads.
    weight_bytes: f64,
}

/// Evaluates a baseline with the given times on `host`.
fn evaluate(model: &Model<'_>, times: PhaseTimes, host: &BaselineHost, detail: Detail) -> Baseline {
    let step = times.steps.first().copied().unwrap_or(0.0);
    let running = ServingFunctions {
        start_seconds: model.start_seconds(host.weight_bytes, 0.0),
        ..ServingFunctions::of_main(times, host.rate)
    };
    let bill = model.bill(&running, detail);
    let mut found = LimitViolations::default();
    model.check_latency(&bill, &mut found);
    if let Some(allowed) = model.problem.limits.gpu_bytes {
        found.unless_at_most("gpu", host.gpu_bytes, allowed, 0.0);
    }
    Baseline {
        main_bytes: host.main.bytes,
        main_vcpus: host.main.stated,
        prefill_seconds: running.times.prefill,
        decode_seconds: model.output * step,
        ttft_seconds: bill.ttft_seconds,
        tpot_seconds: bill.tpot_seconds,
        total_cost: bill.total(),
        life: bill.life,
        violations: found.names(),
    }
}

/// Returns the cheapest baseline over the main sizes that hold `needed` bytes, a feasible one if there is any.
///
/// Ties go to the smaller size. `at`: evaluates the baseline with a size.
fn cheapest(model: &Model<'_>, needed: f64, at: impl Fn(Sizing, Detail) -> Baseline) -> Option<Baseline> {
    let mut best: Option<(Sizing, Baseline)> = None;
    let options = model.main_options(needed);
    model.add_work(options.len() * model.layers.len() * (1 + model.batches().len()));
    for main in options {
        if model.ends() {
            return None;
        }
        let candidate = at(main, Detail::Bound);
        let better =
            best.as_ref().is_none_or(|(_, best)| match (candidate.is_feasible(), best.is_feasible()) {
                (true, false) => true,
                (false, true) => false,
                _ => candidate.total_cost < best.total_cost,
            });
        if better {
            best = Some((main, candidate));
        }
    }
    best.map(|(main, _)| at(main, Detail::Full))
}

fn mix(model: &Model<'_>, on_cpus: &CpuExpertTimes) -> Option<Baseline> {
    cheapest(model, model.main_base() + all_expert_bytes(model), |main, detail| {
        let speed = model.cpu_speed(main.vcpus);
        let layers = || model.layers.iter();
        let step = |rows: f64| layers().map(|layer| layer.fixed_step(speed.vcpus, rows)).sum::<f64>();
        let prefill = layers().map(|layer| layer.fixed(speed.vcpus).prefill).sum();
        let prefill_cpu: f64 = layers().map(|layer| layer.nonexpert_cpu(speed.vcpus, model.input)).sum();
        let step_cpu =
            |rows: f64| layers().map(|layer| layer.nonexpert_step_cpu(speed.vcpus, rows)).sum::<f64>();
        let (experts, batches) = (on_cpus.experts(model, speed.vcpus), model.batches());
        let mut times = experts.plus(prefill, step, &batches);
        times.at_least(&experts.plus(prefill_cpu, step_cpu, &batches), speed.throttle_factor);
        let weight_bytes = model.nonexpert_bytes + all_expert_bytes(model);
        let rate = model.gpu_rate + main.rate;
        evaluate(model, times, &BaselineHost { main, rate, gpu_bytes: model.gpu_bytes, weight_bytes }, detail)
    })
}

fn cpu(model: &Model<'_>, on_cpus: &CpuExpertTimes) -> Option<Baseline> {
    let layers = || model.problem.layers.iter();
    let profiles = layers().map(|layer| layer.cpu_nonexpert_seconds.as_ref());
    let curves: Vec<Curve> =
        profiles.map(|profile| profile.map(Curve::of_cpu)).collect::<Option<Vec<Curve>>>()?;
    let context: Vec<Curve> =
        layers().filter_map(|layer| layer.cpu_context_seconds.as_ref()).map(Curve::of_cpu).collect();
    let context_tokens = model.problem.request.mean_context();
    let needed = model.gpu_bytes + all_expert_bytes(model) + model.problem.runtime_bytes;
    cheapest(model, needed, |main, detail| {
        let speed = model.cpu_speed(main.vcpus);
        let all = |curves: &[Curve], tokens: f64| -> f64 {
            curves.iter().map(|curve| curve.seconds(tokens, curve.column(speed.vcpus))).sum()
        };
        let context_seconds = all(&context, context_tokens);
        let step = |rows: f64| all(&curves, rows) + rows * context_seconds;
        let experts = on_cpus.experts(model, speed.vcpus);
        let computing = experts.plus(all(&curves, model.input), step, &model.batches());
        let mut times = computing.clone();
        times.at_least(&computing, speed.throttle_factor);
        let weight_bytes = model.nonexpert_bytes + all_expert_bytes(model);
        evaluate(model, times, &BaselineHost { main, rate: main.rate, gpu_bytes: 0.0, weight_bytes }, detail)
    })
}

/// Returns the times if every expert is on the GPU, or `None` without GPU times of experts.
fn on_gpu(model: &Model<'_>) -> Option<PhaseTimes> {
    let batches = model.batches();
    model.add_work(model.experts() * batches.len());
    let mut times = PhaseTimes { prefill: 0.0, steps: vec![0.0; batches.len()] };
    let layers = model.layers.iter().zip(&model.problem.layers).zip(model.shares.iter());
    for (index, ((layer, spec), shares)) in layers.enumerate() {
        let curve = Curve::of_gpu(spec.gpu_expert_seconds.as_ref()?);
        let column = curve.column(1.0);
        let experts =
            shares.iter().map(|share| curve.seconds(model.input * layer.per_token() * share, column));
        times.prefill += spec.nonexpert_prefill_seconds.at(model.input) + experts.sum::<f64>();
        for (batch, (step, rows)) in times.steps.iter_mut().zip(&batches).enumerate() {
            let experts = match batch.checked_sub(1) {
                Some(many) => {
                    let each = model.used()[many][index].iter();
                    each.map(|(used, tokens)| used * curve.seconds(*tokens, column)).sum()
                }
                None => layer.per_token() * curve.seconds(1.0, column),
            };
            let further = spec.nonexpert_prefill_seconds.per_token * (rows - 1.0);
            let context = rows * spec.context_seconds_per_token * model.problem.request.mean_context();
            *step += spec.nonexpert_decode_seconds + further + context + experts;
        }
    }
    Some(times)
}

fn gpu(model: &Model<'_>, times: PhaseTimes) -> Option<Baseline> {
    let gpu_bytes = model.gpu_bytes + all_expert_bytes(model);
    at_smallest(model, model.main_base(), times, gpu_bytes)
}

fn fetch(model: &Model<'_>, times: PhaseTimes) -> Option<Baseline> {
    at_smallest(model, model.main_base() + all_expert_bytes(model), times, fetch_gpu_bytes(model))
}

/// Returns the GPU memory of offloading: one layer computes while the experts of the next one are moved.
///
/// No layer moves more experts than its tokens use.
fn fetch_gpu_bytes(model: &Model<'_>) -> f64 {
    let active = |index: usize| {
        model.layers.get(index).map_or(0.0, |layer| {
            (layer.experts as f64).min(model.input * layer.per_token()) * layer.expert_bytes
        })
    };
    let pairs = (0..model.layers.len()).map(|index| active(index) + active(index + 1));
    model.gpu_bytes + pairs.fold(0.0, f64::max)
}

/// Evaluates offloading with the time of moves. Moves overlap with computation.
///
/// Every expert that a step uses is moved once, with the bandwidth of the moves of hidden states. Returns `None` if the
/// problem does not state that bandwidth.
fn fetch_with_moves(model: &Model<'_>, all_local: &AllLocalTimes) -> Option<Baseline> {
    let per_byte = model.problem.swap_seconds.per_token / model.problem.token_bytes;
    if per_byte.is_nan() || per_byte <= 0.0 {
        return None;
    }
    let mut times = all_local.on_gpu.clone()?;
    let moved = |rows: f64| -> f64 {
        let known = model.used_in(rows);
        let layers =
            model.layers.iter().zip(model.shares.iter()).enumerate().map(|(index, (layer, shares))| {
                let experts: f64 = match known {
                    Some(known) => known[index].iter().map(|(used, _)| used).sum(),
                    None => shares.iter().map(|share| used(rows, layer.per_token() * share).0).sum(),
                };
                experts * layer.expert_bytes * per_byte
            });
        layers.sum()
    };
    times.prefill = times.prefill.max(moved(model.input));
    for (step, rows) in times.steps.iter_mut().zip(model.batches()) {
        *step = step.max(moved(rows));
    }
    at_smallest(model, model.main_base() + all_expert_bytes(model), times, fetch_gpu_bytes(model))
}

fn at_smallest(model: &Model<'_>, needed: f64, times: PhaseTimes, gpu_bytes: f64) -> Option<Baseline> {
    let main = *model.main_options(needed).first()?;
    let rate = model.problem.pricing.gpu_rate(gpu_bytes) + main.rate;
    let weight_bytes = model.nonexpert_bytes + all_expert_bytes(model);
    Some(evaluate(model, times, &BaselineHost { main, rate, gpu_bytes, weight_bytes }, Detail::Full))
}

/// Evaluates all baselines of `problem`.
///
/// # Errors
/// An invalid problem, or one without a prediction.
pub fn baselines(problem: &Problem) -> Result<Baselines, FieldError> {
    problem.check()?;
    Ok(Baselines::of(&Model::with_prediction(problem)?))
}
