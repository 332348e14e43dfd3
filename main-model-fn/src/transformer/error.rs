use crate::backend::BackendError;
use crate::dispatch::ExpertError;
use remoe_proto::{ErrorCode, ServiceError};

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
    /// Which of the iteration's `rows` rows lacked weights that were out of reach, if that is why it failed.
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
