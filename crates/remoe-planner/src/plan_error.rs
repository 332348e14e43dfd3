//! Errors of planning.

use crate::infeasible::Infeasible;
use remoe_plan::cost::account::AccountError;
use remoe_plan::error::FieldError;

/// Error of planning.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// A field of the problem is invalid.
    #[error("problem: {0}")]
    Problem(FieldError),
    /// The plan does not belong to the problem.
    #[error("plan: {0}")]
    Plan(FieldError),
    /// No plan keeps every limit.
    #[error("{0}")]
    Infeasible(Box<Infeasible>),
    /// The caller's budget cancelled the search.
    #[error("cannot plan: cancelled by the caller; plan again with more time")]
    Cancelled,
}

impl From<AccountError> for PlanError {
    fn from(error: AccountError) -> Self {
        match error {
            AccountError::Problem(error) => Self::Problem(error),
            AccountError::Plan(error) => Self::Plan(error),
        }
    }
}
