//! Whether a plan that runs is replaced, and what that would change.

use crate::cost::Evaluation;
use crate::plan::{Plan, whole_bytes};
use crate::slicing::Planned;
use serde::Serialize;

/// The previous plan against the new one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Whether the previous plan stays.
    pub kept: bool,
    /// Why.
    pub reason: Reason,
    /// Dollars of the previous plan on this problem.
    pub previous_cost: f64,
    /// Dollars of the new one, where there is one.
    pub new_cost: Option<f64>,
    /// Main memory before and after, where it differs.
    pub main_bytes: Option<[Bytes; 2]>,
    /// What the new plan changes in each layer that it changes.
    pub layers: Vec<LayerChange>,
}

/// Why a previous plan stays or goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It is the plan that would be made now.
    Unchanged,
    /// The new plan saves too little.
    WithinHysteresis,
    /// The new plan saves enough.
    Cheaper,
    /// It misses a limit, or has remote experts where it must not.
    PreviousFails,
    /// It keeps every limit, and no new plan does in the worst case.
    NoNewPlan,
}

/// What changes in one layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerChange {
    /// Its position.
    pub layer: usize,
    /// Experts that become remote.
    pub to_remote: Vec<u32>,
    /// Experts that become local.
    pub to_local: Vec<u32>,
    /// Memory of each replica before and after.
    pub memory_bytes: [Bytes; 2],
    /// Replicas before and after.
    pub replicas: [u32; 2],
}

/// Bytes, printed as a whole number where they are one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Bytes(#[serde(serialize_with = "whole_bytes")] pub f64);

/// Compares `previous`, which keeps every limit where it `stands`, with the `best` new plan.
pub(crate) fn decide(
    previous: &Plan,
    old: &Evaluation,
    stands: bool,
    best: Option<&Planned>,
    hysteresis: f64,
) -> Change {
    let new_cost = best.map(|best| best.evaluation.total_cost);
    let same = best.is_some_and(|best| best.plan == *previous);
    let cheaper = new_cost.is_some_and(|cost| cost < old.total_cost * (1.0 - hysteresis));
    let reason = match (stands, best) {
        (false, _) => Reason::PreviousFails,
        (true, None) => Reason::NoNewPlan,
        (true, Some(_)) if same => Reason::Unchanged,
        (true, Some(_)) if cheaper => Reason::Cheaper,
        (true, Some(_)) => Reason::WithinHysteresis,
    };
    let kept = !matches!(reason, Reason::PreviousFails | Reason::Cheaper);
    let (main_bytes, layers) = best.map_or((None, Vec::new()), |best| differences(previous, &best.plan));
    Change { kept, reason, previous_cost: old.total_cost, new_cost, main_bytes, layers }
}

fn differences(from: &Plan, to: &Plan) -> (Option<[Bytes; 2]>, Vec<LayerChange>) {
    let main_bytes =
        (from.main_bytes != to.main_bytes).then_some([Bytes(from.main_bytes), Bytes(to.main_bytes)]);
    let pairs = from.layers.iter().zip(&to.layers).enumerate();
    let layers = pairs.filter(|(_, (from, to))| from != to).map(|(layer, (from, to))| {
        let missing_in = |set: &[u32], other: &[u32]| -> Vec<u32> {
            set.iter().copied().filter(|expert| other.binary_search(expert).is_err()).collect()
        };
        LayerChange {
            layer,
            to_remote: missing_in(&to.remote, &from.remote),
            to_local: missing_in(&from.remote, &to.remote),
            memory_bytes: [Bytes(from.memory_bytes), Bytes(to.memory_bytes)],
            replicas: [from.replicas, to.replicas],
        }
    });
    (main_bytes, layers.collect())
}
