//! Compute dtype, and its check against the dtype of experts.

use crate::exit::CliError;
use clap::ValueEnum;
use remoe_model::{Checkpoint, ExpertsDtype, StoredDtype};

/// Compute dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    Float32,
    Bfloat16,
}

impl Dtype {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
        }
    }
}

/// Checks that functions can store the experts of `checkpoint` as `experts` with the compute dtype `dtype`. Without a
/// flag, the compute dtype is that of the checkpoint.
///
/// # Errors
/// The combination is not supported. Functions would fail with the same message, but only after they start.
pub(crate) fn check_experts_dtype(
    checkpoint: &Checkpoint,
    experts: Option<ExpertsDtype>,
    dtype: Option<Dtype>,
) -> Result<(), CliError> {
    let compute_dtype = match dtype {
        Some(Dtype::Float32) => StoredDtype::F32,
        Some(Dtype::Bfloat16) => StoredDtype::Bf16,
        None => checkpoint.config().dtype,
    };
    Ok(checkpoint.check_experts_dtype(experts, compute_dtype)?)
}
