//! Errors of the control plane.

use remoe_model::CheckpointError;
use remoe_model::text::TextError;
use remoe_planner::{AccountError, PlanError};
use remoe_predictor::PredictError;
use remoe_rollout::PlacementError;
use remoe_usage::HistoryStoreError;
use std::io;

/// Failure of the control plane.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The planner has no plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The placement is invalid.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// A plan does not fit its problem.
    #[error(transparent)]
    Account(#[from] AccountError),
    /// A plan cannot be serialised for the functions.
    #[error("cannot write the plan: {0}")]
    Json(#[from] serde_json::Error),
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The tokenizer cannot be used.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Expert usage cannot be predicted.
    #[error(transparent)]
    Predict(#[from] PredictError),
    /// The training history cannot be used.
    #[error(transparent)]
    History(#[from] HistoryStoreError),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// A report cannot be written.
    #[error("cannot write the report: {0}")]
    Report(io::Error),
    /// The gateway stopped.
    #[error("the gateway stopped unexpectedly")]
    GatewayStopped,
    /// The supervisor of the functions stopped.
    #[error("the supervisor of the functions stopped unexpectedly")]
    SupervisorStopped,
}
