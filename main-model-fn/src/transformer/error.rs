use crate::experts::ExpertError;
use remoe_model::CheckpointError;
use remoe_wire::{ErrorCode, ServiceError};
use tch::TchError;

/// Why an iteration failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ForwardError {
    /// LibTorch refused an operation.
    #[error("LibTorch: {0}")]
    Torch(#[from] TchError),
    /// Experts could not be computed.
    #[error(transparent)]
    Experts(#[from] ExpertError),
}

impl From<ForwardError> for ServiceError {
    fn from(error: ForwardError) -> Self {
        match error {
            ForwardError::Torch(error) => Self::new(ErrorCode::Internal, format!("LibTorch: {error}")),
            ForwardError::Experts(error) => error.into(),
        }
    }
}

/// Why the weights could not be brought to the device.
#[derive(Debug, thiserror::Error)]
pub enum LoadModelError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// LibTorch refused.
    #[error("LibTorch: {0}")]
    Torch(#[from] TchError),
    /// The checkpoint's facts contradict each other: a fault of this program.
    #[error("inconsistent checkpoint facts: {0}")]
    Inconsistent(&'static str),
}
