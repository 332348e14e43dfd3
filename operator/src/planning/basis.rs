//! Inputs that a plan was made from, kept with it.
//!
//! The planning problem itself would take hundreds of kilobytes: it repeats the same times for every layer. Its inputs
//! take a few, and are all that there is to know about a plan that still runs after the spec, the model or the figures
//! of the hardware have changed, or after the operator was started again.

use super::PlanningError;
use super::hosted::draft;
use crate::facts::ModelFacts;
use remoe_api::MoEPlanSpec;
use remoe_hardware::{DeploymentRequirements, Profile, problem};
use remoe_planner::{PlanAccount, Problem, of_any_version};
use remoe_predictor::UsageShares;
use serde::{Deserialize, Serialize};

/// Bytes of a basis that is kept.
const MAX_BASIS: usize = 64 << 10;
/// Bytes of an account that main functions are told: half of what a control request may take.
const MAX_ACCOUNT: usize = 4 << 20;

/// Inputs of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct PlanInputs {
    /// The checkpoint.
    pub(super) model: ModelFacts,
    /// Figures of the hardware.
    pub(super) profile: Profile,
    /// Wishes of the spec.
    pub(super) wishes: DeploymentRequirements,
    /// Expert usage that requests are expected to have, as [`UsageShares`] writes it: rows of numbers would take twenty
    /// times the room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) expected: Option<String>,
}

impl PlanInputs {
    /// The planning problem.
    pub(super) fn problem(&self) -> Result<Problem, PlanningError> {
        let wrong = |error: String| PlanningError::Profile(error);
        let model = &self.model.inspection;
        let expected = self.expected.as_ref();
        let expected =
            expected.map(|text| UsageShares::from_text(text, model.moe_layers.len(), model.experts));
        let expected = expected.transpose().map_err(|error| wrong(error.to_string()))?;
        let problem =
            problem(model, &self.profile, &self.wishes).map_err(|error| wrong(error.to_string()))?;
        let prediction = expected.map(|shares| shares.to_rows()).or_else(|| problem.prediction.clone());
        Ok(Problem { prediction, ..problem })
    }

    /// Ids of the layers with experts, by position in the problem.
    pub(super) fn moe_layers(&self) -> Vec<u32> {
        // Layer ids of real models fit by far.
        let ids = self.model.inspection.moe_layers.iter();
        ids.map(|&layer| u32::try_from(layer).unwrap_or(u32::MAX)).collect()
    }

    /// As it is kept; none where it takes too much.
    pub(super) fn text(&self) -> Option<String> {
        serde_json::to_string(self).ok().filter(|text| text.len() <= MAX_BASIS)
    }

    fn read(text: &str) -> Result<Self, PlanningError> {
        let wrong =
            |message: String| PlanningError::Profile(format!("cannot read the plan's basis: {message}"));
        if text.len() > MAX_BASIS {
            return Err(wrong(format!("{} bytes, limit {MAX_BASIS}", text.len())));
        }
        let basis: Self = of_any_version(text).map_err(|error| wrong(error.to_string()))?;
        basis.model.check().map_err(|error| wrong(error.to_string()))?;
        basis.profile.check().map_err(|error| wrong(error.to_string()))?;
        Ok(basis)
    }
}

/// Returns the account of what requests under `plan` are expected to take, as main functions are told
/// (`Routing.account`). Absent if the plan does not say what it was made from, or if the account would be too large to
/// be told.
///
/// # Errors
/// The basis of the plan is invalid, or the plan does not fit it.
pub(crate) fn account(plan: &MoEPlanSpec) -> Result<Option<String>, PlanningError> {
    let Some(text) = &plan.basis else { return Ok(None) };
    let basis = PlanInputs::read(text)?;
    let problem = basis.problem()?;
    let draft = draft(plan, &basis.moe_layers(), &problem)?;
    let account =
        PlanAccount::new(problem, &draft).map_err(|error| PlanningError::Profile(error.to_string()))?;
    Ok(Some(serde_json::to_string(&account)?).filter(|text| text.len() <= MAX_ACCOUNT))
}
