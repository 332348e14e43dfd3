//! The diff stage: the writes that lead from the objects in the cluster to the manifests, as values, in their order. Pure.
//!
//! An object that is as its manifest says is not written: of a settled deployment nothing is left.

mod measuring;
mod rolling;
mod sleeping;

pub(super) use measuring::waits;

use super::build::Manifests;
use super::drift::is_as;
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

/// When to look again at something that others must move on, whatever events say.
const LATER: Duration = Duration::from_secs(15);
/// When to look again at what is as it should be: watches can miss something.
const SETTLED: Duration = Duration::from_secs(300);
/// Interval of checks for changes of a profile that a user supplied: the operator does not own it, and so does not
/// watch it.
const SUPPLIED: Duration = Duration::from_secs(30);
/// Plans that are kept: the one that runs, and those that came before.
const KEPT_PLANS: usize = 10;

/// Output of the diff stage.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Diff {
    /// Writes, in their order.
    pub writes: Vec<Write>,
    /// Main functions to speak with after the writes, and what each is to have in force.
    pub polled_mains: Vec<PolledMain>,
    /// Remote functions that start, to be probed after the writes.
    pub starting: BTreeMap<ContainerRun, IpAddr>,
    /// Faults that keep something from being done.
    pub issues: Vec<StatusIssue>,
    /// Events, each with the number of writes before it.
    events: Vec<(usize, ClusterEvent)>,
    /// State of the measurement of the hardware, while the plan stands on a prior.
    pub profiling: Option<String>,
    /// The deployment takes its turn for a rollout that no user asked for, or keeps it.
    pub takes_rollout_turn: bool,
    /// Other deployments have their turns before it.
    pub waits: bool,
    /// Nothing is left to roll out.
    pub settled: bool,
    /// When to look again at the latest.
    pub requeue_after: Duration,
}

/// Outputs of the stages before, and their input.
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

/// Lists the writes that lead to the manifests.
///
/// # Errors
/// A value cannot be written as JSON.
pub(crate) fn diff(scene: DiffInput<'_>) -> Result<Diff, serde_json::Error> {
    let DiffInput { inputs: Inputs { owner, observed, soft_state, .. }, planned, scaled, manifests, .. } =
        scene;
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
        waits: is_unrequested && !soft_state.has_rollout_turn,
        settled: false,
        requeue_after: SETTLED,
    };
    // Before any pod is made: a pod without its policy would be open to all.
    diff.frame(scene);
    diff.model(scene)?;
    diff.writes.extend(planned.new.clone().map(Box::new).map(Write::Plan));
    planned.events.iter().cloned().for_each(|event| diff.say(event));
    if planned.state == PlanState::Planning {
        diff.requeue_within(LATER);
    }
    // Before any function is started or ended by it.
    diff.demand(scene);
    diff.roll(scene)?;
    diff.profile(scene)?;
    diff.prune(scene);
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
    /// Returns the events of the first `written` writes. They are published even if later writes failed: the next reconcile
    /// finds the objects written, and has no events for them.
    pub(crate) fn said(&self, written: usize) -> Vec<ClusterEvent> {
        let said = self.events.iter().filter(|(before, _)| *before <= written);
        said.map(|(_, event)| event.clone()).collect()
    }

    /// Adds an event, for when all writes so far are made.
    fn say(&mut self, event: ClusterEvent) {
        self.events.push((self.writes.len(), event));
    }

    fn requeue_within(&mut self, time: Duration) {
        self.requeue_after = self.requeue_after.min(time);
    }

    fn requeue_at(&mut self, at: Timestamp, now: Timestamp) {
        // A little later, so that the time has come.
        let after = Duration::try_from(at.duration_since(now)).unwrap_or_default();
        self.requeue_within(after + Duration::from_millis(100));
    }

    /// Makes the object in `there` equal to `wanted`, unless it already is, or belongs to another owner.
    fn keep<K>(
        &mut self,
        scene: DiffInput<'_>,
        wanted: K,
        there: &[K],
        write: impl FnOnce(DesiredObject<K>) -> Write,
    ) where
        K: Resource<DynamicType = ()> + Clone + serde::Serialize,
    {
        let live = there.iter().find(|live| live.name_any() == wanted.name_any());
        match live {
            Some(live) if !is_owned_by(live, &scene.uid()) => self.issues.push(name_taken(&wanted)),
            Some(live) if is_as(live, &wanted) => {}
            live => self
                .writes
                .push(write(DesiredObject { live: live.cloned().map(Box::new), wanted: Box::new(wanted) })),
        }
    }

    /// Writes the operator's part of the demand object. If a gateway has written meanwhile, this fails, and with it all
    /// that follows.
    fn demand(&mut self, scene: DiffInput<'_>) {
        if scene.planned.forbidden && scene.inputs.observed.demand.is_none() {
            return;
        }
        self.issues.extend(scene.scaled.demanded.issue.clone());
        if let Some(time) = scene.scaled.demanded.requeue_after {
            self.requeue_within(time);
        }
        let Some(wanted) = scene.scaled.demanded.object.clone() else { return };
        let live = scene.inputs.observed.demand.as_ref();
        let is_ours = live.is_none_or(|live| is_owned_by(live, &scene.uid()));
        if !is_ours {
            return self.issues.push(name_taken(&wanted));
        }
        // Lists that became shorter count as well, and labels that were taken.
        let labelled = |live: &MoEDemand| is_as(&live.metadata, &wanted.metadata);
        if live.is_some_and(|live| live.spec == wanted.spec && labelled(live)) {
            self.writes
                .extend(scene.scaled.demanded.without_dead.clone().map(Box::new).map(Write::ForgetGateways));
            return;
        }
        let live = live.cloned().map(Box::new);
        self.writes.push(Write::Demand(DesiredObject { wanted: Box::new(wanted), live }));
        for event in scene.scaled.demanded.events.clone() {
            self.say(event);
        }
    }

    fn frame(&mut self, scene: DiffInput<'_>) {
        if scene.planned.forbidden && scene.inputs.observed.services.is_empty() {
            return;
        }
        // Without `..`: a new kind of object does not compile until it is written.
        let Frame { services, network_policies } = scene.manifests.frame.clone();
        for service in services {
            self.keep(scene, service, &scene.inputs.observed.services, Write::Service);
        }
        for policy in network_policies {
            self.keep(scene, policy, &scene.inputs.observed.network_policies, Write::Policy);
        }
    }

    /// The facts of the checkpoint are kept; an inspector is sent where they are not known.
    fn model(&mut self, scene: DiffInput<'_>) -> Result<(), serde_json::Error> {
        let DiffInput { inputs: Inputs { owner, observed, environment, .. }, resolved, .. } = scene;
        let model = &resolved.model;
        let one_shot = model.inspection_state.one_shot();
        let useful = one_shot.map(|one_shot| (model.subject.as_str(), one_shot));
        let over = obsolete_pods(&observed.pods, &scene.uid(), Component::Inspector, useful);
        self.writes.extend(over.into_iter().map(Write::Delete));
        if let Some(facts) = model.facts() {
            // Labels and owner included.
            let there: Vec<MoERecord> = observed.model.iter().cloned().collect();
            self.keep(scene, facts.record(owner, &model.subject)?, &there, Write::Facts);
        }
        match &model.inspection_state {
            InspectionState::Sent(OneShotState::Start { .. }) if scene.planned.forbidden => {}
            InspectionState::Sent(OneShotState::Start { incarnation, .. }) => {
                self.requeue_within(LATER);
                // One that cannot be built is how planning stands.
                if let Ok(pod) = inspector(owner, &model.subject, *incarnation, environment) {
                    let note = format!("Pod {} inspects the model.", pod.name_any());
                    self.create(pod, Component::Inspector, ClusterEvent::normal("InspectorStarted", note));
                }
            }
            InspectionState::Sent(OneShotState::Failed { retry_at, .. }) => {
                self.requeue_at(*retry_at, observed.now)
            }
            InspectionState::Sent(OneShotState::Waiting { .. } | OneShotState::Done { .. }) => {
                self.requeue_within(LATER)
            }
            InspectionState::Known(_) => {}
        }
        Ok(())
    }

    fn create(&mut self, pod: Pod, component: Component, event: ClusterEvent) {
        self.writes.push(Write::Create(Creation { pod: Box::new(pod), component, event }));
    }

    /// Deletes the oldest plans but the last ten; those that are proposed, to run or running stay.
    fn prune(&mut self, scene: DiffInput<'_>) {
        for plan in &scene.planned.given_up {
            let note = format!(
                "Deleted plan {}: its functions could not start; an earlier plan is used.",
                plan.name_any()
            );
            self.writes.push(Write::DeletePlan(plan.name_any(), plan.uid().unwrap_or_default()));
            self.say(ClusterEvent::warning("PlanGivenUp", note));
        }
        let given_up = |plan: &&MoEPlan| scene.planned.given_up.iter().any(|one| one.uid() == plan.uid());
        let in_use = scene.planned.in_use(scene.inputs.owner);
        let plans = &scene.inputs.observed.plans;
        let kept = KEPT_PLANS.saturating_sub(usize::from(scene.planned.new.is_some()));
        let old = plans.iter().take(plans.len().saturating_sub(kept));
        let unused = old.filter(|plan| !in_use.contains(&plan.name_any()) && !given_up(plan));
        let named = unused.map(|plan| Write::DeletePlan(plan.name_any(), plan.uid().unwrap_or_default()));
        self.writes.extend(named);
    }
}
