use crate::experts::ExpertError;
use remoe_model::CheckpointError;
use remoe_wire::{ErrorCode, ServiceError};
use tch::TchError;

/// Why an iteration failed.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
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
    /// The checkpoint has something that this engine does not compute.
    #[error("the engine does not compute {0}")]
    Unsupported(&'static str),
}
