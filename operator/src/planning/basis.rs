//! Inputs of a plan, stored with it as its basis.
//!
//! The planning problem itself would take hundreds of kilobytes, since it repeats the same times for every layer. Its
//! inputs take a few. They allow to rebuild the problem of a running plan after the spec, the model or the profile
//! changed, or after a restart of the operator.

use super::PlanningError;
use super::hosted::draft;
use crate::facts::ModelFacts;
use remoe_api::MoEPlanSpec;
use remoe_hardware::{DeploymentRequirements, Profile, problem};
use remoe_planner::{PlanAccount, Problem, of_any_version};
use remoe_predictor::UsageShares;
use serde::{Deserialize, Serialize};

/// Maximum bytes of a stored basis.
const MAX_BASIS_BYTES: usize = 64 << 10;
/// Maximum bytes of an account for main functions: half of a control request.
const MAX_ACCOUNT_BYTES: usize = 4 << 20;

/// Inputs of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct PlanInputs {
    /// Facts of the checkpoint.
    pub(super) model: ModelFacts,
    /// Hardware profile.
    pub(super) profile: Profile,
    /// Requirements of the spec.
    #[serde(rename = "wishes")]
    pub(super) requirements: DeploymentRequirements,
    /// Expected expert usage in the text form of [`UsageShares`], which is twenty times shorter than rows of numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) expected: Option<String>,
}

impl PlanInputs {
    /// Builds the planning problem.
    pub(super) fn problem(&self) -> Result<Problem, PlanningError> {
        let invalid = |error: String| PlanningError::Profile(error);
        let model = &self.model.inspection;
        let expected = self.expected.as_ref();
        let expected =
            expected.map(|text| UsageShares::from_text(text, model.moe_layers.len(), model.experts));
        let expected = expected.transpose().map_err(|error| invalid(error.to_string()))?;
        let problem =
            problem(model, &self.profile, &self.requirements).map_err(|error| invalid(error.to_string()))?;
        let prediction = expected.map(|shares| shares.to_rows()).or_else(|| problem.prediction.clone());
        Ok(Problem { prediction, ..problem })
    }

    /// Returns the indices of the MoE layers, by position in the problem.
    pub(super) fn moe_layers(&self) -> Vec<u32> {
        // Layer counts are bounded by the check of the facts.
        let ids = self.model.inspection.moe_layers.iter();
        ids.map(|&layer| u32::try_from(layer).unwrap_or(u32::MAX)).collect()
    }

    /// Serialises the inputs; absent if they are too large.
    pub(super) fn text(&self) -> Option<String> {
        serde_json::to_string(self).ok().filter(|text| text.len() <= MAX_BASIS_BYTES)
    }

    fn read(text: &str) -> Result<Self, PlanningError> {
        let invalid =
            |message: String| PlanningError::Profile(format!("cannot read the plan's basis: {message}"));
        if text.len() > MAX_BASIS_BYTES {
            return Err(invalid(format!("{} bytes, limit {MAX_BASIS_BYTES}", text.len())));
        }
        let basis: Self = of_any_version(text).map_err(|error| invalid(error.to_string()))?;
        basis.model.check().map_err(|error| invalid(error.to_string()))?;
        basis.profile.check().map_err(|error| invalid(error.to_string()))?;
        Ok(basis)
    }
}

/// Returns the account of the expected cost of requests under `plan`, as main functions receive it
/// (`Routing.account`). Absent if the plan has no basis, or if the account is too large.
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
    Ok(Some(serde_json::to_string(&account)?).filter(|text| text.len() <= MAX_ACCOUNT_BYTES))
}
