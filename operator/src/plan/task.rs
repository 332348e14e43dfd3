//! Determines the planning task for the current spec. Pure.

use super::running;
use crate::inputs::Inputs;
use crate::inspection::InspectionState;
use crate::manifests::{OperatorEnvironment, find_plan, inspector};
use crate::observed::Observed;
use crate::one_shot::OneShotState;
use crate::planning::{Planning, PlanningError, check_hosted};
use crate::planning_pool::{PlanProgress, WakePlan};
use crate::resolve::Resolved;
use crate::status_issue::StatusIssue;
use crate::usage::{
    due_replan, is_given_up, is_of_spec, next_revision, observed_usage, plans_of_spec, revision_of,
};
use kube::ResourceExt;
use remoe_api::{DemandPhase, MixOf, MoEDeployment, MoEPlan, MoEPlanSpec, Mode, PlannedPrediction, Replan};
use std::time::Duration;

/// State of planning.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PlanState {
    /// The model is being inspected.
    Inspecting {
        /// Issue that delays the inspector.
        issue: Option<StatusIssue>,
    },
    /// The first plan for the current spec is being made.
    Planning,
    /// There can be no plan for the current spec.
    Refused(StatusIssue),
    /// There is a plan for the current spec.
    Planned {
        /// Hash of the plan.
        hash: String,
        /// Plan itself.
        plan: Box<MoEPlanSpec>,
    },
}

/// Planning task for the current spec.
#[derive(Debug)]
pub(crate) enum Task {
    /// No work: there is a plan, or there can be none.
    Done(PlanState),
    /// Search for the first plan.
    Solve {
        /// Planning problem.
        planning: Box<Planning>,
        /// Running plan.
        previous: Option<Box<MoEPlanSpec>>,
    },
    /// Search for a plan that is better for the current expert usage.
    Improve(Box<Improvement>),
    /// Use of the finished plan for the requests that woke functions.
    Take(Box<ReadyPlan>),
}

/// Existing plan, and the planning problem for a better one.
#[derive(Debug)]
pub(crate) struct Improvement {
    /// Planning problem for the current expert usage.
    pub planning: Planning,
    /// Hash of the existing plan.
    pub hash: String,
    /// Existing plan.
    pub plan: MoEPlanSpec,
    /// Requests whose usage it is for: waiting ones, or answered ones (drift).
    pub cause: MixOf,
}

/// Finished plan for the requests that woke functions.
#[derive(Debug)]
pub(crate) struct ReadyPlan {
    /// Planning problem of the spec, without a prediction.
    pub planning: Planning,
    /// Hash of the plan by which functions start.
    pub hash: String,
    /// Plan by which functions start.
    pub plan: MoEPlanSpec,
    /// Plan that replaces it; absent if it is good enough.
    pub better: Option<MoEPlanSpec>,
    /// Time from the request to the result.
    pub elapsed: Duration,
    /// Number of the wake.
    pub wake: u64,
}

/// Returns the planning task for the current spec. `wake_plan` is the pool's plan for the latest wake, if any.
pub(super) fn task(inputs: Inputs<'_>, resolved: &Resolved, wake_plan: Option<&WakePlan>) -> Task {
    let Inputs { owner, observed, environment, .. } = inputs;
    if let Some(issue) = environment.policy.refusal(owner) {
        return Task::Done(PlanState::Refused(issue));
    }
    if let Err(refusal) = environment.sources.check_spec(&owner.spec.model) {
        return Task::Done(PlanState::Refused(StatusIssue::new(refusal.reason(), refusal.to_string())));
    }
    let (Some(facts), Some(hardware)) = (resolved.model.facts(), &resolved.hardware) else {
        return Task::Done(uninspected(owner, resolved, environment));
    };
    let profile = match &hardware.profile {
        Ok(profile) => profile,
        Err(issue) => return Task::Done(PlanState::Refused(issue.clone())),
    };
    let planning = match Planning::new(&owner.name_any(), &owner.spec, facts, profile) {
        Ok(planning) => planning,
        Err(error) => return Task::Done(PlanState::Refused(planning_issue(&error))),
    };
    let model = &facts.inspection;
    let valid = observed.plans.iter().filter(|plan| check_hosted(&plan.spec, model).is_ok());
    let plans = plans_of_spec(valid, &planning);
    let (given_up, startable): (Vec<&MoEPlan>, _) =
        plans.into_iter().partition(|plan| is_given_up(owner, observed, plan));
    // If none can start, the newest is used.
    let made = startable.first().or(given_up.first()).copied();
    let made = made.and_then(|plan| Some((hash_of(owner, plan)?, plan)));
    let hash = running(owner, observed);
    let revision = next_revision(&observed.plans);
    if let Some((made_hash, plan)) = made {
        if let Some((wake, better, elapsed)) = wake_plan_result(inputs, wake_plan, &planning, plan) {
            let (hash, plan) = (made_hash, plan.spec.clone());
            return Task::Take(Box::new(ReadyPlan { planning, hash, plan, better, elapsed, wake }));
        }
        // No new search in the reconcile that gives a plan up.
        let cause = due_replan(inputs, plan, &made_hash, hash.as_deref()).filter(|_| given_up.is_empty());
        let observed_usage =
            cause.and_then(|cause| Some((cause, observed_usage(owner, observed, model, cause, revision)?)));
        let improvement =
            observed_usage.map(|(cause, observed_usage)| (cause, planning.expecting(observed_usage)));
        return match improvement {
            Some((cause, Ok(planning))) => Task::Improve(Box::new(Improvement {
                planning,
                hash: made_hash,
                plan: plan.spec.clone(),
                cause,
            })),
            _ => Task::Done(PlanState::Planned { hash: made_hash, plan: Box::new(plan.spec.clone()) }),
        };
    }
    let previous = hash.as_ref().and_then(|hash| find_plan(owner, &observed.plans, hash));
    let previous = previous.map(|plan| Box::new(plan.spec.clone()));
    if let (Some(hash), Some(plan), true) = (&hash, &previous, is_waking(observed)) {
        // Waiting requests start functions by the running plan at once.
        return Task::Done(PlanState::Planned { hash: hash.clone(), plan: plan.clone() });
    }
    // Expert usage does not depend on the spec.
    let expected = observed_usage(owner, observed, model, MixOf::Answered, revision).or_else(|| {
        let before = previous.as_ref().filter(|plan| plan.model.digest == model.fingerprint);
        Some(PlannedPrediction { revision, ..before?.prediction.clone()? })
    });
    let is_wanted = owner.spec.prediction.replan == Replan::Auto;
    let expecting = expected.filter(|_| is_wanted).and_then(|it| planning.clone().expecting(it).ok());
    Task::Solve { planning: Box::new(expecting.unwrap_or(planning)), previous }
}

/// Returns the number of the current wake, its new plan, and the duration of the search. Absent if that was recorded
/// already. Main functions have started by `plan`, so a plan with another main function is ignored.
fn wake_plan_result(
    inputs: Inputs<'_>,
    wake_plan: Option<&WakePlan>,
    planning: &Planning,
    plan: &MoEPlan,
) -> Option<(u64, Option<MoEPlanSpec>, Duration)> {
    let demand = inputs.observed.demand.as_ref().filter(|demand| demand.spec.phase == DemandPhase::Waking)?;
    let wake_plan = wake_plan.filter(|plan| plan.wake == demand.spec.wakes)?;
    let is_recorded =
        demand.spec.planning.is_some_and(|recorded| recorded.wake == wake_plan.wake && recorded.plan_us > 0);
    let PlanProgress::Done { outcome, elapsed } = &wake_plan.progress else { return None };
    if is_recorded || inputs.owner.spec.mode != Mode::Active {
        return None;
    }
    let better = outcome.as_ref().ok().and_then(Option::as_deref).filter(|better| {
        revision_of(better) > revision_of(&plan.spec)
            && better.main == plan.spec.main
            && is_of_spec(better, planning)
    });
    Some((wake_plan.wake, better.cloned(), *elapsed))
}

/// Returns whether requests wait, or just waited, for functions to start.
fn is_waking(observed: &Observed) -> bool {
    observed.demand.as_ref().is_some_and(|demand| match demand.spec.phase {
        DemandPhase::Waking => demand.spec.wakes > 0,
        DemandPhase::Asleep => demand.gateways().iter().any(|entry| entry.waiting > 0),
        DemandPhase::Active | DemandPhase::Draining => false,
    })
}

/// Returns the state of planning while the model's facts are unknown.
fn uninspected(owner: &MoEDeployment, resolved: &Resolved, environment: &OperatorEnvironment) -> PlanState {
    if let Some(issue) = resolved.model.invalid_output() {
        return PlanState::Refused(issue.clone());
    }
    match &resolved.model.inspection_state {
        InspectionState::Inspecting(OneShotState::Failed { issue, .. }) => PlanState::Refused(issue.clone()),
        InspectionState::Inspecting(OneShotState::Waiting { issue }) => {
            PlanState::Inspecting { issue: issue.clone() }
        }
        InspectionState::Inspecting(OneShotState::Start { incarnation, after }) => {
            match inspector(owner, &resolved.model.subject, *incarnation, environment) {
                Ok(_) => PlanState::Inspecting { issue: after.clone() },
                Err(error) => PlanState::Refused(StatusIssue::new(error.reason(), error.to_string())),
            }
        }
        InspectionState::Known(_) | InspectionState::Inspecting(OneShotState::Done { .. }) => {
            PlanState::Inspecting { issue: None }
        }
    }
}

/// Returns the hash in a plan's name.
fn hash_of(owner: &MoEDeployment, plan: &MoEPlan) -> Option<String> {
    let name = plan.name_any();
    let hash = name.strip_prefix(&owner.name_any())?.strip_prefix('-')?;
    Some(hash.to_owned())
}

/// Returns the issue of a spec for which there is no plan.
pub(super) fn planning_issue(error: &PlanningError) -> StatusIssue {
    let reason = match error {
        PlanningError::Spec { .. } | PlanningError::Json(_) => "InvalidSpec",
        PlanningError::Profile(_) => "ProfileInvalid",
        PlanningError::Infeasible(_) => "Infeasible",
        PlanningError::Aborted(_) => "PlanningAborted",
    };
    StatusIssue::new(reason, error.to_string())
}
