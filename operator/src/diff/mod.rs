//! Diff stage: lists the writes that turn the observed objects into the manifests, in order. Pure.
//!
//! An object that already equals its manifest is not written, so a settled deployment causes no writes.

mod measurement;
mod rollout_writes;
mod scale_to_zero;

pub(super) use measurement::profiler_blocked;

use super::build::Manifests;
use super::drift::is_up_to_date;
use super::events::ClusterEvent;
use super::inputs::Inputs;
use super::inspection::InspectionState;
use super::main_pollers::PolledMain;
use super::manifests::{Frame, inspector};
use super::names::Component;
use super::one_shot::{OneShotState, obsolete_pods};
use super::ownership::{is_owned_by, name_taken};
use super::plan::{PlanStage, PlanState};
use super::pods::{ContainerRun, PodView};
use super::resolve::Resolved;
use super::rollout_turn;
use super::routing::RoutingTable;
use super::scale::Scaled;
use super::status_issue::StatusIssue;
use super::write::{Creation, DesiredObject, Write};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Resource, ResourceExt};
use remoe_api::{MoEDemand, MoEPlan, MoERecord};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

/// Interval of reconciles while waiting for another component, as a fallback to events.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(15);
/// Interval of reconciles of a settled deployment, as a fallback for missed watch events.
const SETTLED_INTERVAL: Duration = Duration::from_secs(300);
/// Interval of checks of a profile that a user supplied. The operator does not own it, so it does not watch it.
const SUPPLIED_PROFILE_INTERVAL: Duration = Duration::from_secs(30);
/// Number of stored plans, including the running one.
const MAX_STORED_PLANS: usize = 10;

/// Output of the diff stage.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Diff {
    /// Writes, in order.
    pub writes: Vec<Write>,
    /// Main functions to poll after the writes, with the generation that each must have in force.
    pub polled_mains: Vec<PolledMain>,
    /// Starting remote functions to probe after the writes, with their addresses.
    pub starting: BTreeMap<ContainerRun, IpAddr>,
    /// Issues that blocked some writes.
    pub issues: Vec<StatusIssue>,
    /// Events, each with the number of writes before it.
    events: Vec<(usize, ClusterEvent)>,
    /// Progress of the hardware measurement, while the plan uses a prior.
    pub profiling: Option<String>,
    /// Set if the deployment takes or keeps a turn for a rollout that no user requested.
    pub takes_rollout_turn: bool,
    /// Set if the rollout waits for its turn.
    pub awaits_turn: bool,
    /// Set if the rollout is complete.
    pub settled: bool,
    /// Longest time until the next reconcile.
    pub requeue_after: Duration,
}

/// Input of the diff stage: outputs of all earlier stages.
#[derive(Clone, Copy)]
pub(crate) struct DiffInput<'a> {
    /// Input of the reconcile.
    pub inputs: Inputs<'a>,
    /// Output of the resolve stage.
    pub resolved: &'a Resolved,
    /// Output of the plan stage.
    pub planned: &'a PlanStage,
    /// Output of the scale stage.
    pub scaled: &'a Scaled,
    /// Output of the build stage.
    pub manifests: &'a Manifests,
}

/// Lists the writes that turn the observed objects into the manifests.
///
/// # Errors
/// A value cannot be written as JSON.
pub(crate) fn diff(stages: DiffInput<'_>) -> Result<Diff, serde_json::Error> {
    let DiffInput { inputs: Inputs { owner, observed, soft_state, .. }, planned, scaled, manifests, .. } =
        stages;
    let target = manifests.target.as_ref().map(|target| &target.revision);
    let is_unrequested = target.is_some_and(|target| {
        rollout_turn::needs_turn(owner, &observed.functions(owner), &observed.table(owner), target)
    });
    let starts = |pod: &&PodView| pod.starting && !pod.is_main && pod.is_sound();
    let starting = scaled.pods.iter().filter(starts).filter_map(|pod| Some((pod.run(), pod.ip?)));
    let mut diff = Diff {
        writes: Vec::new(),
        polled_mains: Vec::new(),
        starting: starting.collect(),
        issues: planned.issues.clone(),
        events: Vec::new(),
        profiling: None,
        takes_rollout_turn: is_unrequested && soft_state.has_rollout_turn,
        awaits_turn: is_unrequested && !soft_state.has_rollout_turn,
        settled: false,
        requeue_after: SETTLED_INTERVAL,
    };
    // Network policies come before any pod: a pod without its policy would accept all traffic.
    diff.frame(stages);
    diff.model(stages)?;
    diff.writes.extend(planned.new.clone().map(Box::new).map(Write::Plan));
    planned.events.iter().cloned().for_each(|event| diff.add_event(event));
    if planned.state == PlanState::Planning {
        diff.requeue_within(PROGRESS_INTERVAL);
    }
    // The demand object is written before any function is started or stopped because of it.
    diff.demand(stages);
    diff.write_rollout_step(stages)?;
    diff.write_profile(stages)?;
    diff.prune_plans(stages);
    if let Some(after) = scaled.requeue_after {
        diff.requeue_within(after);
    }
    Ok(diff)
}

impl DiffInput<'_> {
    fn uid(&self) -> String {
        self.inputs.owner.uid().unwrap_or_default()
    }

    fn table(&self) -> RoutingTable {
        self.inputs.observed.table(self.inputs.owner)
    }
}

impl Diff {
    /// Returns the events of the first `written` writes. They are published even if later writes failed: the next
    /// reconcile finds those objects written and has no events for them.
    pub(crate) fn events_after(&self, written: usize) -> Vec<ClusterEvent> {
        let events = self.events.iter().filter(|(before, _)| *before <= written);
        events.map(|(_, event)| event.clone()).collect()
    }

    /// Adds an event that is published after all writes so far.
    fn add_event(&mut self, event: ClusterEvent) {
        self.events.push((self.writes.len(), event));
    }

    fn requeue_within(&mut self, time: Duration) {
        self.requeue_after = self.requeue_after.min(time);
    }

    fn requeue_at(&mut self, at: Timestamp, now: Timestamp) {
        // The margin makes sure that the time has passed.
        let after = Duration::try_from(at.duration_since(now)).unwrap_or_default();
        self.requeue_within(after + Duration::from_millis(100));
    }

    /// Writes `wanted`, unless `existing` has an equal object, or one of another owner.
    fn write_if_changed<K>(
        &mut self,
        stages: DiffInput<'_>,
        wanted: K,
        existing: &[K],
        write: impl FnOnce(DesiredObject<K>) -> Write,
    ) where
        K: Resource<DynamicType = ()> + Clone + serde::Serialize,
    {
        let live = existing.iter().find(|live| live.name_any() == wanted.name_any());
        match live {
            Some(live) if !is_owned_by(live, &stages.uid()) => self.issues.push(name_taken(&wanted)),
            Some(live) if is_up_to_date(live, &wanted) => {}
            live => self
                .writes
                .push(write(DesiredObject { live: live.cloned().map(Box::new), wanted: Box::new(wanted) })),
        }
    }

    /// Writes the operator's part of the demand object. The write fails, and stops all later ones, if a gateway wrote
    /// the object meanwhile.
    fn demand(&mut self, stages: DiffInput<'_>) {
        if stages.planned.forbidden && stages.inputs.observed.demand.is_none() {
            return;
        }
        self.issues.extend(stages.scaled.demanded.issue.clone());
        if let Some(time) = stages.scaled.demanded.requeue_after {
            self.requeue_within(time);
        }
        let Some(wanted) = stages.scaled.demanded.object.clone() else { return };
        let live = stages.inputs.observed.demand.as_ref();
        let is_ours = live.is_none_or(|live| is_owned_by(live, &stages.uid()));
        if !is_ours {
            return self.issues.push(name_taken(&wanted));
        }
        // Full equality: removed list entries and labels count as well.
        let labelled = |live: &MoEDemand| is_up_to_date(&live.metadata, &wanted.metadata);
        if live.is_some_and(|live| live.spec == wanted.spec && labelled(live)) {
            self.writes
                .extend(stages.scaled.demanded.without_dead.clone().map(Box::new).map(Write::ForgetGateways));
            return;
        }
        let live = live.cloned().map(Box::new);
        self.writes.push(Write::Demand(DesiredObject { wanted: Box::new(wanted), live }));
        for event in stages.scaled.demanded.events.clone() {
            self.add_event(event);
        }
    }

    fn frame(&mut self, stages: DiffInput<'_>) {
        if stages.planned.forbidden && stages.inputs.observed.services.is_empty() {
            return;
        }
        // No `..` in the pattern, so that a new kind of object cannot be forgotten here.
        let Frame { services, network_policies } = stages.manifests.frame.clone();
        for service in services {
            self.write_if_changed(stages, service, &stages.inputs.observed.services, Write::Service);
        }
        for policy in network_policies {
            self.write_if_changed(stages, policy, &stages.inputs.observed.network_policies, Write::Policy);
        }
    }

    /// Stores the facts of the checkpoint, or starts an inspector if they are unknown.
    fn model(&mut self, stages: DiffInput<'_>) -> Result<(), serde_json::Error> {
        let DiffInput { inputs: Inputs { owner, observed, environment, .. }, resolved, .. } = stages;
        let model = &resolved.model;
        let one_shot = model.inspection_state.one_shot();
        let useful = one_shot.map(|one_shot| (model.subject.as_str(), one_shot));
        let obsolete = obsolete_pods(&observed.pods, &stages.uid(), Component::Inspector, useful);
        self.writes.extend(obsolete.into_iter().map(Write::Delete));
        if let Some(facts) = model.facts() {
            // The comparison includes labels and owner.
            let existing: Vec<MoERecord> = observed.model.iter().cloned().collect();
            self.write_if_changed(stages, facts.record(owner, &model.subject)?, &existing, Write::Facts);
        }
        match &model.inspection_state {
            InspectionState::Inspecting(OneShotState::Start { .. }) if stages.planned.forbidden => {}
            InspectionState::Inspecting(OneShotState::Start { incarnation, .. }) => {
                self.requeue_within(PROGRESS_INTERVAL);
                // The plan stage reports an inspector that cannot be built.
                if let Ok(pod) = inspector(owner, &model.subject, *incarnation, environment) {
                    let note = format!("Pod {} inspects the model.", pod.name_any());
                    self.create(pod, Component::Inspector, ClusterEvent::normal("InspectorStarted", note));
                }
            }
            InspectionState::Inspecting(OneShotState::Failed { retry_at, .. }) => {
                self.requeue_at(*retry_at, observed.now)
            }
            InspectionState::Inspecting(OneShotState::Waiting { .. } | OneShotState::Done { .. }) => {
                self.requeue_within(PROGRESS_INTERVAL)
            }
            InspectionState::Known(_) => {}
        }
        Ok(())
    }

    fn create(&mut self, pod: Pod, component: Component, event: ClusterEvent) {
        self.writes.push(Write::Create(Creation { pod: Box::new(pod), component, event }));
    }

    /// Deletes old plans beyond the last `MAX_STORED_PLANS`. Plans that are proposed, desired or running stay.
    fn prune_plans(&mut self, stages: DiffInput<'_>) {
        for plan in &stages.planned.given_up {
            let note = format!(
                "Deleted plan {}: its functions could not start; an earlier plan is used.",
                plan.name_any()
            );
            self.writes.push(Write::DeletePlan(plan.name_any(), plan.uid().unwrap_or_default()));
            self.add_event(ClusterEvent::warning("PlanGivenUp", note));
        }
        let given_up = |plan: &&MoEPlan| stages.planned.given_up.iter().any(|one| one.uid() == plan.uid());
        let in_use = stages.planned.in_use(stages.inputs.owner);
        let plans = &stages.inputs.observed.plans;
        let kept = MAX_STORED_PLANS.saturating_sub(usize::from(stages.planned.new.is_some()));
        let surplus = plans.iter().take(plans.len().saturating_sub(kept));
        let unused = surplus.filter(|plan| !in_use.contains(&plan.name_any()) && !given_up(plan));
        let deletions = unused.map(|plan| Write::DeletePlan(plan.name_any(), plan.uid().unwrap_or_default()));
        self.writes.extend(deletions);
    }
}
