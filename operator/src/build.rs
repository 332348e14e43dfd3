//! Build stage: manifests of all desired objects. Pure.

use super::inputs::Inputs;
use super::manifests::{Frame, TargetPlan, budgets, frame};
use super::plan::PlanStage;
use super::scale::Scaled;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

/// Output of the build stage.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Manifests {
    /// Services and network policies.
    pub frame: Frame,
    /// Desired plan, with the pods of its functions at the desired scale.
    pub target: Option<TargetPlan>,
    /// Disruption budgets of its functions.
    pub budgets: Vec<PodDisruptionBudget>,
}

/// Builds the manifests of the desired plan, with the replica counts of `scaled`.
pub(crate) fn build(inputs: Inputs<'_>, planned: &PlanStage, scaled: &Scaled) -> Manifests {
    let Inputs { owner, environment, .. } = inputs;
    let target = planned.target.as_ref().map(|TargetPlan { revision, plan }| TargetPlan {
        revision: revision.scaled(&scaled.counts),
        plan: plan.clone(),
    });
    let budgets = target.as_ref().map(|target| budgets(owner, &target.revision)).unwrap_or_default();
    Manifests { frame: frame(owner, environment), target, budgets }
}
