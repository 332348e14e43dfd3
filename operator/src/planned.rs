//! The plan for the present spec, and which plan is to run. Pure, but for the time that a solution takes.

use super::api::{DemandPhase, MoEDeployment, MoEPlan, MoEPlanSpec, Mode};
use super::build::{BuildError, Revision, Surroundings, inspector, plan_name, plan_object, revision};
use super::errand::Errand;
use super::facts::ModelFacts;
use super::inspection::Inspecting;
use super::known::Known;
use super::observed::Observed;
use super::planning::{Planning, PlanningError, check_hosted};
use super::pods::{PodView, Trouble};
use super::routing::RoutingTable;
use kube::ResourceExt;

/// How planning stands.
#[derive(Debug, Clone, PartialEq)]
pub enum PlanState {
    /// The model is being looked at.
    Inspecting {
        /// What keeps the inspector.
        trouble: Option<Trouble>,
    },
    /// There is no plan for the present spec.
    Refused(Trouble),
    /// There is.
    Planned {
        /// Its hash.
        hash: String,
        /// The plan.
        plan: Box<MoEPlanSpec>,
    },
}

/// What a plan for the present spec takes.
#[derive(Debug)]
pub enum Task {
    /// Nothing: there is one, or there can be none.
    Done(PlanState),
    /// A solution.
    Solve {
        /// Of this.
        planning: Box<Planning>,
        /// What runs.
        previous: Option<Box<MoEPlanSpec>>,
    },
}

/// The plan that was decided for.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    /// How planning stands.
    pub state: PlanState,
    /// A new plan.
    pub new: Option<MoEPlan>,
    /// The plan that main functions were last told of.
    pub running: Option<String>,
    /// The plan that is to run, as functions.
    pub target: Option<Target>,
    /// What is wrong with the plan that is to run.
    pub troubles: Vec<Trouble>,
}

/// A plan that is to run.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// As functions.
    pub revision: Revision,
    /// The plan.
    pub plan: MoEPlanSpec,
}

/// What a plan for the present spec takes.
pub fn task(owner: &MoEDeployment, observed: &Observed, known: &Known, around: &Surroundings) -> Task {
    let (Some(facts), Some(hardware)) = (known.model.facts(), &known.hardware) else {
        return Task::Done(uninspected(owner, known, around));
    };
    let profile = match &hardware.profile {
        Ok(profile) => profile,
        Err(trouble) => return Task::Done(PlanState::Refused(trouble.clone())),
    };
    let planning = match Planning::new(&owner.name_any(), &owner.spec, facts, profile) {
        Ok(planning) => planning,
        Err(error) => return Task::Done(PlanState::Refused(refused(&error))),
    };
    let made = observed.plans.iter().rev().find(|plan| {
        plan.spec.inputs == planning.inputs && check_hosted(&plan.spec, &facts.inspection).is_ok()
    });
    if let Some((hash, plan)) = made.and_then(|plan| Some((hash_of(owner, plan)?, plan))) {
        return Task::Done(PlanState::Planned { hash, plan: Box::new(plan.spec.clone()) });
    }
    let hash = running(owner, observed);
    let previous = hash.as_ref().and_then(|hash| find(owner, &observed.plans, hash));
    let previous = previous.map(|plan| Box::new(plan.spec.clone()));
    if let (Some(hash), Some(plan), true) = (&hash, &previous, is_waking(observed)) {
        // Whoever waits waits for functions, not for a plan.
        return Task::Done(PlanState::Planned { hash: hash.clone(), plan: plan.clone() });
    }
    Task::Solve { planning: Box::new(planning), previous }
}

/// Somebody waits, or did a moment ago, for functions that do not run.
fn is_waking(observed: &Observed) -> bool {
    observed.demand.as_ref().is_some_and(|demand| match demand.spec.phase {
        DemandPhase::Waking => demand.spec.wakes > 0,
        DemandPhase::Asleep => demand.gateways().iter().any(|entry| entry.waiting > 0),
        DemandPhase::Active | DemandPhase::Draining => false,
    })
}

/// How planning stands while the model is not known.
fn uninspected(owner: &MoEDeployment, known: &Known, around: &Surroundings) -> PlanState {
    if let Some(trouble) = known.model.refused() {
        return PlanState::Refused(trouble.clone());
    }
    match &known.model.inspecting {
        Inspecting::Sent(Errand::Failed { trouble, .. }) => PlanState::Refused(trouble.clone()),
        Inspecting::Sent(Errand::Waiting { trouble }) => PlanState::Inspecting { trouble: trouble.clone() },
        Inspecting::Sent(Errand::Start { incarnation, after }) => {
            match inspector(owner, &known.model.subject, *incarnation, around) {
                Ok(_) => PlanState::Inspecting { trouble: after.clone() },
                Err(error) => PlanState::Refused(invalid_source(&error)),
            }
        }
        Inspecting::Known(_) | Inspecting::Sent(Errand::Done { .. }) => {
            PlanState::Inspecting { trouble: None }
        }
    }
}

/// A new plan as how planning stands, and its object.
///
/// # Errors
/// The plan cannot be written as JSON.
pub fn solved(
    owner: &MoEDeployment,
    solution: Result<MoEPlanSpec, PlanningError>,
) -> Result<(PlanState, Option<MoEPlan>), serde_json::Error> {
    let plan = match solution {
        Ok(plan) => plan,
        Err(error) => return Ok((PlanState::Refused(refused(&error)), None)),
    };
    let (hash, object) = plan_object(owner, plan)?;
    Ok((PlanState::Planned { hash, plan: Box::new(object.spec.clone()) }, Some(object)))
}

impl Planned {
    /// What is to run: the plan for the present spec, or in mode Advisory the accepted one; while there is
    /// none, what runs already.
    pub fn new(
        owner: &MoEDeployment,
        observed: &Observed,
        known: &Known,
        (state, new): (PlanState, Option<MoEPlan>),
        around: &Surroundings,
    ) -> Self {
        let running = running(owner, observed);
        let mut planned = Self { state, new, running, target: None, troubles: Vec::new() };
        let wanted = planned.wanted(owner, observed);
        let wanted = wanted.map(|wanted| planned.instead_of_failed(owner, observed, wanted));
        planned.target = wanted.and_then(|(hash, plan)| {
            if !planned.is_of_model(&hash, &plan, known.model.facts()) {
                return None;
            }
            match revision(owner, &hash, &plan, around) {
                Ok(revision) => Some(Target { revision, plan }),
                Err(error) => {
                    planned.troubles.push(Trouble::new("InvalidSpec", error.to_string()));
                    None
                }
            }
        });
        planned
    }

    fn wanted(&mut self, owner: &MoEDeployment, observed: &Observed) -> Option<(String, MoEPlanSpec)> {
        let plans = || observed.plans.iter().chain(&self.new);
        let stored = |hash: &str| Some((hash.to_owned(), find(owner, plans(), hash)?.spec.clone()));
        let keep = || self.running.as_deref().and_then(stored);
        match owner.spec.mode {
            Mode::Active => match &self.state {
                PlanState::Planned { hash, plan } => Some((hash.clone(), plan.as_ref().clone())),
                PlanState::Inspecting { .. } | PlanState::Refused(_) => keep(),
            },
            Mode::Advisory => {
                let Some(accepted) = &owner.spec.accepted_plan else { return keep() };
                let found = stored(accepted);
                if found.is_some() {
                    return found;
                }
                let kept = keep();
                let message = format!("spec.acceptedPlan: this deployment has no plan {accepted}");
                self.troubles.push(Trouble::new("PlanUnknown", message));
                kept
            }
        }
    }

    /// The plan that serves, in place of one that did not become ready in time under the present spec.
    fn instead_of_failed(
        &mut self,
        owner: &MoEDeployment,
        observed: &Observed,
        (hash, plan): (String, MoEPlanSpec),
    ) -> (String, MoEPlanSpec) {
        let status = owner.status.as_ref();
        let is_same_spec =
            status.is_some_and(|status| status.observed_generation == owner.metadata.generation);
        let failed = status.and_then(|status| status.failed_plan.as_ref()).filter(|_| is_same_spec);
        let serving = serving(owner, observed).filter(|serving| *serving != hash);
        let found = serving.and_then(|serving| {
            let plan = find(owner, &observed.plans, &serving)?.spec.clone();
            Some((serving, plan))
        });
        match found {
            Some((serving, plan)) if failed == Some(&hash) => {
                let message = format!(
                    "plan {hash} did not become ready in time; plan {serving} runs on until the spec or the plan \
                     is another one"
                );
                self.troubles.push(Trouble::new("RolledBack", message));
                (serving, plan)
            }
            _ => (hash, plan),
        }
    }

    /// Whether the plan's functions are those of the model, where it is of this one.
    fn is_of_model(&mut self, hash: &str, plan: &MoEPlanSpec, facts: Option<&ModelFacts>) -> bool {
        let Some(facts) = facts.filter(|facts| plan.model.digest == facts.inspection.fingerprint) else {
            return true;
        };
        let checked = check_hosted(plan, &facts.inspection);
        let trouble = |message| Trouble::new("InvalidPlan", format!("plan {hash}: {message}"));
        self.troubles.extend(checked.as_ref().err().map(trouble));
        checked.is_ok()
    }

    /// Names of the plans that are proposed, to run or running.
    pub fn in_use(&self, owner: &MoEDeployment) -> Vec<String> {
        let planned = match &self.state {
            PlanState::Planned { hash, .. } => Some(hash),
            PlanState::Inspecting { .. } | PlanState::Refused(_) => None,
        };
        let target = self.target.as_ref().map(|target| &target.revision.plan);
        let in_use = [planned, target, self.running.as_ref()].into_iter().flatten();
        in_use.map(|hash| plan_name(&owner.name_any(), hash)).collect()
    }
}

/// The plan that main functions were last told of.
fn running(owner: &MoEDeployment, observed: &Observed) -> Option<String> {
    let table = observed.routing.as_ref().map(RoutingTable::from_config_map).unwrap_or_default();
    let newest = table.entries.into_values().max_by_key(|generation| generation.number);
    newest.map(|generation| generation.plan).or_else(|| owner.status.as_ref()?.plan.clone())
}

/// The plan by which main functions serve.
pub fn serving(owner: &MoEDeployment, observed: &Observed) -> Option<String> {
    let uid = owner.uid().unwrap_or_default();
    let table = observed.routing.as_ref().map(RoutingTable::from_config_map).unwrap_or_default();
    let views = observed.pods.iter().filter_map(|pod| PodView::of(pod, &uid, observed.now));
    let mains: Vec<PodView> = views.filter(|pod| pod.is_main && pod.is_sound() && pod.ready).collect();
    let serves = |identity: &String| mains.iter().any(|main| main.identity == *identity);
    let entries = table.entries.into_iter().filter(|(identity, _)| serves(identity));
    entries.max_by_key(|(_, generation)| generation.number).map(|(_, generation)| generation.plan)
}

/// The plan with this hash.
pub fn find<'a>(
    owner: &MoEDeployment,
    plans: impl IntoIterator<Item = &'a MoEPlan>,
    hash: &str,
) -> Option<&'a MoEPlan> {
    let name = plan_name(&owner.name_any(), hash);
    plans.into_iter().find(|plan| plan.name_any() == name)
}

/// The hash in a plan's name.
fn hash_of(owner: &MoEDeployment, plan: &MoEPlan) -> Option<String> {
    let name = plan.name_any();
    let hash = name.strip_prefix(&owner.name_any())?.strip_prefix('-')?;
    Some(hash.to_owned())
}

fn invalid_source(error: &BuildError) -> Trouble {
    Trouble::new("InvalidSpec", format!("spec.model.source: {error}"))
}

fn refused(error: &PlanningError) -> Trouble {
    let reason = match error {
        PlanningError::Spec { .. } | PlanningError::Json(_) => "InvalidSpec",
        PlanningError::Profile(_) => "ProfileInvalid",
        PlanningError::Infeasible(_) => "Infeasible",
        PlanningError::Aborted(_) => "PlanningAborted",
    };
    Trouble::new(reason, error.to_string())
}
