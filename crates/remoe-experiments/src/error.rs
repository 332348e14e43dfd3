//! Errors of experiments.

use remoe_hardware::ProblemError;
use remoe_planner::PlanError;

/// Why an experiment has no result.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExperimentError {
    /// No problem can be made of the scenario.
    #[error("{scenario}: {error}")]
    Problem {
        /// Name of the scenario.
        scenario: String,
        /// Cause.
        error: ProblemError,
    },
    /// The planner has no answer.
    #[error("{scenario}: {error}")]
    Plan {
        /// Name of the scenario.
        scenario: String,
        /// Cause.
        error: PlanError,
    },
    /// Nothing to plan for.
    #[error("{scenario}: missing requests; give at least one")]
    NoRequests {
        /// Name of the scenario.
        scenario: String,
    },
    /// A request's shares do not have the form of the model.
    #[error(
        "{scenario}: invalid shares of request {request}: expected {expected} (layers x experts), got {found}"
    )]
    Shares {
        /// Name of the scenario.
        scenario: String,
        /// Index of the request.
        request: usize,
        /// `LAYERS x EXPERTS` of the request.
        found: String,
        /// `LAYERS x EXPERTS` of the model.
        expected: String,
    },
}
