use remoe_kernels::KernelError;
use remoe_proto::{ErrorCode, ServiceError};
use std::time::Duration;

/// Why a layer's experts could not be computed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExpertError {
    /// Neither a replica nor a local load delivered in time.
    #[error(
        "cannot finish layer {layer}: {missing} expert rows missing after {limit:?} without progress of remote \
         functions or local loads"
    )]
    Deadline {
        /// The layer.
        layer: usize,
        /// (token, expert) pairs without a result.
        missing: usize,
        /// How long nothing came.
        limit: Duration,
        /// Rows of the iteration that these pairs belong to, ascending.
        rows: Vec<usize>,
    },
    /// The kernels refused.
    #[error("layer {layer}: {source}")]
    Kernel {
        /// The layer.
        layer: usize,
        /// Why.
        source: KernelError,
    },
    /// An expert's weights could not be read.
    #[error("cannot load expert {expert} of layer {layer}: {message}")]
    Load {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: u32,
        /// Why.
        message: String,
        /// Rows of the iteration that need what cannot be loaded, ascending.
        rows: Vec<usize>,
    },
    /// The placement lacks an expert that routing selected: a fault of this program.
    #[error("expert {expert} of layer {layer} is neither local nor remote in generation {generation}")]
    Unplaced {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: u32,
        /// The routing generation.
        generation: u64,
    },
}

impl ExpertError {
    /// The rows whose experts were out of reach, where that is what failed: others could go on, and
    /// these may when they are tried again.
    pub(crate) fn out_of_reach(&self) -> Option<&[usize]> {
        match self {
            Self::Deadline { rows, .. } | Self::Load { rows, .. } => Some(rows),
            Self::Kernel { .. } | Self::Unplaced { .. } => None,
        }
    }
}

impl From<ExpertError> for ServiceError {
    fn from(error: ExpertError) -> Self {
        let code = match error {
            ExpertError::Deadline { .. } | ExpertError::Load { .. } => ErrorCode::Unavailable,
            ExpertError::Kernel { .. } | ExpertError::Unplaced { .. } => ErrorCode::Internal,
        };
        Self::new(code, error.to_string())
    }
}
