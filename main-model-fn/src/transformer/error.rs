//! Errors of a forward.

use crate::backend::BackendError;
use crate::dispatch::ExpertError;
use remoe_proto::{ErrorCode, ServiceError};

/// Failure of a forward.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ForwardError {
    /// An operation failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// Experts could not be computed.
    #[error(transparent)]
    Experts(#[from] ExpertError),
}

impl ForwardError {
    /// Reports if the device's memory could not hold the tensors of the iteration.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Backend(BackendError::OutOfMemory { .. }))
    }

    /// Reports if the device stopped answering.
    pub(crate) fn is_device_lost(&self) -> bool {
        matches!(self, Self::Backend(BackendError::DeviceLost { .. }))
    }

    /// Returns which of the iteration's `rows` rows need weights that are out of reach for now; `None` for other failures.
    pub(crate) fn out_of_reach(&self, rows: usize) -> Option<Vec<usize>> {
        match self {
            Self::Experts(error) => error.out_of_reach().map(<[usize]>::to_vec),
            Self::Backend(BackendError::Checkpoint(error)) => {
                error.is_transient().then(|| (0..rows).collect())
            }
            Self::Backend(_) => None,
        }
    }
}

impl From<ForwardError> for ServiceError {
    fn from(error: ForwardError) -> Self {
        match error {
            ForwardError::Backend(
                error @ (BackendError::OutOfMemory { .. } | BackendError::DeviceLost { .. }),
            ) => Self::new(ErrorCode::Unavailable, format!("{error}; retry later")),
            ForwardError::Backend(error) => Self::new(ErrorCode::Internal, error.to_string()),
            ForwardError::Experts(error) => error.into(),
        }
    }
}
