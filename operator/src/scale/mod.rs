//! Scale stage: decides the number of replicas of each function, and scale to zero. Pure.
//!
//! Three rules apply. Load adds replicas ([`load`]), unused remote functions sleep ([`groups`]), and a deployment
//! without requests scales to zero ([`demand`]).

mod demand;
mod groups;
mod load;

pub(crate) use demand::{DemandDecision, PhaseChange, scaled_to_zero, timeline};
pub(crate) use groups::{GroupChange, GroupTransition, Groups};
pub(crate) use load::ReplicaChange;

use self::demand::demanded;
use self::groups::by_use;
use self::load::{by_load, requeue_after};
use super::altered;
use super::inputs::Inputs;
use super::manifests::{Count, Function, TargetPlan};
use super::plan::PlanStage;
use super::pods::PodView;
use super::resolve::Resolved;
use remoe_autoscale::replicas::LoadHistory;
use std::collections::BTreeMap;
use std::time::Duration;

/// Output of the scale stage.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scaled {
    /// Replicas by function.
    pub counts: BTreeMap<String, Count>,
    /// Load in the scaling window, kept as soft state.
    pub load: LoadHistory,
    /// Functions whose number of replicas changes with the load.
    pub changes: Vec<ReplicaChange>,
    /// Remote functions that sleep while main functions run.
    pub groups: Groups,
    /// Phase of the deployment, and the demand object for gateways.
    pub demanded: DemandDecision,
    /// Pods of functions; altered ones are marked as faulty.
    pub pods: Vec<PodView>,
    /// Time of the next reconcile that the load requires.
    pub requeue_after: Option<Duration>,
}

/// Decides how many replicas of each function of the plan run.
pub(crate) fn scale(inputs: Inputs<'_>, resolved: &Resolved, planned: &PlanStage) -> Scaled {
    let (target, pods) = (planned.target.as_ref(), inputs.observed.functions(inputs.owner));
    let load = by_load(inputs, &pods, target);
    let groups = by_use(inputs, &pods, resolved, target);
    let functions = target.into_iter().flat_map(|target| target.revision.functions());
    let count = |function: &Function| match groups.is_asleep(&function.name) {
        true => Count { replicas: 0, extra: 0 },
        false => Count {
            replicas: function.replicas,
            extra: load.extra.get(&function.name).copied().unwrap_or(function.extra),
        },
    };
    let counts: BTreeMap<String, Count> =
        functions.map(|function| (function.name.clone(), count(function))).collect();
    let pods = mark_altered_pods(inputs, pods, target);
    let is_scaled_up = counts.values().any(|count| count.extra > 0);
    Scaled {
        demanded: demanded(inputs, resolved, planned, &groups, &pods),
        requeue_after: requeue_after(inputs, is_scaled_up),
        counts,
        load: load.history,
        changes: load.changes,
        groups,
        pods,
    }
}

/// Marks altered pods as faulty.
fn mark_altered_pods(
    inputs: Inputs<'_>,
    mut pods: Vec<PodView>,
    target: Option<&TargetPlan>,
) -> Vec<PodView> {
    let Inputs { owner, observed, environment, .. } = inputs;
    if let Some(target) = target {
        altered::mark_altered(&mut pods, &observed.pods, owner, &target.revision, &environment.comparison);
    }
    pods
}
