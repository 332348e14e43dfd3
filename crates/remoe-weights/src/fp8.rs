//! Experts that stay fp8: codes and scales from a checkpoint into the packed form, as they are.

use crate::LoadError;
use crate::read::slab_rows;
use remoe_kernels::{Fp8Scales, KernelError, Matrix, PackedExpertBuilder};
use remoe_model::{Checkpoint, TensorRef};

/// Reads `tensor`, which is the projection `matrix`, into `builder`.
pub(crate) fn pack(
    checkpoint: &Checkpoint,
    tensor: &TensorRef,
    matrix: Matrix,
    builder: &mut PackedExpertBuilder,
    refused: &impl Fn(KernelError) -> LoadError,
) -> Result<(), LoadError> {
    let Some((values, block)) = checkpoint.fp8_scales(tensor)? else {
        return Err(LoadError::NotFp8 { tensor: tensor.name.to_string() });
    };
    let rows = tensor.shape.first().copied().unwrap_or(0);
    let columns = tensor.shape.get(1).copied().unwrap_or(0);
    let scales = Fp8Scales::new(values, rows, columns, block).map_err(refused)?;
    let slab = slab_rows(columns);
    let mut codes = Vec::new();
    for first in (0..rows).step_by(slab) {
        checkpoint.read_codes(tensor, first..rows.min(first + slab), &mut codes)?;
        builder.fp8_rows(matrix, first, &codes, &scales).map_err(refused)?;
    }
    Ok(())
}
