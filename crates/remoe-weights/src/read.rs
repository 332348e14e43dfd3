//! Reads the elements of a tensor row by row, whatever its layout in the file.

use crate::stored_dtype;
use remoe_kernels::StoredDtype;
use remoe_kernels::numerics::{from_bf16, from_f16};
use remoe_model::{Checkpoint, CheckpointError, Strides, TensorRef};
use std::ops::Range;

/// Bytes that are read at a time, rounded to whole tiles of rows.
const READ_BYTES: usize = 1 << 20;

/// Rows of a tile: packing is fastest for multiples of it.
const TILE_ROWS: usize = 16;

/// Reads tensors through one buffer. Matrices that are interleaved in one byte range are read once, together.
pub(crate) struct TensorReader<'a> {
    checkpoint: &'a Checkpoint,
    buffer: Vec<u8>,
    /// Byte range of the contents of `interleaved`: file, offset, length.
    interleaved_range: Option<(usize, u64, u64)>,
    /// Bytes of the last tensor that was interleaved with others.
    interleaved: Vec<u8>,
}

impl<'a> TensorReader<'a> {
    pub(crate) fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, buffer: Vec::new(), interleaved_range: None, interleaved: Vec::new() }
    }

    /// Reads `tensor` and passes its rows to `process`: some at a time, with the index of the first one.
    pub(crate) fn read_rows<E: From<CheckpointError>>(
        &mut self,
        tensor: &TensorRef,
        process: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        match tensor.strides {
            None => self.read_contiguous(tensor, 0..row_count(tensor), process),
            Some(strides) => self.read_interleaved(tensor, strides, process),
        }
    }

    /// Reads some rows of a tensor with contiguous rows, as [`read_rows`](Self::read_rows) does.
    pub(crate) fn read_contiguous<E: From<CheckpointError>>(
        &mut self,
        tensor: &TensorRef,
        rows: Range<usize>,
        mut process: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let rows_per_slab = slab_rows(row_bytes(tensor));
        for first in rows.clone().step_by(rows_per_slab) {
            self.checkpoint.read_rows(
                tensor,
                first..rows.end.min(first + rows_per_slab),
                &mut self.buffer,
            )?;
            process(first, &self.buffer)?;
        }
        Ok(())
    }

    /// Reads a tensor whose elements are interleaved with those of others, as [`read_rows`](Self::read_rows) does.
    fn read_interleaved<E: From<CheckpointError>>(
        &mut self,
        tensor: &TensorRef,
        strides: Strides,
        mut process: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let range = (tensor.file, tensor.offset, tensor.bytes);
        if self.interleaved_range != Some(range) {
            self.interleaved_range = None;
            self.interleaved = self.checkpoint.read(tensor)?;
            self.interleaved_range = Some(range);
        }
        let element = tensor.dtype.bytes() as usize;
        let (rows, row_bytes) = (tensor.shape.first().copied().unwrap_or(0), row_bytes(tensor));
        for first in (0..rows).step_by(TILE_ROWS) {
            let count = TILE_ROWS.min(rows - first);
            self.buffer.resize(count * row_bytes, 0);
            // Column by column, because the elements of a tile's rows are near each other in the file.
            for column in 0..row_bytes / element.max(1) {
                for row in 0..count {
                    let index = strides.first + (first + row) * strides.row + column * strides.column;
                    let from = &self.interleaved[index * element..][..element];
                    self.buffer[row * row_bytes + column * element..][..element].copy_from_slice(from);
                }
            }
            process(first, &self.buffer)?;
        }
        Ok(())
    }
}

/// Returns the number of rows of a matrix, or of elements of a vector.
fn row_count(tensor: &TensorRef) -> usize {
    tensor.shape.first().copied().unwrap_or(1)
}

/// Returns the number of rows of `row_bytes` bytes that are read at a time.
pub(crate) fn slab_rows(row_bytes: usize) -> usize {
    (READ_BYTES / row_bytes.max(1) / TILE_ROWS).max(1) * TILE_ROWS
}

/// Returns the bytes of a row of a matrix, or of an element of a vector.
pub(crate) fn row_bytes(tensor: &TensorRef) -> usize {
    tensor.shape.get(1..).unwrap_or_default().iter().product::<usize>() * tensor.dtype.bytes() as usize
}

/// Reads a tensor's elements as float32. That is exact for every stored type.
///
/// # Errors
/// The bytes cannot be read.
pub fn load_floats(checkpoint: &Checkpoint, tensor: &TensorRef) -> Result<Vec<f32>, CheckpointError> {
    let mut floats = Vec::with_capacity(tensor.elements() as usize);
    TensorReader::new(checkpoint).read_rows(tensor, |_, bytes| {
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
    use remoe_kernels::quantise::quantised_weights;
    use std::path::Path;

    fn fixture(name: &str) -> Checkpoint {
        Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name))
            .unwrap()
    }

    /// Projections whose rows lie in turns in one tensor are read as rows of their own.
    #[test]
    fn stored_mxfp4_weights_are_packed_unchanged() {
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
                        assert_eq!(quantised_weights(row, WeightFormat::Mxfp4), row);
                        others += usize::from(quantised_weights(row, WeightFormat::Int4) != row);
                    }
                }
                let down = &tensors.down.weight;
                for row in load_floats(&checkpoint, down).unwrap().chunks(down.shape[1]) {
                    assert_eq!(quantised_weights(row, WeightFormat::Mxfp4), row);
                }
            }
        }
        assert!(others > 0, "int4 has other numbers");
    }
}
