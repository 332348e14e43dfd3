//! Errors of expert dispatch.

use remoe_kernels::KernelError;
use remoe_proto::{ErrorCode, ServiceError};
use std::time::Duration;

/// Failure to compute a layer's experts.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExpertError {
    /// Neither a replica nor the local fallback delivered in time.
    #[error(
        "cannot finish layer {layer}: {missing} expert rows missing after {limit:?} without progress of remote \
         functions or local loads"
    )]
    Deadline {
        /// The layer's index in the model.
        layer: usize,
        /// Number of (token, expert) pairs without a row.
        missing: usize,
        /// Time without any progress.
        limit: Duration,
        /// Rows of the iteration with such pairs, ascending.
        rows: Vec<usize>,
    },
    /// A kernel failed.
    #[error("layer {layer}: {source}")]
    Kernel {
        /// The layer's index in the model.
        layer: usize,
        /// Error of the kernel.
        source: KernelError,
    },
    /// An expert's weights could not be read.
    #[error("cannot load expert {expert} of layer {layer}: {message}")]
    Load {
        /// The layer's index in the model.
        layer: usize,
        /// Id of the expert.
        expert: u32,
        /// Error of the load.
        message: String,
        /// Rows of the iteration that need experts which cannot be loaded, ascending.
        rows: Vec<usize>,
    },
    /// The placement lacks an expert that routing selected: a bug of this program.
    #[error("expert {expert} of layer {layer} is neither local nor remote in generation {generation}")]
    Unplaced {
        /// The layer's index in the model.
        layer: usize,
        /// Id of the expert.
        expert: u32,
        /// Routing generation in force.
        generation: u64,
    },
}

impl ExpertError {
    /// Returns the rows whose experts were out of reach, if that is the failure. Other rows can be computed without them;
    /// these rows can be retried.
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
