//! The plan for the present spec, and which plan is to run.

use super::{LATER, ReconcileError, Run};
use crate::api::{MoEPlanSpec, Mode};
use crate::build::{plan_hash, plan_object};
use crate::facts::ModelFacts;
use crate::planning::{Planning, PlanningError, check_hosted};
use crate::pods::Trouble;
use crate::status::PlanState;
use kube::ResourceExt;
use std::time::Duration;
use tokio::time::timeout;

/// A plan that takes longer to make is not made.
const PLANNING: Duration = Duration::from_secs(120);

impl Run<'_> {
    /// The plan for the present spec: the one that was made of the same inputs, else a new one.
    pub(super) async fn plan(
        &mut self,
        facts: &ModelFacts,
        running: Option<&str>,
    ) -> Result<PlanState, ReconcileError> {
        let name = self.owner.name_any();
        let known = match self.profile(facts).await? {
            Ok(known) => known,
            Err(trouble) => {
                self.look_soon(LATER);
                return Ok(PlanState::Refused(trouble));
            }
        };
        let planning = match Planning::new(&name, &self.owner.spec, facts, &known) {
            Ok(planning) => planning,
            Err(error) => return Ok(PlanState::Refused(refused(&error))),
        };
        let made = self.there.plans.iter().rev().find(|plan| {
            plan.spec.inputs == planning.inputs && check_hosted(&plan.spec, &facts.inspection).is_ok()
        });
        if let Some((hash, plan)) = made.and_then(|plan| Some((self.hash(plan)?, plan))) {
            return Ok(PlanState::Planned { hash, plan: Box::new(plan.spec.clone()) });
        }
        let previous = running.and_then(|hash| self.find(hash)).map(|plan| plan.spec.clone());
        let solving = tokio::task::spawn_blocking(move || planning.solve(previous.as_ref()));
        let solved = timeout(PLANNING, solving)
            .await
            .map_err(|_elapsed| ReconcileError::Planning(format!("no plan within {PLANNING:?}")))?
            .map_err(|error| ReconcileError::Planning(error.to_string()))?;
        let plan = match solved {
            Ok(plan) => plan,
            Err(error) => return Ok(PlanState::Refused(refused(&error))),
        };
        let (hash, object) = plan_object(self.owner, plan)?;
        let stored = self.applier.plan(&object).await?;
        // One of the same content may have other figures, or other counts of functions that are alike.
        let known = stored.filter(|stored| plan_hash(&stored.spec).is_ok_and(|known| known == hash));
        let object = known.unwrap_or(object);
        let plan = Box::new(object.spec.clone());
        self.there.plans.push(object);
        Ok(PlanState::Planned { hash, plan })
    }

    /// What is to run: the plan for the present spec, or in mode Advisory the accepted one; while there
    /// is none, what runs already.
    pub(super) fn target(
        &mut self,
        planning: &PlanState,
        running: Option<&str>,
        facts: Option<&ModelFacts>,
    ) -> Option<(String, MoEPlanSpec)> {
        let target = self.wanted(planning, running);
        if let (Some((hash, plan)), Some(facts)) = (&target, facts)
            && plan.model.digest == facts.inspection.fingerprint
            && let Err(message) = check_hosted(plan, &facts.inspection)
        {
            self.troubles.push(Trouble::new("InvalidPlan", format!("plan {hash}: {message}")));
            return None;
        }
        target
    }

    fn wanted(&mut self, planning: &PlanState, running: Option<&str>) -> Option<(String, MoEPlanSpec)> {
        let stored = |run: &Self, hash: &str| Some((hash.to_owned(), run.find(hash)?.spec.clone()));
        let keep = |run: &Self| running.and_then(|hash| stored(run, hash));
        match self.owner.spec.mode {
            Mode::Active => match planning {
                PlanState::Planned { hash, plan } => Some((hash.clone(), plan.as_ref().clone())),
                PlanState::Inspecting { .. } | PlanState::Refused(_) => keep(self),
            },
            Mode::Advisory => {
                let Some(accepted) = self.owner.spec.accepted_plan.clone() else { return keep(self) };
                let found = stored(self, &accepted);
                if found.is_none() {
                    let message = format!("spec.acceptedPlan: this deployment has no plan {accepted}");
                    self.troubles.push(Trouble::new("PlanUnknown", message));
                }
                found.or_else(|| keep(self))
            }
        }
    }
}

fn refused(error: &PlanningError) -> Trouble {
    let reason = match error {
        PlanningError::Spec { .. } => "InvalidSpec",
        PlanningError::Profile(_) => "ProfileInvalid",
        PlanningError::Infeasible(_) => "Infeasible",
        PlanningError::Json(_) => "InvalidSpec",
    };
    Trouble::new(reason, error.to_string())
}
