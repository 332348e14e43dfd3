use crate::backend::BackendError;
use crate::experts::ExpertError;
use remoe_experts::LoadError;
use remoe_kernels::KernelError;
use remoe_model::CheckpointError;
use remoe_wire::{ErrorCode, ServiceError};

/// Why an iteration failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ForwardError {
    /// An operation was not computed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// Experts could not be computed.
    #[error(transparent)]
    Experts(#[from] ExpertError),
}

impl ForwardError {
    /// The rows of the iteration whose experts were out of reach, if that is why it failed.
    pub(crate) fn out_of_reach(&self) -> Option<&[usize]> {
        match self {
            Self::Experts(error) => error.out_of_reach(),
            Self::Backend(_) => None,
        }
    }
}

impl From<ForwardError> for ServiceError {
    fn from(error: ForwardError) -> Self {
        match error {
            ForwardError::Backend(error) => Self::new(ErrorCode::Internal, error.to_string()),
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
    /// Weights cannot be packed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Dense layers or shared experts cannot be read or packed.
    #[error(transparent)]
    Gated(#[from] LoadError),
    /// The device does not take them.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A thread that loads layers ended abnormally.
    #[error("a thread that loads layers panicked")]
    Panicked,
    /// The checkpoint's facts contradict each other: a fault of this program.
    #[error("inconsistent checkpoint facts: {0}")]
    Inconsistent(&'static str),
}
