//! Loading of experts that stay fp8: packs the codes and scales of a checkpoint without decoding them.

use crate::LoadError;
use crate::read::slab_rows;
use remoe_kernels::{ExpertMatrix, Fp8Scales, KernelError, PackedExpertBuilder};
use remoe_model::{Checkpoint, TensorRef};

/// Reads `tensor`, the weights of the projection `matrix`, and packs them into `builder`.
pub(crate) fn pack(
    checkpoint: &Checkpoint,
    tensor: &TensorRef,
    matrix: ExpertMatrix,
    builder: &mut PackedExpertBuilder,
    pack_error: &impl Fn(KernelError) -> LoadError,
) -> Result<(), LoadError> {
    let Some((values, block)) = checkpoint.fp8_scales(tensor)? else {
        return Err(LoadError::NotFp8 { tensor: tensor.name.to_string() });
    };
    let rows = tensor.shape.first().copied().unwrap_or(0);
    let columns = tensor.shape.get(1).copied().unwrap_or(0);
    let scales = Fp8Scales::new(values, rows, columns, block).map_err(pack_error)?;
    let rows_per_slab = slab_rows(columns);
    let mut codes = Vec::new();
    for first in (0..rows).step_by(rows_per_slab) {
        checkpoint.read_codes(tensor, first..rows.min(first + rows_per_slab), &mut codes)?;
        builder.set_fp8_rows(matrix, first, &codes, &scales).map_err(pack_error)?;
    }
    Ok(())
}
