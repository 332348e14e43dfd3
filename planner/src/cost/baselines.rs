//! What the same request costs without remote experts (Remoe paper, section V-C).

use crate::cost::{TPOT_SLACK, TTFT_SLACK};
use crate::plan::whole_bytes;
use crate::problem::curve::Curve;
use crate::problem::model::{Model, Seconds};
use crate::problem::sizes::{GB, first_at_least};
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

/// What one baseline costs and how fast it is.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Baseline {
    /// CPU memory of the main function.
    #[serde(serialize_with = "whole_bytes")]
    pub main_bytes: f64,
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
    /// Names of the limits that it does not keep: `ttft`, `tpot`, `gpu`.
    pub violations: Vec<&'static str>,
}

impl Baseline {
    /// Whether it keeps every limit.
    #[must_use]
    pub fn is_feasible(&self) -> bool {
        self.violations.is_empty()
    }
}

impl Baselines {
    /// Evaluates all of them.
    pub(crate) fn of(model: &Model<'_>) -> Self {
        let on_cpus = OnCpus::new(model);
        Self { mix: mix(model, &on_cpus), cpu: cpu(model, &on_cpus), gpu: gpu(model), fetch: fetch(model) }
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
struct OnCpus {
    /// Per layer, prefill seconds of all its experts at each column.
    prefill: Vec<Vec<f64>>,
}

impl OnCpus {
    fn new(model: &Model<'_>) -> Self {
        let prefill = model.layers.iter().zip(model.shares.iter()).map(|(layer, shares)| {
            let mut sums = vec![0.0; layer.curve.columns()];
            for share in shares {
                let row = layer.curve.row(model.input * layer.per_token() * share);
                for (column, sum) in sums.iter_mut().enumerate() {
                    *sum += layer.curve.at_column(row, column);
                }
            }
            sums
        });
        Self { prefill: prefill.collect() }
    }

    /// Prefill and decode step of the experts alone with `main_bytes`.
    fn experts(&self, model: &Model<'_>, main_bytes: f64) -> Seconds {
        let mut times = Seconds::default();
        for (layer, sums) in model.layers.iter().zip(&self.prefill) {
            let column = layer.curve.column(main_bytes / GB);
            times.prefill += column.of(ndarray::ArrayView1::from(sums));
            times.step += layer.per_token() * layer.curve.seconds(1.0, column);
        }
        times
    }
}

/// The record of `times`, at `rate` dollars per second, with `gpu_bytes` on the device.
fn record(model: &Model<'_>, main_bytes: f64, times: Seconds, rate: f64, gpu_bytes: f64) -> Baseline {
    let decode_seconds = model.output * times.step;
    let ttft_seconds = times.prefill + model.problem.cold_start_seconds;
    let tpot_seconds = if model.output > 0.0 { times.step } else { 0.0 };
    let checks = [
        ("ttft", ttft_seconds > model.ttft_limit + TTFT_SLACK),
        ("tpot", tpot_seconds > model.tpot_limit + TPOT_SLACK),
        ("gpu", model.problem.limits.gpu_bytes.is_some_and(|allowed| gpu_bytes > allowed)),
    ];
    Baseline {
        main_bytes,
        prefill_seconds: times.prefill,
        decode_seconds,
        ttft_seconds,
        tpot_seconds,
        total_cost: rate * (times.prefill + decode_seconds),
        violations: checks.into_iter().filter(|(_, broken)| *broken).map(|(name, _)| name).collect(),
    }
}

/// The cheapest record over the main sizes that hold `needed` bytes: of the feasible ones, where
/// there are any. The smaller size of equal ones.
fn cheapest(model: &Model<'_>, needed: f64, at: impl Fn(f64) -> Baseline) -> Option<Baseline> {
    let sizes = model.main_sizes.get(first_at_least(&model.main_sizes, needed)..)?;
    let mut best: Option<Baseline> = None;
    for record in sizes.iter().map(|size| at(*size)) {
        let better = best.as_ref().is_none_or(|best| match (record.is_feasible(), best.is_feasible()) {
            (true, false) => true,
            (false, true) => false,
            _ => record.total_cost < best.total_cost,
        });
        if better {
            best = Some(record);
        }
    }
    best
}

fn mix(model: &Model<'_>, on_cpus: &OnCpus) -> Option<Baseline> {
    cheapest(model, model.main_base() + all_expert_bytes(model), |main_bytes| {
        let layers = model.layers.iter();
        let rest = layers.fold(Seconds::default(), |sum, layer| sum.plus(layer.fixed(main_bytes)));
        let times = on_cpus.experts(model, main_bytes).plus(rest);
        record(model, main_bytes, times, model.main_rate(main_bytes), model.gpu_bytes)
    })
}

fn cpu(model: &Model<'_>, on_cpus: &OnCpus) -> Option<Baseline> {
    let profiles = model.problem.layers.iter().map(|layer| layer.cpu_nonexpert_seconds.as_ref());
    let curves: Vec<Curve> =
        profiles.map(|profile| profile.map(Curve::of_cpu)).collect::<Option<Vec<Curve>>>()?;
    let needed = model.gpu_bytes + all_expert_bytes(model) + model.problem.runtime_bytes;
    cheapest(model, needed, |main_bytes| {
        let rest = curves.iter().fold(Seconds::default(), |sum, curve| {
            let column = curve.column(main_bytes / GB);
            let step = curve.seconds(1.0, column);
            sum.plus(Seconds { prefill: curve.seconds(model.input, column), step })
        });
        let rate = model.cpu_price * main_bytes / GB;
        record(model, main_bytes, on_cpus.experts(model, main_bytes).plus(rest), rate, 0.0)
    })
}

/// Seconds with every expert on the device.
fn on_gpu(model: &Model<'_>) -> Option<Seconds> {
    let mut times = Seconds::default();
    for ((layer, spec), shares) in model.layers.iter().zip(&model.problem.layers).zip(model.shares.iter()) {
        let curve = Curve::of_gpu(spec.gpu_expert_seconds.as_ref()?);
        let column = curve.column(1.0);
        let experts =
            shares.iter().map(|share| curve.seconds(model.input * layer.per_token() * share, column));
        times.prefill += spec.nonexpert_prefill_seconds.at(model.input) + experts.sum::<f64>();
        times.step += spec.nonexpert_decode_seconds + layer.per_token() * curve.seconds(1.0, column);
    }
    Some(times)
}

fn gpu(model: &Model<'_>) -> Option<Baseline> {
    let times = on_gpu(model)?;
    let gpu_bytes = model.gpu_bytes + all_expert_bytes(model);
    at_smallest(model, model.main_base(), times, gpu_bytes)
}

fn fetch(model: &Model<'_>) -> Option<Baseline> {
    let times = on_gpu(model)?;
    // One layer computes while the next arrives; no layer brings more experts than tokens ask for.
    let active = |index: usize| {
        model.layers.get(index).map_or(0.0, |layer| {
            (layer.experts as f64).min(model.input * layer.per_token()) * layer.expert_bytes
        })
    };
    let pairs = (0..model.layers.len()).map(|index| active(index) + active(index + 1));
    let gpu_bytes = model.gpu_bytes + pairs.fold(0.0, f64::max);
    at_smallest(model, model.main_base() + all_expert_bytes(model), times, gpu_bytes)
}

fn at_smallest(model: &Model<'_>, needed: f64, times: Seconds, gpu_bytes: f64) -> Option<Baseline> {
    let main_bytes = *model.main_sizes.get(first_at_least(&model.main_sizes, needed))?;
    let rate = model.problem.pricing.gpu_rate(gpu_bytes) + model.cpu_price * main_bytes / GB;
    Some(record(model, main_bytes, times, rate, gpu_bytes))
}
