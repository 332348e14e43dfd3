//! Elements of a tensor in the order in which they are packed, however they lie in their file.

use crate::stored_dtype;
use remoe_kernels::StoredDtype;
use remoe_kernels::numerics::{from_bf16, from_f16};
use remoe_model::{Checkpoint, CheckpointError, Strides, TensorRef};

/// Bytes that are read at a time; a multiple of a tile of rows keeps packing fast.
const READ_BYTES: usize = 1 << 20;

/// Rows that are packed together fastest.
const TILE_ROWS: usize = 16;

/// Reads tensors with one buffer. Matrices that lie among each other are read together, once.
pub(crate) struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    buffer: Vec<u8>,
    /// The byte range that `whole` has: file, offset, length.
    held: Option<(usize, u64, u64)>,
    whole: Vec<u8>,
}

impl<'a> Reader<'a> {
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
            None => self.in_order(tensor, take),
            Some(strides) => self.among_others(tensor, strides, take),
        }
    }

    fn in_order<E: From<CheckpointError>>(
        &mut self,
        tensor: &TensorRef,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let row_bytes = row_bytes(tensor).max(1);
        let slab = (READ_BYTES / row_bytes / TILE_ROWS).max(1) * TILE_ROWS * row_bytes;
        let mut start = 0;
        while start < tensor.bytes {
            let end = tensor.bytes.min(start + slab as u64);
            self.buffer.resize((end - start) as usize, 0);
            self.checkpoint.read_into(tensor, start..end, &mut self.buffer)?;
            take(start as usize / row_bytes, &self.buffer)?;
            start = end;
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
            self.whole.resize(tensor.bytes as usize, 0);
            self.checkpoint.read_into(tensor, 0..tensor.bytes, &mut self.whole)?;
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

/// Bytes of a row of a matrix, or of an element of a vector.
fn row_bytes(tensor: &TensorRef) -> usize {
    tensor.shape.get(1..).unwrap_or_default().iter().product::<usize>() * tensor.dtype.bytes() as usize
}

/// Reads a tensor's elements as float32, which has every value that checkpoints store.
///
/// # Errors
/// The bytes cannot be read.
pub fn load_floats(checkpoint: &Checkpoint, tensor: &TensorRef) -> Result<Vec<f32>, CheckpointError> {
    let mut floats = Vec::with_capacity(tensor.elements() as usize);
    Reader::new(checkpoint).rows(tensor, |_, bytes| {
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
