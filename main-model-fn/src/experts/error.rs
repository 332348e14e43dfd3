use remoe_kernels::KernelError;
use remoe_wire::{ErrorCode, ServiceError};
use std::time::Duration;

/// Why a layer's experts could not be computed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExpertError {
    /// Neither a replica nor a local load delivered in time.
    #[error(
        "layer {layer}: {missing} expert rows were still missing after {limit:?} (remote functions and local load)"
    )]
    Deadline {
        /// The layer.
        layer: usize,
        /// (token, expert) pairs without a result.
        missing: usize,
        /// The time that a layer has.
        limit: Duration,
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
    #[error("expert {expert} of layer {layer} cannot be loaded: {message}")]
    Load {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: u32,
        /// Why.
        message: String,
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

impl From<ExpertError> for ServiceError {
    fn from(error: ExpertError) -> Self {
        let code = match error {
            ExpertError::Deadline { .. } | ExpertError::Load { .. } => ErrorCode::Unavailable,
            ExpertError::Kernel { .. } | ExpertError::Unplaced { .. } => ErrorCode::Internal,
        };
        Self::new(code, error.to_string())
    }
}
