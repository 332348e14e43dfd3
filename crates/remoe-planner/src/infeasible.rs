//! Infeasible problems: which limit fails, by how much, and what would make the problem feasible.

pub(crate) mod remedy;

use self::remedy::Remedy;
use crate::comparison::PlacementComparison;
use crate::preallocation::WorstCase;
use crate::search::selection::Candidate;
use crate::search::tables::LayerTable;
use crate::words::{amount, limit_name, rounded_up};
use remoe_plan::cost::{Evaluation, Violation};
use remoe_plan::model::Model;
use remoe_plan::plan::{LayerPlan, Plan, whole_bytes};
use serde::Serialize;

/// Limit that fails at the remote ratio and main size that come closest to keeping all limits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Infeasible {
    /// Name, as in [`Violation`].
    pub limit: String,
    /// Remote ratio and main size that come closest.
    pub at: RatioAndSize,
    /// Value of the limited quantity there.
    pub value: f64,
    /// Allowed value.
    pub allowed: f64,
    /// Changes that together make the problem feasible.
    pub remedy: Vec<Remedy>,
    /// Set if `value` is that of the worst case for plans with a function for each layer, not that of the prediction.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub worst_case: bool,
    /// All strategies to serve the model, and why each is infeasible; absent if the search did not begin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<PlacementComparison>,
}

/// A remote ratio and a main size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RatioAndSize {
    /// Remote ratio times the experts of the largest layer.
    pub i: usize,
    /// Memory of the main function in bytes.
    #[serde(serialize_with = "whole_bytes")]
    pub main_bytes: f64,
}

impl Infeasible {
    /// Returns a sentence with the failing limit, its value, and the remote ratio and main size.
    #[must_use]
    pub fn sentence(&self) -> String {
        let name = limit_name(&self.limit);
        let (value, allowed) = (amount(&self.limit, self.value), amount(&self.limit, self.allowed));
        let main = amount("main", self.at.main_bytes);
        let at = match self.at.i {
            0 => format!("without remote experts and with a main function of {main}"),
            i => format!("at remote ratio i = {i} with a main function of {main}"),
        };
        let worst = if self.worst_case { " in the worst case of routing" } else { "" };
        format!("infeasible: {name} is at least {value}{worst}, limit {allowed} ({at})")
    }

    /// Returns the sentence and the remedies. `describe`: returns the description of a remedy.
    #[must_use]
    pub fn with_remedies(&self, describe: impl Fn(&Remedy) -> String) -> String {
        let remedies: Vec<String> = self.remedy.iter().map(describe).collect();
        let sentence = self.sentence();
        if remedies.is_empty() {
            sentence
        } else {
            format!("{sentence}; becomes feasible with {}", remedies.join(" and "))
        }
    }
}

impl std::fmt::Display for Infeasible {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.with_remedies(|remedy| {
            let limit = remedy.limit();
            let least = amount(limit, rounded_up(remedy.at_least));
            match limit {
                "mem" => format!("remote functions of up to {least}"),
                "main" => format!("a main function of up to {least}"),
                "mains" => format!("{least} main functions"),
                "payload" => format!("a payload of up to {least}"),
                "gpu" => format!("{least} of GPU memory"),
                "cold_ttft" => format!("cold requests with a time to first token of up to {least}"),
                _ => format!("a {} of up to {least}", limit_name(limit)),
            }
        }))
    }
}

/// Returns the reason if the GPU cannot hold the non-expert part under any plan.
pub(crate) fn device_too_small(model: &Model<'_>) -> Option<Infeasible> {
    let allowed = model.problem.limits.gpu_bytes?;
    (model.gpu_bytes > allowed + remoe_plan::problem::sizes::BYTE_SLACK).then(|| Infeasible {
        limit: "gpu".to_owned(),
        at: RatioAndSize { i: model.most_experts(), main_bytes: model.problem.specs.main.largest() },
        value: model.gpu_bytes,
        allowed,
        remedy: vec![Remedy { field: "limits.gpu_bytes".to_owned(), at_least: model.gpu_bytes }],
        worst_case: false,
        verdict: None,
    })
}

/// Explains why none of `candidates` passes the worst case, or returns `None` if one does. Ties go to the larger ratio.
pub(crate) fn worst_case(model: &Model<'_>, candidates: &[Candidate]) -> Option<Infeasible> {
    let mut best: Option<(f64, RatioAndSize, (f64, f64))> = None;
    let mut least_memory: Option<(f64, usize)> = None;
    for candidate in candidates {
        let case = WorstCase::new(model, candidate.counts.clone());
        if !case.fits {
            continue;
        }
        if case.passes() {
            return None;
        }
        if least_memory.is_none_or(|(least, _)| case.needed_bytes() < least) {
            least_memory = Some((case.needed_bytes(), candidate.i));
        }
        let Some((main_bytes, strain)) = case.least_limit_ratio() else { continue };
        if best.as_ref().is_none_or(|(least, ..)| strain < *least) {
            best = Some((strain, RatioAndSize { i: candidate.i, main_bytes }, case.times(main_bytes)));
        }
    }
    let largest = model.problem.specs.main.largest();
    match (best, least_memory) {
        (Some((_, at, times)), _) => Some(Infeasible { worst_case: true, ..too_slow(model, at, times) }),
        (None, Some((needed, i))) => Some(Infeasible {
            limit: "main".to_owned(),
            at: RatioAndSize { i, main_bytes: largest },
            value: needed,
            allowed: largest,
            remedy: vec![Remedy { field: "specs.main.max_bytes".to_owned(), at_least: needed }],
            worst_case: false,
            verdict: None,
        }),
        (None, None) => no_fitting_set(model, candidates),
    }
}

/// Returns the latency limit that `times` (TTFT and TPOT) exceed by the larger factor.
fn too_slow(model: &Model<'_>, at: RatioAndSize, times: (f64, f64)) -> Infeasible {
    let (ttft, tpot) = times;
    let limits = [
        ("ttft", "slo.ttft_seconds", ttft, model.ttft_limit),
        ("tpot", "slo.tpot_seconds", tpot, model.tpot_limit),
    ];
    let missed = limits.iter().filter(|(.., value, allowed)| value > allowed);
    let remedy = missed.map(|(_, field, value, _)| Remedy { field: (*field).to_owned(), at_least: *value });
    let (limit, _, value, allowed) =
        if tpot / model.tpot_limit > ttft / model.ttft_limit { limits[1] } else { limits[0] };
    Infeasible {
        limit: limit.to_owned(),
        at,
        value,
        allowed,
        remedy: remedy.collect(),
        worst_case: false,
        verdict: None,
    }
}

/// Explains that no remote set fits: returns the layer that needs the most memory at the smallest ratio.
fn no_fitting_set(model: &Model<'_>, candidates: &[Candidate]) -> Option<Infeasible> {
    let smallest = candidates.iter().min_by_key(|candidate| candidate.i)?;
    let allowed = model.problem.specs.remote.largest();
    let needed = |(layer, count): (usize, &usize)| match count {
        0 => 0.0,
        count => model.remote_needed(layer, *count, 1.0),
    };
    let (layer, value) = smallest
        .counts
        .iter()
        .enumerate()
        .map(|(layer, count)| (layer, needed((layer, count))))
        .fold((0, 0.0), |most, next| if next.1 > most.1 { next } else { most });
    Some(Infeasible {
        limit: format!("mem{layer}"),
        at: RatioAndSize { i: smallest.i, main_bytes: model.problem.specs.main.largest() },
        value,
        allowed,
        remedy: vec![Remedy { field: "specs.remote.max_bytes".to_owned(), at_least: value }],
        worst_case: false,
        verdict: None,
    })
}

/// Explains why no plan keeps the limits for the prediction although the worst case passes or does not matter.
///
/// Returns the candidate that comes closest with the largest sizes and all useful replicas.
pub(crate) fn on_prediction(
    model: &Model<'_>,
    tables: &[LayerTable],
    candidates: &[Candidate],
    violations: impl Fn(&Plan, &Evaluation) -> Vec<Violation>,
) -> Option<Infeasible> {
    let mut best: Option<(f64, Infeasible)> = None;
    for candidate in candidates {
        let plan = largest_plan(model, tables, candidate);
        let evaluation = model.evaluate(&plan);
        let missed = violations(&plan, &evaluation);
        let strain = |violation: &Violation| violation.value / violation.allowed.max(f64::MIN_POSITIVE);
        let Some(worst) = missed.iter().max_by(|a, b| strain(a).total_cmp(&strain(b))) else { continue };
        if best.as_ref().is_none_or(|(least, _)| strain(worst) < *least) {
            let found = Infeasible {
                limit: worst.limit.clone(),
                at: RatioAndSize { i: candidate.i, main_bytes: plan.main_bytes },
                value: worst.value,
                allowed: worst.allowed,
                remedy: missed.iter().filter_map(|violation| Remedy::of(model, violation)).collect(),
                worst_case: false,
                verdict: None,
            };
            best = Some((strain(worst), found));
        }
    }
    best.map(|(_, found)| found)
}

/// Returns the plan of `candidate` with the largest sizes and all useful replicas.
fn largest_plan(model: &Model<'_>, tables: &[LayerTable], candidate: &Candidate) -> Plan {
    let layers = tables.iter().zip(&candidate.counts).map(|(table, count)| match count {
        0 => LayerPlan::default(),
        count => LayerPlan {
            remote: table.remote_set(*count),
            memory_bytes: model.problem.specs.remote.largest(),
            // At most the problem's replicas.
            replicas: model.useful_replicas(*count) as u32,
        },
    });
    Plan::of_layers(model.problem.specs.main.largest(), layers.collect())
}

impl Infeasible {
    /// Returns the latency limit of an all-local plan, if no candidate explains the failure.
    pub(crate) fn unknown(model: &Model<'_>) -> Self {
        let main_bytes = model.problem.specs.main.largest();
        let counts = vec![0; model.layers.len()];
        let times = WorstCase::new(model, counts).times(main_bytes);
        too_slow(model, RatioAndSize { i: 0, main_bytes }, times)
    }
}
