//! Elements of a tensor in the order in which they are packed, however they lie in their file.

use crate::stored_dtype;
use remoe_kernels::StoredDtype;
use remoe_kernels::numerics::{from_bf16, from_f16};
use remoe_model::{Checkpoint, CheckpointError, Strides, TensorRef};
use std::ops::Range;

/// Bytes that are read at a time; a multiple of a tile of rows keeps packing fast.
const READ_BYTES: usize = 1 << 20;

/// Rows that are packed together fastest.
const TILE_ROWS: usize = 16;

/// Reads tensors with one buffer. Matrices that lie among each other are read together, once.
pub(crate) struct TensorReader<'a> {
    checkpoint: &'a Checkpoint,
    buffer: Vec<u8>,
    /// The byte range that `whole` has: file, offset, length.
    held: Option<(usize, u64, u64)>,
    whole: Vec<u8>,
}

impl<'a> TensorReader<'a> {
    pub(crate) fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, buffer: Vec::new(), held: None, whole: Vec::new() }
    }

    /// Hands the rows of `tensor` to `take`, some at a time, with the index of the first.
    pub(crate) fn rows<E: From<CheckpointError>>(
        &mut self,
        tensor: &TensorRef,
        take: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        match tensor.strides {
            None => self.in_order(tensor, 0..rows(tensor), take),
            Some(strides) => self.among_others(tensor, strides, take),
        }
    }

    /// As [`rows`](Self::rows), of some rows of a tensor whose rows lie one after the other.
    pub(crate) fn in_order<E: From<CheckpointError>>(
        &mut self,
        tensor: &TensorRef,
        rows: Range<usize>,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let slab = slab_rows(row_bytes(tensor));
        for first in rows.clone().step_by(slab) {
            self.checkpoint.read_rows(tensor, first..rows.end.min(first + slab), &mut self.buffer)?;
            take(first, &self.buffer)?;
        }
        Ok(())
    }

    fn among_others<E: From<CheckpointError>>(
        &mut self,
        tensor: &TensorRef,
        strides: Strides,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let range = (tensor.file, tensor.offset, tensor.bytes);
        if self.held != Some(range) {
            self.held = None;
            self.whole = self.checkpoint.read(tensor)?;
            self.held = Some(range);
        }
        let element = tensor.dtype.bytes() as usize;
        let (rows, row_bytes) = (tensor.shape.first().copied().unwrap_or(0), row_bytes(tensor));
        for first in (0..rows).step_by(TILE_ROWS) {
            let count = TILE_ROWS.min(rows - first);
            self.buffer.resize(count * row_bytes, 0);
            // Column after column: the elements of a tile's rows are near each other.
            for column in 0..row_bytes / element.max(1) {
                for row in 0..count {
                    let from = strides.first + (first + row) * strides.row + column * strides.column;
                    let from = &self.whole[from * element..][..element];
                    self.buffer[row * row_bytes + column * element..][..element].copy_from_slice(from);
                }
            }
            take(first, &self.buffer)?;
        }
        Ok(())
    }
}

/// Rows of a matrix, or elements of a vector.
fn rows(tensor: &TensorRef) -> usize {
    tensor.shape.first().copied().unwrap_or(1)
}

/// Rows of so many bytes that are read at a time.
pub(crate) fn slab_rows(row_bytes: usize) -> usize {
    (READ_BYTES / row_bytes.max(1) / TILE_ROWS).max(1) * TILE_ROWS
}

/// Bytes of a row of a matrix, or of an element of a vector.
pub(crate) fn row_bytes(tensor: &TensorRef) -> usize {
    tensor.shape.get(1..).unwrap_or_default().iter().product::<usize>() * tensor.dtype.bytes() as usize
}

/// Reads a tensor's elements as float32, which has every value that checkpoints store.
///
/// # Errors
/// The bytes cannot be read.
pub fn load_floats(checkpoint: &Checkpoint, tensor: &TensorRef) -> Result<Vec<f32>, CheckpointError> {
    let mut floats = Vec::with_capacity(tensor.elements() as usize);
    TensorReader::new(checkpoint).rows(tensor, |_, bytes| {
        let halves = |decode: fn(u16) -> f32| {
            bytes.as_chunks().0.iter().map(move |&half| decode(u16::from_le_bytes(half)))
        };
        match stored_dtype(tensor.dtype) {
            StoredDtype::F32 => {
                floats.extend(bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)));
            }
            StoredDtype::Bf16 => floats.extend(halves(from_bf16)),
            StoredDtype::F16 => floats.extend(halves(from_f16)),
        }
        Ok::<_, CheckpointError>(())
    })?;
    Ok(floats)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use super::*;
    use remoe_kernels::WeightFormat;
    use remoe_kernels::quantise::kept;
    use std::path::Path;

    fn fixture(name: &str) -> Checkpoint {
        Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name))
            .unwrap()
    }

    /// Projections whose rows lie in turns in one tensor are read as rows of their own.
    #[test]
    fn weights_that_are_stored_as_mxfp4_are_kept_as_they_are() {
        let checkpoint = fixture("gptoss-mxfp4");
        let mut others = 0;
        for layer in checkpoint.config().moe_layers() {
            for expert in 0..checkpoint.config().moe(layer).unwrap().experts {
                let tensors = checkpoint.expert(layer, expert).unwrap();
                let gate = &tensors.gate.as_ref().unwrap().weight;
                let both = checkpoint.read(gate).unwrap();
                for (first, tensor) in [(0, gate), (1, &tensors.up.weight)] {
                    let rows = load_floats(&checkpoint, tensor).unwrap();
                    let columns = tensor.shape[1];
                    for (index, row) in rows.chunks(columns).enumerate() {
                        let stored = both.as_chunks().0.iter().skip((2 * index + first) * columns);
                        let stored = stored.take(columns).map(|&half| from_bf16(u16::from_le_bytes(half)));
                        assert_eq!(row, stored.collect::<Vec<_>>());
                        assert_eq!(kept(row, WeightFormat::Mxfp4), row);
                        others += usize::from(kept(row, WeightFormat::Int4) != row);
                    }
                }
                let down = &tensors.down.weight;
                for row in load_floats(&checkpoint, down).unwrap().chunks(down.shape[1]) {
                    assert_eq!(kept(row, WeightFormat::Mxfp4), row);
                }
            }
        }
        assert!(others > 0, "int4 has other numbers");
    }
}
