//! Costs of the same request without remote experts (Remoe paper, section V-C).

use crate::cost::LimitViolations;
use crate::cost::running::{Detail, Life, ServingFunctions, Times};
use crate::error::FieldError;
use crate::model::Model;
use crate::model::sizing::Sizing;
use crate::model::{ExpertUse, used};
use crate::plan::whole_bytes;
use crate::problem::Problem;
use crate::problem::curve::{Column, Curve};
use serde::Serialize;

/// The baselines; one whose inputs are missing, or that no size holds, is absent.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Baselines {
    /// All experts on the CPUs of the main function, everything else on the device.
    pub mix: Option<Baseline>,
    /// Everything on CPUs.
    pub cpu: Option<Baseline>,
    /// Everything on the device.
    pub gpu: Option<Baseline>,
    /// Ideal offloading: experts in host memory, on the device exactly when they are needed.
    pub fetch: Option<Baseline>,
}

/// Cost and speed of one baseline.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Baseline {
    /// CPU memory of the main function.
    #[serde(serialize_with = "whole_bytes")]
    pub main_bytes: f64,
    /// vCPUs of the main function, where they are a decision of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub main_vcpus: Option<f64>,
    /// Prefill of all layers.
    pub prefill_seconds: f64,
    /// All decode steps.
    pub decode_seconds: f64,
    /// Prefill and cold start.
    pub ttft_seconds: f64,
    /// One decode step; 0 where there is none.
    pub tpot_seconds: f64,
    /// Dollars.
    pub total_cost: f64,
    /// How functions live, where the problem says when requests come.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub life: Option<Life>,
    /// Names of the limits that it does not keep: `ttft`, `tpot`, `gpu`, and those of [`Life`].
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
    /// Evaluates all of them.
    pub fn of(model: &Model<'_>) -> Self {
        Self::with(model, &AllLocalTimes::new(model))
    }

    /// As [`Self::of`] where the times of experts are known.
    fn with(model: &Model<'_>, unsplit: &AllLocalTimes) -> Self {
        Self {
            mix: mix(model, &unsplit.on_cpus),
            cpu: cpu(model, &unsplit.on_cpus),
            gpu: unsplit.on_gpu.clone().and_then(|times| gpu(model, times)),
            fetch: unsplit.on_gpu.clone().and_then(|times| fetch(model, times)),
        }
    }
}

/// Every way to serve without remote experts.
pub struct WithoutRemote {
    /// Costs of each baseline.
    pub baselines: Baselines,
    /// Offloading with the moves that it takes; see [`fetch_with_moves`].
    pub fetch: Option<Baseline>,
}

impl WithoutRemote {
    /// Evaluates every baseline at its cheapest size.
    pub fn new(model: &Model<'_>, unsplit: &AllLocalTimes) -> Self {
        Self { baselines: Baselines::with(model, unsplit), fetch: fetch_with_moves(model, unsplit) }
    }
}

/// Times of all experts where none is remote: equal for all prices, limits and arrivals.
pub struct AllLocalTimes {
    on_cpus: CpuExpertTimes,
    /// Absent where the problem does not say.
    on_gpu: Option<Times>,
}

impl AllLocalTimes {
    /// Sums the times of a model whose experts are all in the main function.
    pub fn new(model: &Model<'_>) -> Self {
        Self { on_cpus: CpuExpertTimes::new(model), on_gpu: on_gpu(model) }
    }
}

/// Bytes of all routed experts.
fn all_expert_bytes(model: &Model<'_>) -> f64 {
    model.local_expert_bytes(&vec![0; model.layers.len()])
}

/// Seconds of all experts of all layers on CPUs, at the measured vCPU columns.
///
/// Interpolation along vCPUs is linear, so that sums over experts may be taken before it: one pass
/// over the experts serves every main size.
struct CpuExpertTimes {
    /// Per layer, prefill seconds of all its experts at each column.
    prefill: Vec<Vec<f64>>,
    /// Per batch but the first, and layer, seconds of a decode step at each column.
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

    /// Prefill and decode steps of the experts alone with `vcpus`.
    fn experts(&self, model: &Model<'_>, vcpus: f64) -> Times {
        let columns: Vec<Column> = model.layers.iter().map(|layer| layer.curve.column(vcpus)).collect();
        let sum = |sums: &[Vec<f64>]| -> f64 {
            columns.iter().zip(sums).map(|(column, sums)| column.of(ndarray::ArrayView1::from(sums))).sum()
        };
        let one = model.layers.iter().zip(&columns);
        let one = one.map(|(layer, column)| layer.per_token() * layer.curve.seconds(1.0, *column)).sum();
        let steps = std::iter::once(one).chain(self.batches.iter().map(|batch| sum(batch)));
        Times { prefill: sum(&self.prefill), steps: steps.collect() }
    }
}

/// Where a baseline keeps its weights, and what it pays by the second.
struct BaselineHost {
    main: Sizing,
    rate: f64,
    gpu_bytes: f64,
    weights: f64,
}

fn record(model: &Model<'_>, times: Times, place: &BaselineHost, detail: Detail) -> Baseline {
    let step = times.steps.first().copied().unwrap_or(0.0);
    let running = ServingFunctions {
        start_seconds: model.start_seconds(place.weights, 0.0),
        ..ServingFunctions::of_main(times, place.rate)
    };
    let bill = model.bill(&running, detail);
    let mut found = LimitViolations::default();
    model.late(&bill, &mut found);
    if let Some(allowed) = model.problem.limits.gpu_bytes {
        found.unless_at_most("gpu", place.gpu_bytes, allowed, 0.0);
    }
    Baseline {
        main_bytes: place.main.bytes,
        main_vcpus: place.main.stated,
        prefill_seconds: running.times.prefill,
        decode_seconds: model.output * step,
        ttft_seconds: bill.ttft_seconds,
        tpot_seconds: bill.tpot_seconds,
        total_cost: bill.total(),
        life: bill.life,
        violations: found.names(),
    }
}

/// The cheapest record over the main sizes that hold `needed` bytes: of the feasible ones, where
/// there are any. The smaller size of equal ones.
fn cheapest(model: &Model<'_>, needed: f64, at: impl Fn(Sizing, Detail) -> Baseline) -> Option<Baseline> {
    let mut best: Option<(Sizing, Baseline)> = None;
    let options = model.main_options(needed);
    model.add_work(options.len() * model.layers.len() * (1 + model.batches().len()));
    for main in options {
        if model.ends() {
            return None;
        }
        let record = at(main, Detail::Bound);
        let better = best.as_ref().is_none_or(|(_, best)| match (record.is_feasible(), best.is_feasible()) {
            (true, false) => true,
            (false, true) => false,
            _ => record.total_cost < best.total_cost,
        });
        if better {
            best = Some((main, record));
        }
    }
    best.map(|(main, _)| at(main, Detail::Full))
}

fn mix(model: &Model<'_>, on_cpus: &CpuExpertTimes) -> Option<Baseline> {
    cheapest(model, model.main_base() + all_expert_bytes(model), |main, detail| {
        let pace = model.pace(main.vcpus);
        let layers = || model.layers.iter();
        let rest = |rows: f64| layers().map(|layer| layer.fixed_step(pace.vcpus, rows)).sum::<f64>();
        let prefill = layers().map(|layer| layer.fixed(pace.vcpus).prefill).sum();
        let prompt: f64 = layers().map(|layer| layer.computing(pace.vcpus, model.input)).sum();
        let computing = |rows: f64| layers().map(|layer| layer.step_computing(pace.vcpus, rows)).sum::<f64>();
        let (experts, batches) = (on_cpus.experts(model, pace.vcpus), model.batches());
        let mut times = experts.plus(prefill, rest, &batches);
        times.at_least(&experts.plus(prompt, computing, &batches), pace.stretch);
        let weights = model.nonexpert_bytes + all_expert_bytes(model);
        let rate = model.gpu_rate + main.rate;
        record(model, times, &BaselineHost { main, rate, gpu_bytes: model.gpu_bytes, weights }, detail)
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
        let pace = model.pace(main.vcpus);
        let all = |curves: &[Curve], tokens: f64| -> f64 {
            curves.iter().map(|curve| curve.seconds(tokens, curve.column(pace.vcpus))).sum()
        };
        let of_context = all(&context, context_tokens);
        let step = |rows: f64| all(&curves, rows) + rows * of_context;
        let experts = on_cpus.experts(model, pace.vcpus);
        let computing = experts.plus(all(&curves, model.input), step, &model.batches());
        let mut times = computing.clone();
        times.at_least(&computing, pace.stretch);
        let weights = model.nonexpert_bytes + all_expert_bytes(model);
        record(model, times, &BaselineHost { main, rate: main.rate, gpu_bytes: 0.0, weights }, detail)
    })
}

/// Seconds with every expert on the device.
fn on_gpu(model: &Model<'_>) -> Option<Times> {
    let batches = model.batches();
    model.add_work(model.experts() * batches.len());
    let mut times = Times { prefill: 0.0, steps: vec![0.0; batches.len()] };
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

fn gpu(model: &Model<'_>, times: Times) -> Option<Baseline> {
    let gpu_bytes = model.gpu_bytes + all_expert_bytes(model);
    at_smallest(model, model.main_base(), times, gpu_bytes)
}

fn fetch(model: &Model<'_>, times: Times) -> Option<Baseline> {
    at_smallest(model, model.main_base() + all_expert_bytes(model), times, fetch_gpu_bytes(model))
}

/// Device memory when one layer computes while the experts of the next one arrive; no layer brings more
/// experts than tokens ask for.
fn fetch_gpu_bytes(model: &Model<'_>) -> f64 {
    let active = |index: usize| {
        model.layers.get(index).map_or(0.0, |layer| {
            (layer.experts as f64).min(model.input * layer.per_token()) * layer.expert_bytes
        })
    };
    let pairs = (0..model.layers.len()).map(|index| active(index) + active(index + 1));
    model.gpu_bytes + pairs.fold(0.0, f64::max)
}

/// Offloading as it is: experts come from host memory as fast as hidden states do, every one that a step
/// uses once, while others compute. None where the problem does not say how fast that is.
fn fetch_with_moves(model: &Model<'_>, unsplit: &AllLocalTimes) -> Option<Baseline> {
    let per_byte = model.problem.swap_seconds.per_token / model.problem.token_bytes;
    if per_byte.is_nan() || per_byte <= 0.0 {
        return None;
    }
    let mut times = unsplit.on_gpu.clone()?;
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

fn at_smallest(model: &Model<'_>, needed: f64, times: Times, gpu_bytes: f64) -> Option<Baseline> {
    let main = *model.main_options(needed).first()?;
    let rate = model.problem.pricing.gpu_rate(gpu_bytes) + main.rate;
    let weights = model.nonexpert_bytes + all_expert_bytes(model);
    Some(record(model, times, &BaselineHost { main, rate, gpu_bytes, weights }, Detail::Full))
}

/// Costs of `problem` without remote experts; a baseline whose inputs are missing, or that no size holds, is absent.
///
/// # Errors
/// A problem that cannot be, or one without a prediction.
pub fn baselines(problem: &Problem) -> Result<Baselines, FieldError> {
    problem.check()?;
    Ok(Baselines::of(&Model::with_prediction(problem)?))
}
