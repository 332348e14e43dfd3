//! Main-model pre-allocation (MMP; Remoe paper, Algorithm 2): memory of the main function before the use of experts is
//! predicted.

pub(crate) mod hoeffding;

use crate::preallocation::hoeffding::assignments_bound;
use remoe_plan::cost::{TPOT_SLACK, TTFT_SLACK};
use remoe_plan::model::{LayerModel, Model, Seconds};
use remoe_plan::plan::whole_bytes;
use remoe_plan::problem::curve::{Column, Row};
use remoe_plan::problem::sizes::{BYTE_SLACK, first_at_least};
use serde::{Serialize, Serializer};

/// Worst case of one remote ratio. The walk goes from all experts remote to all local.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WalkStep {
    /// Ratio times the experts of the largest layer.
    pub i: usize,
    /// Remote experts of each layer.
    pub remote_experts: Vec<usize>,
    /// Set if the largest remote function holds every remote set.
    pub fits: bool,
    /// Bytes of the smallest main function that keeps both limits, if there is one.
    #[serde(serialize_with = "optional_bytes")]
    pub main_bytes: Option<f64>,
    /// Bytes of the smallest main function whose local experts are no slower than the remote ones, at most those of the
    /// largest remote function.
    #[serde(serialize_with = "whole_bytes")]
    pub calibration_bytes: f64,
    /// Bytes that the main function needs to hold its experts.
    #[serde(serialize_with = "whole_bytes")]
    pub needed_bytes: f64,
    /// Time to first token with `main_bytes`, in the worst case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_seconds: Option<f64>,
    /// Time per output token with `main_bytes`, in the worst case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_seconds: Option<f64>,
}

impl WalkStep {
    /// Reports if this ratio keeps the limits in the worst case.
    #[must_use]
    pub fn passes(&self) -> bool {
        self.fits && self.main_bytes.is_some()
    }
}

fn optional_bytes<S: Serializer>(bytes: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    match bytes {
        Some(bytes) => whole_bytes(bytes, serializer),
        None => serializer.serialize_none(),
    }
}

/// Returns the remote experts of every layer at the ratio `i` / `most`, in integer arithmetic.
pub(crate) fn ratio_counts(model: &Model<'_>, i: usize, most: usize) -> Vec<usize> {
    model.layers.iter().map(|layer| i * layer.experts / most).collect()
}

/// Evaluates the worst case of every ratio, the largest first.
pub(crate) fn walk(model: &Model<'_>) -> Vec<WalkStep> {
    let most = model.most_experts();
    (0..=most).rev().map(|i| WorstCase::new(model, ratio_counts(model, i, most)).step(i)).collect()
}

/// Worst case of routing for given remote counts, with one replica of the largest size.
#[derive(Debug)]
pub(crate) struct WorstCase<'m> {
    model: &'m Model<'m>,
    counts: Vec<usize>,
    layers: Vec<WorstLayer<'m>>,
    /// Set if the largest remote function holds every remote set.
    pub(crate) fits: bool,
    calibration_bytes: f64,
    needed_bytes: f64,
    /// Index of the smallest main size to consider.
    start: usize,
}

#[derive(Debug)]
struct WorstLayer<'m> {
    model: &'m LayerModel,
    remote: Option<Seconds>,
    local_experts: f64,
    /// Tokens of each local expert.
    row: Row,
    one: Row,
    local_per_token: f64,
}

impl<'m> WorstLayer<'m> {
    fn new(model: &'m Model<'_>, layer: &'m LayerModel, remote: usize) -> Self {
        let local = layer.experts - remote;
        let tokens =
            if local == 0 { 0.0 } else { model.input.min(model.input * layer.per_token() / local as f64) };
        Self {
            model: layer,
            remote: (remote > 0).then(|| worst_remote(model, layer, remote)),
            local_experts: local as f64,
            row: layer.curve.row(tokens),
            one: layer.curve.row(1.0),
            local_per_token: layer.per_token().min(local as f64),
        }
    }

    fn local(&self, column: Column) -> Seconds {
        if self.local_experts == 0.0 {
            return Seconds { prefill: 0.0, step: 0.0 };
        }
        Seconds {
            prefill: self.local_experts * self.model.curve.at(self.row, column),
            step: self.local_per_token * self.model.curve.at(self.one, column),
        }
    }

    /// Reports if the local path is no slower than the remote one, in the prefill and, if `decodes`, in decode steps.
    fn local_keeps_up(&self, vcpus: f64, decodes: bool) -> bool {
        let Some(remote) = self.remote else { return true };
        let local = self.local(self.model.curve.column(vcpus));
        local.prefill <= remote.prefill && (!decodes || local.step <= remote.step)
    }

    fn slower_path(&self, vcpus: f64) -> Seconds {
        let local = self.local(self.model.curve.column(vcpus));
        match self.remote {
            None => local,
            Some(remote) => {
                Seconds { prefill: local.prefill.max(remote.prefill), step: local.step.max(remote.step) }
            }
        }
    }
}

/// Returns the worst-case seconds of `remote` experts of a layer (Hoeffding bound of their assignments).
fn worst_remote(model: &Model<'_>, layer: &LayerModel, remote: usize) -> Seconds {
    let set = remote as f64;
    let experts = layer.experts as f64;
    let bound = |tokens| assignments_bound(tokens, set, layer.per_token(), experts);
    let curve = layer.remote_curve();
    let column = curve.column(model.remote_vcpus(model.problem.specs.remote.largest()));
    let rows = bound(model.input);
    let prefill = set * curve.seconds(rows / set, column)
        + rows * model.down
        + model.input.min(rows) * model.up
        + model.invoke;
    let step = if model.output > 0.0 {
        let per_step = bound(model.output) / model.output;
        per_step * (curve.seconds(1.0, column) + model.down) + model.round_trip()
    } else {
        0.0
    };
    Seconds { prefill, step }
}

impl<'m> WorstCase<'m> {
    pub(crate) fn new(model: &'m Model<'_>, counts: Vec<usize>) -> Self {
        let largest = model.problem.specs.remote.largest();
        let fits = model.layers.iter().zip(&counts).all(|(layer, remote)| {
            let set = *remote as f64;
            let rows = assignments_bound(model.memory_input, set, layer.per_token(), layer.experts as f64);
            let needed =
                set * layer.expert_bytes + model.problem.token_bytes * rows + model.problem.function_bytes;
            *remote == 0 || needed <= largest + BYTE_SLACK
        });
        let layers: Vec<WorstLayer<'_>> = model
            .layers
            .iter()
            .zip(&counts)
            .map(|(layer, remote)| WorstLayer::new(model, layer, *remote))
            .collect();
        let needed_bytes = model.main_needed(&counts);
        let calibration_bytes = calibration(model, &layers, largest);
        let start = first_at_least(&model.main_sizes, needed_bytes.max(calibration_bytes));
        Self { model, counts, layers, fits, calibration_bytes, needed_bytes, start }
    }

    /// Returns time to first token and time per output token with `main_bytes`, in seconds.
    pub(crate) fn times(&self, main_bytes: f64) -> (f64, f64) {
        let mut prefill = self.model.problem.cold_start_seconds;
        let mut step = 0.0;
        let vcpus = self.model.main_vcpus(main_bytes);
        for layer in &self.layers {
            let slower = layer.slower_path(vcpus);
            let send = if layer.remote.is_some() { self.model.send } else { 0.0 };
            let fixed = layer.model.fixed(vcpus).plus(Seconds { prefill: send, step: send });
            prefill += fixed.prefill + slower.prefill;
            step += fixed.step + slower.step;
        }
        (prefill, if self.model.output > 0.0 { step } else { 0.0 })
    }

    /// Returns the smallest main size that keeps both limits.
    fn smallest_main(&self) -> Option<f64> {
        if !self.fits {
            return None;
        }
        let candidates = self.model.main_sizes.get(self.start..)?;
        let misses = |main_bytes: &f64| {
            let (ttft, tpot) = self.times(*main_bytes);
            ttft > self.model.ttft_limit + TTFT_SLACK || tpot > self.model.tpot_limit + TPOT_SLACK
        };
        candidates.get(first_hit(self.model, candidates, misses)).copied()
    }

    /// Reports if some main size keeps both limits.
    pub(crate) fn passes(&self) -> bool {
        self.smallest_main().is_some()
    }

    pub(crate) fn needed_bytes(&self) -> f64 {
        self.needed_bytes
    }

    /// Returns the larger ratio of value to limit with `main_bytes`.
    fn limit_ratio(&self, main_bytes: f64) -> f64 {
        let (ttft, tpot) = self.times(main_bytes);
        (ttft / self.model.ttft_limit).max(tpot / self.model.tpot_limit)
    }

    /// Returns the main size with the smallest [`Self::limit_ratio`], and that ratio. Ties go to the smaller size.
    pub(crate) fn least_limit_ratio(&self) -> Option<(f64, f64)> {
        let candidates = self.model.main_sizes.get(self.start..)?;
        let least = match self.model.is_isotonic {
            true => self.limit_ratio(*candidates.last()?),
            false => candidates.iter().map(|main_bytes| self.limit_ratio(*main_bytes)).reduce(f64::min)?,
        };
        let first = first_hit(self.model, candidates, |main_bytes| self.limit_ratio(*main_bytes) > least);
        candidates.get(first).map(|main_bytes| (*main_bytes, least))
    }

    fn step(self, i: usize) -> WalkStep {
        let main_bytes = self.smallest_main();
        let times = main_bytes.map(|main_bytes| self.times(main_bytes));
        WalkStep {
            i,
            fits: self.fits,
            main_bytes,
            calibration_bytes: self.calibration_bytes,
            needed_bytes: self.needed_bytes,
            ttft_seconds: times.map(|(ttft, _)| ttft),
            tpot_seconds: times.map(|(_, tpot)| tpot),
            remote_experts: self.counts,
        }
    }
}

/// Returns the index of the first of `main_sizes` for which `misses` is false, or their number.
///
/// Uses bisection if more memory is never slower.
fn first_hit(model: &Model<'_>, main_sizes: &[f64], misses: impl Fn(&f64) -> bool) -> usize {
    match model.is_isotonic {
        true => main_sizes.partition_point(misses),
        false => main_sizes.iter().position(|size| !misses(size)).unwrap_or(main_sizes.len()),
    }
}

/// Returns the smallest main size at which no layer's local path is slower than its remote one.
///
/// It is at most the largest remote and main size, and 0 if no expert is remote.
fn calibration(model: &Model<'_>, layers: &[WorstLayer<'_>], largest_remote: f64) -> f64 {
    if layers.iter().all(|layer| layer.remote.is_none()) {
        return 0.0;
    }
    let decodes = model.output > 0.0;
    let lags = |main_bytes: &f64| {
        let vcpus = model.main_vcpus(*main_bytes);
        !layers.iter().all(|layer| layer.local_keeps_up(vcpus, decodes))
    };
    let first = first_hit(model, &model.main_sizes, lags);
    let largest = largest_remote.min(model.problem.specs.main.largest());
    model.main_sizes.get(first).copied().unwrap_or(largest).min(largest)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::generate::small_problem;
    use crate::{Options, PlanError, Selection, solve};

    #[test]
    fn plans_across_layers_pass_the_worst_case() {
        let mut across = 0;
        for seed in 0..600 {
            let problem = small_problem(seed, 2 + seed as usize % 2);
            let answer = match solve(&problem, None, &Options::default()) {
                Ok(answer) => answer,
                Err(PlanError::Infeasible(_)) => continue,
                Err(error) => unreachable!("{error}"),
            };
            if answer.explanation.selection == Some(Selection::AcrossLayers) {
                across += 1;
                let counts = answer.plan.layers.iter().map(|layer| layer.remote.len()).collect();
                assert!(WorstCase::new(&Model::new(&problem), counts).passes(), "seed {seed}");
            }
        }
        assert!(across > 20, "{across}");
    }
}
