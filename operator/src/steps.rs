//! Everything that is to be written, as values, in the order in which it is written. Pure.
//!
//! What is as it should be is no step: of a settled deployment nothing is left.

mod measuring;
mod rolling;
mod sleeping;

pub(super) use measuring::waits;

use super::altered;
use super::api::{MoEDemand, MoEDeployment, MoEPlan, MoERecord};
use super::build::{Surroundings, frame, inspector};
use super::conversations::Partner;
use super::demanded::{Demanded, demanded};
use super::drift::is_as;
use super::errand::{Errand, useless};
use super::events::Happening;
use super::inspection::Inspecting;
use super::known::Known;
use super::names::Component;
use super::observed::{Observed, is_owned_by};
use super::planned::{PlanState, Planned};
use super::pods::{PodView, Trouble};
use super::routing::RoutingTable;
use super::starting::Run;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::{Resource, ResourceExt};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

/// When to look again at something that others must move on, whatever events say.
const LATER: Duration = Duration::from_secs(15);
/// When to look again at what is as it should be: watches can miss something.
const SETTLED: Duration = Duration::from_secs(300);
/// Changes of a profile that somebody supplied are seen by looking: it is not ours to be watched.
const SUPPLIED: Duration = Duration::from_secs(30);
/// Plans that are kept: the one that runs, and those that came before.
const KEPT_PLANS: usize = 10;

/// Begins the note of an event about pods that were started; their names follow.
pub(crate) const STARTED: &str = "Started ";

/// The reason of a trouble with an object that somebody else has under the same name.
pub(crate) const NAME_TAKEN: &str = "NameTaken";

/// One write.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Write {
    /// Makes a Service what it is to be.
    Service(Keep<Service>),
    /// Makes a policy what it is to be.
    Policy(Keep<NetworkPolicy>),
    /// Makes a disruption budget what it is to be.
    Budget(Keep<PodDisruptionBudget>),
    /// Makes the copy of the model's facts what it is to be.
    Facts(Keep<MoERecord>),
    /// Makes the durable copy of the routing what it is to be, if it still is what was read.
    Routing(Keep<MoERecord>),
    /// Tells gateways whether functions run, and where, if nobody has written that or an entry since it was read.
    Demand(Keep<MoEDemand>),
    /// Takes the entries of gateways that are dead from what they said, if nobody has written since.
    ForgetGateways(Box<MoEDemand>),
    /// Stores a plan; what one says is never changed.
    Plan(Box<MoEPlan>),
    /// Stores a profile for all deployments that would measure the same.
    Profile(Box<MoERecord>),
    /// Has a profile stay for this deployment as well.
    Share(Box<MoERecord>),
    /// Makes a pod.
    Create(Creation),
    /// Gives a pod back the labels that somebody took or changed.
    Relabel {
        /// As it is.
        live: Box<Pod>,
        /// As it was made.
        wanted: Box<Pod>,
    },
    /// Deletes a pod.
    Delete(super::rollout::Deletion),
    /// Deletes a disruption budget of this name and uid.
    DeleteBudget(String, String),
    /// Deletes a plan of this name and uid.
    DeletePlan(String, String),
}

/// An object as it is to be, and as it was read; none: it was not found by its labels.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Keep<K> {
    /// As it is to be.
    pub wanted: Box<K>,
    /// As it was read.
    pub live: Option<Box<K>>,
}

/// A pod that is to be made.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Creation {
    /// The pod.
    pub pod: Box<Pod>,
    /// Which part it plays.
    pub component: Component,
    /// What is said once it is made.
    pub happening: Happening,
}

/// Everything that is to be done for a deployment now.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Steps {
    /// What is to be written, one after the other.
    pub writes: Vec<Write>,
    /// Whom to speak with after that, and what main functions are to have in force.
    pub partners: Vec<Partner>,
    /// What cannot be done.
    pub troubles: Vec<Trouble>,
    /// What happened since the last look, and what is worth saying about this one, each with the number of writes before it.
    happenings: Vec<(usize, Happening)>,
    /// How measuring the hardware stands, while the plan stands on a prior.
    pub profiling: Option<String>,
    /// The pods of functions.
    pub pods: Vec<PodView>,
    /// Whether functions are to run.
    pub demanded: Demanded,
    /// Whether everything is as it is to be.
    pub settled: bool,
    /// When to look again at the latest.
    pub look_again: Duration,
}

/// What steps are made from.
#[derive(Clone, Copy)]
struct Scene<'a> {
    owner: &'a MoEDeployment,
    observed: &'a Observed,
    known: &'a Known,
    planned: &'a Planned,
    around: &'a Surroundings,
}

/// What is to be done for `owner` now, whose functions are `pods`.
///
/// # Errors
/// A value cannot be written as JSON.
pub(crate) fn steps(
    owner: &MoEDeployment,
    (observed, pods): (&Observed, Vec<PodView>),
    known: &Known,
    planned: &Planned,
    around: &Surroundings,
) -> Result<Steps, serde_json::Error> {
    let scene = Scene { owner, observed, known, planned, around };
    let mut pods = pods;
    if let Some(target) = &planned.target {
        altered::mark(&mut pods, &observed.pods, owner, &target.revision, &around.comparison);
    }
    let mut steps = Steps {
        writes: Vec::new(),
        partners: Vec::new(),
        troubles: planned.troubles.clone(),
        happenings: Vec::new(),
        profiling: None,
        demanded: demanded(owner, observed, known, planned, &pods, around),
        pods,
        settled: false,
        look_again: SETTLED,
    };
    // Before any pod is made: a pod without its policy would be open to all.
    steps.frame(scene);
    steps.model(scene)?;
    steps.writes.extend(planned.new.clone().map(Box::new).map(Write::Plan));
    planned.happenings.iter().cloned().for_each(|happening| steps.say(happening));
    if planned.state == PlanState::Planning {
        steps.look_within(LATER);
    }
    // Before any function is started or ended by it.
    steps.demand(scene);
    steps.roll(scene)?;
    steps.profile(scene)?;
    steps.prune(scene);
    Ok(steps)
}

impl Scene<'_> {
    fn uid(&self) -> String {
        self.owner.uid().unwrap_or_default()
    }

    fn table(&self) -> RoutingTable {
        self.observed.table(self.owner)
    }
}

impl Steps {
    /// What is said once the first `written` writes are made, be it that those after them failed: the next look finds what is
    /// written and says nothing of it.
    pub(crate) fn said(&self, written: usize) -> Vec<Happening> {
        let said = self.happenings.iter().filter(|(before, _)| *before <= written);
        said.map(|(_, happening)| happening.clone()).collect()
    }

    /// Once all that is to be written so far is written.
    fn say(&mut self, happening: Happening) {
        self.happenings.push((self.writes.len(), happening));
    }

    /// Remote functions that are to be asked whether they serve.
    pub(super) fn starting(&self) -> BTreeMap<Run, IpAddr> {
        let starting = self.pods.iter().filter(|pod| pod.starting && !pod.is_main && pod.is_sound());
        starting.filter_map(|pod| Some((pod.run(), pod.ip?))).collect()
    }

    fn look_within(&mut self, time: Duration) {
        self.look_again = self.look_again.min(time);
    }

    fn look_at(&mut self, at: Timestamp, now: Timestamp) {
        // A little later, so that the time has come.
        let after = Duration::try_from(at.duration_since(now)).unwrap_or_default();
        self.look_within(after + Duration::from_millis(100));
    }

    /// Makes one of `there` what is `wanted`, unless it is already, or is somebody else's.
    fn keep<K>(&mut self, scene: Scene<'_>, wanted: K, there: &[K], write: impl FnOnce(Keep<K>) -> Write)
    where
        K: Resource<DynamicType = ()> + Clone + serde::Serialize,
    {
        let live = there.iter().find(|live| live.name_any() == wanted.name_any());
        match live {
            Some(live) if !is_owned_by(live, &scene.uid()) => self.troubles.push(name_taken(&wanted)),
            Some(live) if is_as(live, &wanted) => {}
            live => {
                self.writes.push(write(Keep { live: live.cloned().map(Box::new), wanted: Box::new(wanted) }))
            }
        }
    }

    /// What gateways are told. It comes to nothing together with all that follows where a gateway has written meanwhile.
    fn demand(&mut self, scene: Scene<'_>) {
        if scene.planned.forbidden && scene.observed.demand.is_none() {
            return;
        }
        self.troubles.extend(self.demanded.trouble.clone());
        if let Some(time) = self.demanded.look_again {
            self.look_within(time);
        }
        let Some(wanted) = self.demanded.object.clone() else { return };
        let live = scene.observed.demand.as_ref();
        let is_ours = live.is_none_or(|live| is_owned_by(live, &scene.uid()));
        if !is_ours {
            return self.troubles.push(name_taken(&wanted));
        }
        // Lists that became shorter count as well, and labels that were taken.
        let labelled = |live: &MoEDemand| is_as(&live.metadata, &wanted.metadata);
        if live.is_some_and(|live| live.spec == wanted.spec && labelled(live)) {
            self.writes.extend(self.demanded.without_dead.clone().map(Box::new).map(Write::ForgetGateways));
            return;
        }
        let live = live.cloned().map(Box::new);
        self.writes.push(Write::Demand(Keep { wanted: Box::new(wanted), live }));
        for happening in self.demanded.happenings.clone() {
            self.say(happening);
        }
    }

    fn frame(&mut self, scene: Scene<'_>) {
        if scene.planned.forbidden && scene.observed.services.is_empty() {
            return;
        }
        // Without `..`: a new kind of object does not compile until it is written.
        let super::build::Frame { services, network_policies } = frame(scene.owner, scene.around);
        for service in services {
            self.keep(scene, service, &scene.observed.services, Write::Service);
        }
        for policy in network_policies {
            self.keep(scene, policy, &scene.observed.network_policies, Write::Policy);
        }
    }

    /// The facts of the checkpoint are kept; an inspector is sent where they are not known.
    fn model(&mut self, scene: Scene<'_>) -> Result<(), serde_json::Error> {
        let Scene { owner, observed, known, around, .. } = scene;
        let model = &known.model;
        let errand = model.inspecting.errand();
        let useful = errand.map(|errand| (model.subject.as_str(), errand));
        let over = useless(&observed.pods, &scene.uid(), Component::Inspector, useful);
        self.writes.extend(over.into_iter().map(Write::Delete));
        if let Some(facts) = model.facts() {
            // Labels and owner included.
            let there: Vec<MoERecord> = observed.model.iter().cloned().collect();
            self.keep(scene, facts.record(owner, &model.subject)?, &there, Write::Facts);
        }
        match &model.inspecting {
            Inspecting::Sent(Errand::Start { .. }) if scene.planned.forbidden => {}
            Inspecting::Sent(Errand::Start { incarnation, .. }) => {
                self.look_within(LATER);
                // One that cannot be built is how planning stands.
                if let Ok(pod) = inspector(owner, &model.subject, *incarnation, around) {
                    let note = format!("Pod {} inspects the model.", pod.name_any());
                    self.create(pod, Component::Inspector, Happening::normal("InspectorStarted", note));
                }
            }
            Inspecting::Sent(Errand::Failed { retry_at, .. }) => self.look_at(*retry_at, observed.now),
            Inspecting::Sent(Errand::Waiting { .. } | Errand::Done { .. }) => self.look_within(LATER),
            Inspecting::Known(_) => {}
        }
        Ok(())
    }

    fn create(&mut self, pod: Pod, component: Component, happening: Happening) {
        self.writes.push(Write::Create(Creation { pod: Box::new(pod), component, happening }));
    }

    /// Deletes the oldest plans but the last ten; those that are proposed, to run or running stay.
    fn prune(&mut self, scene: Scene<'_>) {
        for plan in &scene.planned.given_up {
            let note = format!(
                "Deleted plan {}: its functions could not start; an earlier plan is used.",
                plan.name_any()
            );
            self.writes.push(Write::DeletePlan(plan.name_any(), plan.uid().unwrap_or_default()));
            self.say(Happening::warning("PlanGivenUp", note));
        }
        let given_up = |plan: &&MoEPlan| scene.planned.given_up.iter().any(|one| one.uid() == plan.uid());
        let in_use = scene.planned.in_use(scene.owner);
        let plans = &scene.observed.plans;
        let kept = KEPT_PLANS.saturating_sub(usize::from(scene.planned.new.is_some()));
        let old = plans.iter().take(plans.len().saturating_sub(kept));
        let unused = old.filter(|plan| !in_use.contains(&plan.name_any()) && !given_up(plan));
        let named = unused.map(|plan| Write::DeletePlan(plan.name_any(), plan.uid().unwrap_or_default()));
        self.writes.extend(named);
    }
}

/// The trouble with an object whose name somebody else has.
pub(crate) fn name_taken<K: Resource<DynamicType = ()>>(wanted: &K) -> Trouble {
    let (kind, name) = (K::kind(&()), wanted.name_any());
    Trouble::new(NAME_TAKEN, format!("{kind} {name} has another owner; rename it, or this deployment"))
}
