//! Errors of a search.

use crate::infeasible::Infeasible;
use remoe_plan::cost::account::AccountError;
use remoe_plan::error::FieldError;

/// Reason that there is no answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The problem states something invalid.
    #[error("problem: {0}")]
    Problem(FieldError),
    /// The plan does not belong to the problem.
    #[error("plan: {0}")]
    Plan(FieldError),
    /// No plan keeps every limit.
    #[error("{0}")]
    Infeasible(Box<Infeasible>),
    /// The caller's budget said so.
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
