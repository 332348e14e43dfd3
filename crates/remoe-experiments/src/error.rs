//! What can go wrong in an experiment.

use remoe_hardware::ProblemError;
use remoe_planner::PlanError;

/// Why an experiment has no result.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExperimentError {
    /// No problem can be made of the scenario.
    #[error("{scenario}: {error}")]
    Problem {
        /// Its name.
        scenario: String,
        /// What cannot be.
        error: ProblemError,
    },
    /// The planner has no answer.
    #[error("{scenario}: {error}")]
    Plan {
        /// Its name.
        scenario: String,
        /// Why.
        error: PlanError,
    },
    /// Nothing to plan for.
    #[error("{scenario}: missing requests; give at least one")]
    NoRequests {
        /// Its name.
        scenario: String,
    },
    /// A request's shares do not have the form of the model.
    #[error(
        "{scenario}: invalid shares of request {request}: expected {expected} (layers x experts), got {found}"
    )]
    Shares {
        /// Its name.
        scenario: String,
        /// Index of the request.
        request: usize,
        /// `LAYERS x EXPERTS` of the request.
        found: String,
        /// `LAYERS x EXPERTS` of the model.
        expected: String,
    },
}
