//! The plan for the present spec, and which plan is to run. Pure, but for the time that a solution takes.

use super::api::{
    DemandPhase, MixOf, MoEDeployment, MoEPlan, MoEPlanSpec, Mode, PlannedPrediction, Replan, WakePlanning,
};
use super::errand::Errand;
use super::events::Happening;
use super::facts::ModelFacts;
use super::following::{
    due, failed_plan, heard, is_given_up, is_of_spec, next_revision, of_spec, revision_of,
};
use super::inspection::Inspecting;
use super::known::Known;
use super::manifests::{Surroundings, Target, inspector, plan_name, plan_object, revision};
use super::observed::Observed;
use super::planning::{Planning, PlanningError, check_hosted, three_digits};
use super::planning_pool::Progress;
use super::pods::PodView;
use super::resting::Resting;
use super::trouble::Trouble;
use kube::ResourceExt;
use std::time::Duration;

/// How planning stands.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PlanState {
    /// The model is being looked at.
    Inspecting {
        /// What keeps the inspector.
        trouble: Option<Trouble>,
    },
    /// The first plan for the present spec is being made.
    Planning,
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
pub(crate) enum Task {
    /// Nothing: there is one, or there can be none.
    Done(PlanState),
    /// A solution.
    Solve {
        /// Of this.
        planning: Box<Planning>,
        /// What runs.
        previous: Option<Box<MoEPlanSpec>>,
    },
    /// There is one; another may be better for requests as they are.
    Follow(Box<Follow>),
    /// The plan for the requests that woke functions is there.
    Take(Box<Take>),
}

/// A plan, and what another one would be made from.
#[derive(Debug)]
pub(crate) struct Follow {
    /// For requests as they are.
    pub planning: Planning,
    /// The name of the plan that there is.
    pub hash: String,
    /// That plan.
    pub plan: MoEPlanSpec,
    /// Because of whom: those who wake functions, or drift.
    pub cause: MixOf,
}

/// The plan for the requests that woke functions.
#[derive(Debug)]
pub(crate) struct Take {
    /// Planning problem of the spec, without a prediction.
    pub planning: Planning,
    /// The name of the plan by which functions start.
    pub hash: String,
    /// That plan.
    pub plan: MoEPlanSpec,
    /// The plan that replaces it, if it is not good enough.
    pub better: Option<MoEPlanSpec>,
    /// Time from the question to the answer.
    pub elapsed: Duration,
    /// Number of the wake.
    pub wake: u64,
}

/// Result of a task, as far as it is known now.
#[derive(Debug)]
pub(crate) struct Decision {
    /// State of planning.
    pub state: PlanState,
    /// A new plan.
    pub new: Option<MoEPlan>,
    /// Events, once the new plan is written.
    pub happenings: Vec<Happening>,
    /// Cause of a new plan that follows expert usage.
    pub cause: Option<MixOf>,
    /// No better plan was found: none is looked for again for a while.
    pub rests: bool,
    /// Times of the chain at a wake, as far as they are known.
    pub chain: Option<WakePlanning>,
}

impl Decision {
    pub(crate) fn of(state: PlanState) -> Self {
        Self { state, new: None, happenings: Vec::new(), cause: None, rests: false, chain: None }
    }
}

/// The plan that was decided for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Planned {
    /// How planning stands.
    pub state: PlanState,
    /// A new plan.
    pub new: Option<MoEPlan>,
    /// What is worth saying of it once it is written.
    pub happenings: Vec<Happening>,
    /// Times of the chain at the latest wake, where they are new.
    pub chain: Option<WakePlanning>,
    /// Time for which remote functions wait for the plan of a wake.
    pub remote_waits: Option<Duration>,
    /// The plan that main functions were last told of.
    pub running: Option<String>,
    /// The plan that is to run, as functions.
    pub target: Option<Target>,
    /// Plans that followed requests and could not start: they go.
    pub given_up: Vec<MoEPlan>,
    /// The deployment asks for what it may not have: nothing is created for it.
    pub forbidden: bool,
    /// Prices of the platform apply, and differ from those of the spec.
    pub repriced: bool,
    /// What is wrong with the plan that is to run.
    pub troubles: Vec<Trouble>,
    /// Which of its remote functions sleep while main functions run.
    pub resting: Resting,
}

/// What a plan for the present spec takes.
pub(crate) fn task(owner: &MoEDeployment, observed: &Observed, known: &Known, around: &Surroundings) -> Task {
    if let Some(trouble) = around.allowed.refusal(owner) {
        return Task::Done(PlanState::Refused(trouble));
    }
    if let Err(refusal) = around.sources.check_spec(&owner.spec.model) {
        return Task::Done(PlanState::Refused(Trouble::new(refusal.reason(), refusal.to_string())));
    }
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
    let model = &facts.inspection;
    let sound = observed.plans.iter().filter(|plan| check_hosted(&plan.spec, model).is_ok());
    let plans = of_spec(sound, &planning);
    let (given_up, left): (Vec<&MoEPlan>, _) =
        plans.into_iter().partition(|plan| is_given_up(owner, observed, plan));
    // Where none can start the newest is as good as any.
    let made = left.first().or(given_up.first()).copied();
    let made = made.and_then(|plan| Some((hash_of(owner, plan)?, plan)));
    let hash = running(owner, observed);
    let revision = next_revision(&observed.plans);
    if let Some((made, plan)) = made {
        if let Some((wake, better, elapsed)) = arrived(owner, observed, &planning, plan) {
            let (hash, plan) = (made, plan.spec.clone());
            return Task::Take(Box::new(Take { planning, hash, plan, better, elapsed, wake }));
        }
        // Not in the look that takes one back.
        let cause = due(owner, observed, plan, &made, hash.as_deref()).filter(|_| given_up.is_empty());
        let heard = cause.and_then(|of| Some((of, heard(owner, observed, model, of, revision)?)));
        let follows = heard.map(|(cause, heard)| (cause, planning.expecting(heard)));
        return match follows {
            Some((cause, Ok(planning))) => {
                Task::Follow(Box::new(Follow { planning, hash: made, plan: plan.spec.clone(), cause }))
            }
            _ => Task::Done(PlanState::Planned { hash: made, plan: Box::new(plan.spec.clone()) }),
        };
    }
    let previous = hash.as_ref().and_then(|hash| find(owner, &observed.plans, hash));
    let previous = previous.map(|plan| Box::new(plan.spec.clone()));
    if let (Some(hash), Some(plan), true) = (&hash, &previous, is_waking(observed)) {
        // Whoever waits waits for functions, not for a plan.
        return Task::Done(PlanState::Planned { hash: hash.clone(), plan: plan.clone() });
    }
    // What requests use does not change with the spec.
    let expected = heard(owner, observed, model, MixOf::Answered, revision).or_else(|| {
        let before = previous.as_ref().filter(|plan| plan.model.digest == model.fingerprint);
        Some(PlannedPrediction { revision, ..before?.prediction.clone()? })
    });
    let is_wanted = owner.spec.prediction.replan == Replan::Auto;
    let expecting = expected.filter(|_| is_wanted).and_then(|it| planning.clone().expecting(it).ok());
    Task::Solve { planning: Box::new(expecting.unwrap_or(planning)), previous }
}

/// Returns the number of the present wake, the plan for it, if it is not `plan` or an earlier one, and the time that it
/// took. Main functions have started by `plan`: one with another size of theirs comes too late.
fn arrived(
    owner: &MoEDeployment,
    observed: &Observed,
    planning: &Planning,
    plan: &MoEPlan,
) -> Option<(u64, Option<MoEPlanSpec>, Duration)> {
    let demand = observed.demand.as_ref().filter(|demand| demand.spec.phase == DemandPhase::Waking)?;
    let wake_plan = observed.wake_plan.as_ref().filter(|plan| plan.wake == demand.spec.wakes)?;
    let is_told = demand.spec.planning.is_some_and(|told| told.wake == wake_plan.wake && told.plan_us > 0);
    let Progress::Done { outcome, elapsed } = &wake_plan.progress else { return None };
    if is_told || owner.spec.mode != Mode::Active {
        return None;
    }
    let better = outcome.as_ref().ok().and_then(Option::as_deref).filter(|better| {
        revision_of(better) > revision_of(&plan.spec)
            && better.main == plan.spec.main
            && is_of_spec(better, planning)
    });
    Some((wake_plan.wake, better.cloned(), *elapsed))
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
                Err(error) => PlanState::Refused(Trouble::new(error.reason(), error.to_string())),
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
pub(crate) fn solved(
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

/// The plan that follows the one of `task`, as how planning stands, its object, and what is worth saying of it: that one
/// goes on where none is better, or none could be made.
///
/// # Errors
/// The plan cannot be written as JSON.
pub(crate) fn followed(
    owner: &MoEDeployment,
    (hash, plan, cause): (String, MoEPlanSpec, MixOf),
    better: Option<MoEPlanSpec>,
) -> Result<(PlanState, Option<MoEPlan>, Option<Happening>), serde_json::Error> {
    let Some(better) = better else {
        return Ok((PlanState::Planned { hash, plan: Box::new(plan) }, None, None));
    };
    let (new, object) = plan_object(owner, better)?;
    let dollars = |plan: &MoEPlanSpec| three_digits(plan.numbers.costs.total * 1e6);
    let follows = match owner.spec.mode {
        Mode::Active => "replaces",
        Mode::Advisory => "is proposed to replace",
    };
    let whom = match cause {
        MixOf::Waiting => "waiting requests",
        MixOf::Answered => "recent requests",
    };
    let note = format!(
        "Plan {new} {follows} {hash} for {whom}: ${} per million requests; {hash} was made for other requests, \
         at ${}.",
        dollars(&object.spec),
        dollars(&plan),
    );
    let happening = Happening::normal("Replanned", note);
    let state = PlanState::Planned { hash: new, plan: Box::new(object.spec.clone()) };
    Ok((state, Some(object), Some(happening)))
}

impl Planned {
    /// What is to run: the plan for the present spec, or in mode Advisory the accepted one; while there is
    /// none, what runs already.
    pub(crate) fn new(
        owner: &MoEDeployment,
        observed: &Observed,
        known: &Known,
        decision: Decision,
        around: &Surroundings,
    ) -> Self {
        let Decision { state, new, happenings, chain, .. } = decision;
        let running = running(owner, observed);
        let mut planned = Self {
            state,
            new,
            happenings,
            chain,
            remote_waits: None,
            running,
            target: None,
            given_up: Vec::new(),
            forbidden: around.allowed.refusal(owner).is_some(),
            repriced: false,
            troubles: Vec::new(),
            resting: Resting::default(),
        };
        // Pods that run stay as they are: those of the spec may not be made.
        if planned.forbidden {
            return planned;
        }
        planned.give_up(owner, observed);
        let wanted = planned.wanted(owner, observed);
        let wanted = wanted.map(|wanted| planned.instead_of_failed(owner, observed, wanted));
        planned.target = wanted.and_then(|(hash, plan)| {
            if !planned.is_of_model(&hash, &plan, known.model.facts()) {
                return None;
            }
            let strange_gateways = observed.strange_gateways;
            match revision(owner, &hash, &plan, &Surroundings { strange_gateways, ..around.clone() }) {
                Ok(revision) => Some(Target { revision, plan }),
                Err(error) => {
                    planned.troubles.push(Trouble::new(error.reason(), error.to_string()));
                    None
                }
            }
        });
        planned
    }

    /// Plans that followed requests and could not start go, so that no look takes them up again, where there is another.
    fn give_up(&mut self, owner: &MoEDeployment, observed: &Observed) {
        let PlanState::Planned { plan: stays, .. } = &self.state else { return };
        let newer = observed.plans.iter().filter(|plan| revision_of(&plan.spec) > revision_of(stays));
        self.given_up = newer.filter(|plan| is_given_up(owner, observed, plan)).cloned().collect();
        if self.running.as_ref().is_some_and(|running| self.has_given_up(owner, running)) {
            self.running = None;
        }
    }

    fn has_given_up(&self, owner: &MoEDeployment, hash: &str) -> bool {
        let name = plan_name(&owner.name_any(), hash);
        self.given_up.iter().any(|plan| plan.name_any() == name)
    }

    fn wanted(&mut self, owner: &MoEDeployment, observed: &Observed) -> Option<(String, MoEPlanSpec)> {
        let plans = || observed.plans.iter().chain(&self.new);
        let stored = |hash: &str| Some((hash.to_owned(), find(owner, plans(), hash)?.spec.clone()));
        let keep = || self.running.as_deref().and_then(stored);
        match owner.spec.mode {
            Mode::Active => match &self.state {
                PlanState::Planned { hash, plan } => Some((hash.clone(), plan.as_ref().clone())),
                PlanState::Inspecting { .. } | PlanState::Planning | PlanState::Refused(_) => keep(),
            },
            Mode::Advisory => {
                let Some(accepted) = &owner.spec.accepted_plan else { return keep() };
                let found = stored(accepted);
                if found.is_some() {
                    return found;
                }
                let kept = keep();
                let message = format!(
                    "invalid spec.acceptedPlan: unknown plan {accepted}; use the hash of a plan of this \
                     deployment, such as status.proposedPlan"
                );
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
        let serving = serving(owner, observed).filter(|serving| *serving != hash);
        let found = serving.and_then(|serving| {
            let plan = find(owner, &observed.plans, &serving)?.spec.clone();
            Some((serving, plan))
        });
        match found {
            Some((serving, plan)) if failed_plan(owner) == Some(&hash) => {
                let message = format!(
                    "plan {hash} did not become ready in time; rolled back to plan {serving}; change the spec \
                     to retry"
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
        let trouble = |message| Trouble::new("InvalidPlan", format!("invalid plan {hash}: {message}"));
        self.troubles.extend(checked.as_ref().err().map(trouble));
        checked.is_ok()
    }

    /// Names of the plans that are proposed, to run or running.
    pub(crate) fn in_use(&self, owner: &MoEDeployment) -> Vec<String> {
        let planned = match &self.state {
            PlanState::Planned { hash, .. } => Some(hash),
            PlanState::Inspecting { .. } | PlanState::Planning | PlanState::Refused(_) => None,
        };
        let target = self.target.as_ref().map(|target| &target.revision.plan);
        let in_use = [planned, target, self.running.as_ref()].into_iter().flatten();
        in_use.map(|hash| plan_name(&owner.name_any(), hash)).collect()
    }
}

/// The plan that main functions were last told of.
fn running(owner: &MoEDeployment, observed: &Observed) -> Option<String> {
    let table = observed.table(owner);
    let newest = table.entries.into_values().max_by_key(|generation| generation.number);
    newest.map(|generation| generation.plan).or_else(|| owner.status.as_ref()?.plan.clone())
}

/// The plan by which main functions serve.
pub(crate) fn serving(owner: &MoEDeployment, observed: &Observed) -> Option<String> {
    let uid = owner.uid().unwrap_or_default();
    let table = observed.table(owner);
    let views = observed.pods.iter().filter_map(|pod| PodView::of(pod, &uid, observed.now));
    let mains: Vec<PodView> = views.filter(|pod| pod.is_main && pod.is_sound() && pod.ready).collect();
    let serves = |identity: &String| mains.iter().any(|main| main.identity == *identity);
    let entries = table.entries.into_iter().filter(|(identity, _)| serves(identity));
    entries.max_by_key(|(_, generation)| generation.number).map(|(_, generation)| generation.plan)
}

/// The plan with this hash.
pub(crate) fn find<'a>(
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

fn refused(error: &PlanningError) -> Trouble {
    let reason = match error {
        PlanningError::Spec { .. } | PlanningError::Json(_) => "InvalidSpec",
        PlanningError::Profile(_) => "ProfileInvalid",
        PlanningError::Infeasible(_) => "Infeasible",
        PlanningError::Aborted(_) => "PlanningAborted",
    };
    Trouble::new(reason, error.to_string())
}
