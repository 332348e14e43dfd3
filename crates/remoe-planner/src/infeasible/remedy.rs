//! Remedies of infeasible problems: fields that must be raised.

use crate::infeasible::Infeasible;
use remoe_plan::cost::Violation;
use remoe_plan::model::Model;
use remoe_plan::problem::{Problem, SizeRange};
use serde::Serialize;

/// A field of the problem that must be raised.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Remedy {
    /// Name of the field.
    pub field: String,
    /// Least value that it must have.
    pub at_least: f64,
}

/// Relative slack, so that rounding does not undo a remedy.
const SLACK: f64 = 1e-9;

impl Remedy {
    /// Returns the remedy of `violation`, or `None` if raising a field does not help.
    pub(crate) fn of(model: &Model<'_>, violation: &Violation) -> Option<Self> {
        let mains = f64::from(model.problem.pricing.main_replicas);
        let (field, at_least) = match violation.limit.trim_end_matches(|c: char| c.is_ascii_digit()) {
            "ttft" => ("slo.ttft_seconds", violation.value),
            "tpot" => ("slo.tpot_seconds", violation.value),
            "cold_ttft" => ("slo.cold_ttft_seconds", violation.value),
            "cold_share" => ("slo.cold_share", violation.value),
            "gpu" => ("limits.gpu_bytes", violation.value),
            "main" => ("specs.main.max_bytes", violation.value),
            "mem" => ("specs.remote.max_bytes", violation.value),
            "payload" => ("limits.payload_bytes", violation.value),
            // The utilisation must stay below 1: at 1 the queue grows without bound.
            "load" => ("pricing.main_replicas", (mains * violation.value).floor() + 1.0),
            _ => return None,
        };
        Some(Self { field: field.to_owned(), at_least })
    }

    /// Returns the name of the limit that it raises, as in [`Violation`].
    #[must_use]
    pub fn limit(&self) -> &'static str {
        match self.field.as_str() {
            "slo.ttft_seconds" => "ttft",
            "slo.tpot_seconds" => "tpot",
            "slo.cold_ttft_seconds" => "cold_ttft",
            "slo.cold_share" => "cold_share",
            "limits.gpu_bytes" => "gpu",
            "limits.payload_bytes" => "payload",
            "specs.remote.max_bytes" => "mem",
            "pricing.main_replicas" => "mains",
            _ => "main",
        }
    }

    /// Raises the field of `problem` to at least the remedy's value.
    fn apply(&self, problem: &mut Problem) {
        let enough = self.at_least * (1.0 + SLACK);
        let raise = |limit: &mut Option<f64>| *limit = limit.map(|now| now.max(enough));
        match self.limit() {
            "ttft" => problem.slo.ttft_seconds = problem.slo.ttft_seconds.max(enough),
            "tpot" => problem.slo.tpot_seconds = problem.slo.tpot_seconds.max(enough),
            "cold_ttft" => raise(&mut problem.slo.cold_ttft_seconds),
            "cold_share" => raise(&mut problem.slo.cold_share),
            "gpu" => raise(&mut problem.limits.gpu_bytes),
            "payload" => raise(&mut problem.limits.payload_bytes),
            "mem" => raise_size(&mut problem.specs.remote, enough),
            "mains" => {
                let mains = self.at_least.clamp(0.0, f64::from(u32::MAX)) as u32;
                problem.pricing.main_replicas = problem.pricing.main_replicas.max(mains);
            }
            _ => raise_size(&mut problem.specs.main, enough),
        }
    }
}

/// Extends `range` by whole steps until its largest size holds `bytes`.
fn raise_size(range: &mut SizeRange, bytes: f64) {
    let steps = ((bytes - range.min_bytes) / range.step_bytes).ceil().max(0.0);
    range.max_bytes = range.max_bytes.max(range.min_bytes + steps * range.step_bytes);
}

/// Adds `more` to `remedies`, with the largest value for each field.
fn merge(remedies: &mut Vec<Remedy>, more: Vec<Remedy>) {
    for remedy in more {
        match remedies.iter_mut().find(|known| known.field == remedy.field) {
            Some(known) => known.at_least = known.at_least.max(remedy.at_least),
            None => remedies.push(remedy),
        }
    }
}

/// Maximum number of rounds: a raised limit may uncover another one that fails.
const ROUNDS: usize = 4;
/// Largest number of experts, over all layers, for which remedies are tried.
const MAX_EXPERTS: usize = 2_000;

/// Extends the remedies of `why` until the problem with all of them is feasible.
///
/// `attempt`: plans a raised problem, and returns further remedies if it is still infeasible. The first remedies are those
/// of a single plan, and may not be enough.
pub(crate) fn sufficient(
    problem: &Problem,
    why: &mut Infeasible,
    attempt: impl Fn(&Problem) -> Option<Vec<Remedy>>,
) {
    let first = std::mem::take(&mut why.remedy);
    merge(&mut why.remedy, first);
    if problem.layers.iter().map(|layer| layer.experts as usize).sum::<usize>() > MAX_EXPERTS {
        return;
    }
    let mut raised = problem.clone();
    why.remedy.iter().for_each(|remedy| remedy.apply(&mut raised));
    for _ in 0..ROUNDS {
        // Raised size ranges may have too many sizes to be valid.
        if raised.check().is_err() {
            break;
        }
        let Some(missing) = attempt(&raised) else { break };
        if missing.is_empty() {
            break;
        }
        missing.iter().for_each(|remedy| remedy.apply(&mut raised));
        merge(&mut why.remedy, missing);
    }
    for remedy in &mut why.remedy {
        // Sizes must be in the raised range.
        match remedy.limit() {
            "mem" => remedy.at_least = raised.specs.remote.max_bytes,
            "main" => remedy.at_least = raised.specs.main.max_bytes,
            _ => {}
        }
    }
}
