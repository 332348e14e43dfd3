//! Compute dtype, and the dtypes of weights that go with it.

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

/// Checks that functions can keep the experts of `checkpoint` as `experts` if the model computes in `dtype`, or in its own.
///
/// # Errors
/// They cannot. The message is that of the functions, before any of them starts.
pub(crate) fn check_experts_dtype(
    checkpoint: &Checkpoint,
    experts: Option<ExpertsDtype>,
    dtype: Option<Dtype>,
) -> Result<(), CliError> {
    let computed_in = match dtype {
        Some(Dtype::Float32) => StoredDtype::F32,
        Some(Dtype::Bfloat16) => StoredDtype::Bf16,
        None => checkpoint.config().dtype,
    };
    Ok(checkpoint.check_experts_dtype(experts, computed_in)?)
}
