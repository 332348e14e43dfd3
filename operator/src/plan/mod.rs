//! Plan stage: decides which plan runs. Pure, except that it measures the time of pre-allocation.

mod planner;
mod task;

#[cfg(any(test, fuzzing))]
pub(crate) use planner::SearchRequest;
pub(crate) use planner::{Planner, Pooled};
pub(crate) use task::PlanState;

use self::planner::{PlanDecision, carry_out};
use self::task::task;
use super::cooldown::Cooldown;
use super::events::ClusterEvent;
use super::facts::ModelFacts;
use super::inputs::Inputs;
use super::manifests::{OperatorEnvironment, TargetPlan, find_plan, plan_name, revision};
use super::observed::Observed;
use super::planning::check_hosted;
use super::pods::PodView;
use super::resolve::Resolved;
use super::status_issue::StatusIssue;
use super::usage::{
    cooldown_after_giving_up, cooldown_without_better_plan, failed_plan, is_given_up, revision_of,
};
use kube::ResourceExt;
use remoe_api::{MixOf, MoEDeployment, MoEPlan, MoEPlanSpec, Mode, WakePlanning};
use std::time::Duration;

/// Output of the plan stage.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PlanStage {
    /// State of planning.
    pub state: PlanState,
    /// New plan, if one was made.
    pub new: Option<MoEPlan>,
    /// Events to publish after the new plan is written.
    pub events: Vec<ClusterEvent>,
    /// Times of the planning steps of the latest wake, if they are new.
    pub wake_times: Option<WakePlanning>,
    /// Time for which remote functions still wait for the plan of a wake.
    pub remote_hold: Option<Duration>,
    /// Plan of the latest routing generation.
    pub running: Option<String>,
    /// Desired plan, with its functions as it sizes them.
    pub target: Option<TargetPlan>,
    /// Plans for expert usage whose functions could not start; they are deleted.
    pub given_up: Vec<MoEPlan>,
    /// Set if the deployment violates the policy; nothing is created for it.
    pub forbidden: bool,
    /// Source of the expert usage that the new plan was made for.
    pub cause: Option<MixOf>,
    /// Times before which no new plan is searched.
    pub cooldown: Cooldown,
    /// Issues of the desired plan.
    pub issues: Vec<StatusIssue>,
}

/// Decides which plan runs: the plan for the current spec, or in mode Advisory the accepted one. While there is none,
/// the running plan stays.
///
/// # Errors
/// A plan cannot be serialised as JSON.
pub(crate) fn plan(
    inputs: Inputs<'_>,
    resolved: &Resolved,
    planner: &mut impl Planner,
) -> Result<PlanStage, serde_json::Error> {
    let task = task(inputs, resolved, planner.wake().as_ref());
    let decision = carry_out(inputs, task, planner)?;
    // This reconcile may have made the request.
    let wake_plan = planner.wake();
    let remote_hold = wake_plan.and_then(|plan| plan.remaining_hold(inputs.observed.demand.as_ref()));
    Ok(PlanStage { remote_hold, ..PlanStage::new(inputs, resolved, decision) })
}

impl PlanStage {
    fn new(inputs: Inputs<'_>, resolved: &Resolved, decision: PlanDecision) -> Self {
        let Inputs { owner, observed, environment, soft_state, .. } = inputs;
        let PlanDecision { state, new, events, wake_times, cause, is_fruitless } = decision;
        let cooldown = match is_fruitless {
            true => cooldown_without_better_plan(owner, observed, soft_state.cooldown),
            false => soft_state.cooldown,
        };
        let mut planned = Self {
            state,
            new,
            events,
            wake_times,
            remote_hold: None,
            running: running(owner, observed),
            target: None,
            given_up: Vec::new(),
            forbidden: environment.policy.refusal(owner).is_some(),
            cause,
            cooldown,
            issues: Vec::new(),
        };
        // Running pods stay as they are; those of the spec may not be created.
        if planned.forbidden {
            return planned;
        }
        planned.give_up(owner, observed);
        let desired_plan = planned.desired_plan(owner, observed);
        let desired_plan =
            desired_plan.map(|desired_plan| planned.rolled_back_if_failed(owner, observed, desired_plan));
        planned.target = desired_plan.and_then(|(hash, plan)| {
            if !planned.check_model(&hash, &plan, resolved.model.facts()) {
                return None;
            }
            let uncertified_gateways = observed.uncertified_gateways;
            match revision(
                owner,
                &hash,
                &plan,
                &OperatorEnvironment { uncertified_gateways, ..environment.clone() },
            ) {
                Ok(revision) => Some(TargetPlan { revision, plan }),
                Err(error) => {
                    planned.issues.push(StatusIssue::new(error.reason(), error.to_string()));
                    None
                }
            }
        });
        planned
    }

    /// Gives up plans for expert usage whose functions could not start, if there is another plan.
    fn give_up(&mut self, owner: &MoEDeployment, observed: &Observed) {
        let PlanState::Planned { plan: current, .. } = &self.state else { return };
        let newer = observed.plans.iter().filter(|plan| revision_of(&plan.spec) > revision_of(current));
        self.given_up = newer.filter(|plan| is_given_up(owner, observed, plan)).cloned().collect();
        if !self.given_up.is_empty() {
            self.cooldown = cooldown_after_giving_up(owner, observed);
        }
        if self.running.as_ref().is_some_and(|running| self.has_given_up(owner, running)) {
            self.running = None;
        }
    }

    fn has_given_up(&self, owner: &MoEDeployment, hash: &str) -> bool {
        let name = plan_name(&owner.name_any(), hash);
        self.given_up.iter().any(|plan| plan.name_any() == name)
    }

    fn desired_plan(&mut self, owner: &MoEDeployment, observed: &Observed) -> Option<(String, MoEPlanSpec)> {
        let plans = || observed.plans.iter().chain(&self.new);
        let stored = |hash: &str| Some((hash.to_owned(), find_plan(owner, plans(), hash)?.spec.clone()));
        let running_plan = || self.running.as_deref().and_then(stored);
        match owner.spec.mode {
            Mode::Active => match &self.state {
                PlanState::Planned { hash, plan } => Some((hash.clone(), plan.as_ref().clone())),
                PlanState::Inspecting { .. } | PlanState::Planning | PlanState::Refused(_) => running_plan(),
            },
            Mode::Advisory => {
                let Some(accepted) = &owner.spec.accepted_plan else { return running_plan() };
                let stored_plan = stored(accepted);
                if stored_plan.is_some() {
                    return stored_plan;
                }
                let fallback = running_plan();
                let message = format!(
                    "invalid spec.acceptedPlan: unknown plan {accepted}; use the hash of a plan of this \
                     deployment, such as status.proposedPlan"
                );
                self.issues.push(StatusIssue::new("PlanUnknown", message));
                fallback
            }
        }
    }

    /// Returns the plan that serves if `plan` missed the progress deadline under the current spec; else `plan`.
    fn rolled_back_if_failed(
        &mut self,
        owner: &MoEDeployment,
        observed: &Observed,
        (hash, plan): (String, MoEPlanSpec),
    ) -> (String, MoEPlanSpec) {
        let serving = serving(owner, observed).filter(|serving| *serving != hash);
        let stored_plan = serving.and_then(|serving| {
            let plan = find_plan(owner, &observed.plans, &serving)?.spec.clone();
            Some((serving, plan))
        });
        match stored_plan {
            Some((serving, plan)) if failed_plan(owner) == Some(&hash) => {
                let message = format!(
                    "plan {hash} did not become ready in time; rolled back to plan {serving}; change the spec \
                     to retry"
                );
                self.issues.push(StatusIssue::new("RolledBack", message));
                (serving, plan)
            }
            _ => (hash, plan),
        }
    }

    /// Returns whether a plan for this model lists only experts of the model.
    fn check_model(&mut self, hash: &str, plan: &MoEPlanSpec, facts: Option<&ModelFacts>) -> bool {
        let Some(facts) = facts.filter(|facts| plan.model.digest == facts.inspection.fingerprint) else {
            return true;
        };
        let checked = check_hosted(plan, &facts.inspection);
        let issue = |message| StatusIssue::new("InvalidPlan", format!("invalid plan {hash}: {message}"));
        self.issues.extend(checked.as_ref().err().map(issue));
        checked.is_ok()
    }

    /// Returns the names of the plans that are proposed, desired or running.
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

/// Returns the plan of the latest routing generation.
fn running(owner: &MoEDeployment, observed: &Observed) -> Option<String> {
    let table = observed.table(owner);
    let newest = table.entries.into_values().max_by_key(|generation| generation.number);
    newest.map(|generation| generation.plan).or_else(|| owner.status.as_ref()?.plan.clone())
}

/// Returns the plan that ready main functions have in force.
pub(crate) fn serving(owner: &MoEDeployment, observed: &Observed) -> Option<String> {
    let uid = owner.uid().unwrap_or_default();
    let table = observed.table(owner);
    let views = observed.pods.iter().filter_map(|pod| PodView::from_pod(pod, &uid, observed.now));
    let mains: Vec<PodView> = views.filter(|pod| pod.is_main && pod.is_sound() && pod.ready).collect();
    let serves = |identity: &String| mains.iter().any(|main| main.identity == *identity);
    let entries = table.entries.into_iter().filter(|(identity, _)| serves(identity));
    entries.max_by_key(|(_, generation)| generation.number).map(|(_, generation)| generation.plan)
}
