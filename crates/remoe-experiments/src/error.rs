//! Errors of experiments.

use remoe_hardware::ProblemError;
use remoe_planner::PlanError;

/// Error of an experiment.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExperimentError {
    /// The scenario does not give a valid problem.
    #[error("{scenario}: {error}")]
    Problem {
        /// Name of the scenario.
        scenario: String,
        /// Cause.
        error: ProblemError,
    },
    /// Planning failed.
    #[error("{scenario}: {error}")]
    Plan {
        /// Name of the scenario.
        scenario: String,
        /// Cause.
        error: PlanError,
    },
    /// The scenario has no requests.
    #[error("{scenario}: missing requests; give at least one")]
    NoRequests {
        /// Name of the scenario.
        scenario: String,
    },
    /// The shares of a request do not have the model's layers and experts.
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
