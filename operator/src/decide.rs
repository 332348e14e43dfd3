//! Runs the pure stages of a reconcile in order.

use super::build::{Manifests, build};
use super::diff::{Diff, DiffInput, diff};
use super::events::ClusterEvent;
use super::fleet::FunctionCounts;
use super::inputs::Inputs;
use super::plan::{PlanStage, Planner, plan};
use super::resolve::{Resolved, resolve};
use super::scale::{GroupChange, PhaseChange, ReplicaChange, Scaled, scale};
use super::soft_state::SoftStateUpdate;
use super::write::Write;
use remoe_api::MixOf;
use remoe_autoscale::scale_to_zero::ScalingPhase;

/// Outputs of the pure stages.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Decided {
    /// Output of the resolve stage.
    pub resolved: Resolved,
    /// Output of the plan stage.
    pub planned: PlanStage,
    /// Output of the scale stage.
    pub scaled: Scaled,
    /// Output of the build stage.
    pub manifests: Manifests,
    /// Output of the diff stage.
    pub diff: Diff,
}

/// Effects of the writes that were made, for events and metrics.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// Events to publish.
    pub events: Vec<ClusterEvent>,
    /// Source of the expert usage that a new plan was made for.
    pub replanned: Option<MixOf>,
    /// Change of the scaling phase.
    pub phase: Option<PhaseChange>,
    /// Functions whose number of replicas changes with the load.
    pub scaled: Vec<ReplicaChange>,
    /// Remote functions that were put to sleep or woken.
    pub groups: Vec<GroupChange>,
}

/// Runs the stages from resolve to diff.
///
/// # Errors
/// A value cannot be written as JSON.
pub(crate) fn decide(inputs: Inputs<'_>, planner: &mut impl Planner) -> Result<Decided, serde_json::Error> {
    let resolved = resolve(inputs)?;
    let planned = plan(inputs, &resolved, planner)?;
    let scaled = scale(inputs, &resolved, &planned);
    let manifests = build(inputs, &planned, &scaled);
    let diff = diff(DiffInput {
        inputs,
        resolved: &resolved,
        planned: &planned,
        scaled: &scaled,
        manifests: &manifests,
    })?;
    Ok(Decided { resolved, planned, scaled, manifests, diff })
}

impl Decided {
    /// Returns the soft state after the reconcile.
    pub(crate) fn soft_state_update(&self) -> SoftStateUpdate {
        SoftStateUpdate {
            load: self.scaled.load.clone(),
            cooldown: self.planned.cooldown,
            function_counts: FunctionCounts::of_pods(&self.scaled.pods),
            takes_rollout_turn: self.diff.takes_rollout_turn,
            settled: self.diff.settled,
        }
    }

    /// Returns the effects of the first `made` writes. They are reported even if later writes failed: the next
    /// reconcile finds those objects written and reports nothing.
    pub(crate) fn effects(&self, made: usize) -> Effects {
        let Self { planned, scaled, diff, .. } = self;
        let any_written = |is: fn(&Write) -> bool| diff.writes.iter().take(made).any(is);
        let demand_written = any_written(|write| matches!(write, Write::Demand(_)));
        let plan_written = any_written(|write| matches!(write, Write::Plan(_)));
        let awake = scaled.demanded.phase != ScalingPhase::Asleep;
        let changes = if awake { scaled.changes.clone() } else { Vec::new() };
        let groups = if demand_written { scaled.groups.changes.clone() } else { Vec::new() };
        let mut events = diff.events_after(made);
        events.extend(changes.iter().map(ReplicaChange::event));
        events.extend(groups.iter().map(GroupChange::event));
        Effects {
            events,
            replanned: planned.cause.filter(|_| plan_written),
            phase: scaled.demanded.change.filter(|_| demand_written),
            scaled: changes,
            groups,
        }
    }
}
