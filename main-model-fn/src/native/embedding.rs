//! Embedding tables on the CPU.
//!
//! A table that is stored in the compute dtype is not loaded before the first request: its rows are read from the
//! checkpoint until the whole table is in memory. This shortens cold starts.

use super::Native;
use crate::backend::{BackendError, DeferredWeights, LoadModelError, ResidentPart};
use remoe_kernels::{Dtype, NumericsClass, PackedMatrix, Pool, WeightFormat};
use remoe_model::{Checkpoint, CheckpointError, StoredAs, TensorRef};
use remoe_weights::{load_matrix, stored_dtype};
use std::sync::{Arc, OnceLock};

/// Rows that one thread looks up at a time, if a lookup is more than a copy.
const ROWS_PER_JOB: usize = 8;

/// An embedding table.
pub enum NativeEmbedding {
    /// Elements in the compute dtype, row after row.
    Rows(Arc<EmbeddingRows>),
    /// Matrix packed for the kernels: quantised, or shared with the output head.
    Packed(Arc<PackedMatrix>),
}

impl ResidentPart for NativeEmbedding {
    fn bytes(&self) -> usize {
        match self {
            Self::Rows(table) => table.bytes(),
            Self::Packed(matrix) => matrix.bytes(),
        }
    }
}

impl NativeEmbedding {
    pub(super) fn load(
        ops: &Native,
        checkpoint: &Arc<Checkpoint>,
        table: &TensorRef,
        class: NumericsClass,
    ) -> Result<Self, LoadModelError> {
        if class.weights != WeightFormat::Plain {
            return Ok(Self::Packed(Arc::new(load_matrix(checkpoint, &[table], class, ops.pool.threads())?)));
        }
        let whole = match stored_dtype(table.dtype) == ops.dtype.into() && EmbeddingRows::can_look_up(table) {
            true => OnceLock::new(),
            false => OnceLock::from(ops.load_bytes(checkpoint, table)?),
        };
        Ok(Self::Rows(Arc::new(EmbeddingRows::new(checkpoint, table, ops.dtype, whole))))
    }

    /// Returns the table if its rows may still have to be loaded.
    pub(super) fn deferred_weights(&self) -> Option<Arc<dyn DeferredWeights>> {
        match self {
            Self::Rows(table) => Some(table.clone()),
            Self::Packed(_) => None,
        }
    }

    /// Returns the number of rows, and of elements per row in the compute dtype.
    pub(super) fn shape(&self, dtype: Dtype) -> (usize, usize) {
        match self {
            Self::Rows(table) => (table.rows, table.row_bytes / dtype.bytes()),
            Self::Packed(matrix) => (matrix.outputs(), matrix.inputs()),
        }
    }

    /// Copies the rows of `tokens` to `to`, `row_bytes` bytes each. Each token must be below the number of rows.
    ///
    /// # Errors
    /// Fails if the checkpoint cannot be read or a thread of the pool panicked.
    pub(super) fn look_up(
        &self,
        pool: &Pool,
        tokens: &[u32],
        row_bytes: usize,
        to: &mut [u8],
    ) -> Result<(), BackendError> {
        let look_up = |tokens: &[u32], to: &mut [u8]| {
            match self {
                Self::Rows(table) => table.look_up(tokens, to)?,
                Self::Packed(matrix) => {
                    let mut rows = tokens.iter().zip(to.chunks_exact_mut(row_bytes));
                    rows.try_for_each(|(&token, to)| matrix.read_row(token as usize, to))?;
                }
            }
            Ok(())
        };
        let copies = match self {
            Self::Rows(table) => table.missing_bytes() == 0,
            Self::Packed(_) => false,
        };
        if copies || tokens.len() <= ROWS_PER_JOB {
            return look_up(tokens, to);
        }
        let parts = tokens.chunks(ROWS_PER_JOB).zip(to.chunks_mut(ROWS_PER_JOB * row_bytes));
        let mut parts: Vec<_> = parts.map(|(tokens, to)| (tokens, to, Ok(()))).collect();
        pool.each(&mut parts, |(tokens, to, outcome)| *outcome = look_up(tokens, to))?;
        parts.into_iter().try_for_each(|(_, _, outcome)| outcome)
    }
}

/// Rows of a tensor in the compute dtype, in memory or in the checkpoint.
pub struct EmbeddingRows {
    checkpoint: Arc<Checkpoint>,
    tensor: TensorRef,
    rows: usize,
    row_bytes: usize,
    /// All rows, once they are in memory.
    whole: OnceLock<Vec<u8>>,
}

impl EmbeddingRows {
    /// Reports if rows of `tensor` can be read one by one: stored contiguously, as elements of its dtype.
    fn can_look_up(tensor: &TensorRef) -> bool {
        tensor.stored == StoredAs::Plain && tensor.strides.is_none()
    }

    /// Creates the table. If `whole` is empty, rows are read from the checkpoint, which must store them as `dtype`.
    fn new(checkpoint: &Arc<Checkpoint>, tensor: &TensorRef, dtype: Dtype, whole: OnceLock<Vec<u8>>) -> Self {
        Self {
            rows: tensor.shape.first().copied().unwrap_or(0),
            row_bytes: tensor.shape.last().copied().unwrap_or(0) * dtype.bytes(),
            checkpoint: checkpoint.clone(),
            tensor: tensor.clone(),
            whole,
        }
    }

    /// Returns the bytes of memory that the loaded table takes.
    fn bytes(&self) -> usize {
        self.rows * self.row_bytes
    }

    /// Copies the rows of `tokens` to `to`. Each token must be below the number of rows.
    ///
    /// # Errors
    /// Fails if the checkpoint cannot be read.
    fn look_up(&self, tokens: &[u32], to: &mut [u8]) -> Result<(), CheckpointError> {
        let whole = self.whole.get();
        tokens.iter().zip(to.chunks_exact_mut(self.row_bytes)).try_for_each(|(&token, to)| match whole {
            Some(whole) => {
                to.copy_from_slice(&whole[token as usize * self.row_bytes..][..self.row_bytes]);
                Ok(())
            }
            None => {
                let first = u64::from(token) * self.row_bytes as u64;
                self.checkpoint.read_into(&self.tensor, first..first + self.row_bytes as u64, to)
            }
        })
    }
}

impl DeferredWeights for EmbeddingRows {
    fn missing_bytes(&self) -> usize {
        if self.whole.get().is_some() { 0 } else { self.bytes() }
    }

    fn load(&self) -> Result<(), CheckpointError> {
        if self.whole.get().is_none() {
            // If another thread was faster, it has read the same bytes.
            let _set_by_this_thread = self.whole.set(self.checkpoint.read(&self.tensor)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use super::*;
    use crate::backend::Backend;
    use remoe_kernels::PoolConfig;
    use std::path::Path;

    #[test]
    fn rows_are_equal_before_and_after_the_table_is_loaded() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/mixtral-basic");
        let checkpoint = Arc::new(Checkpoint::open(folder).unwrap());
        let pool = Arc::new(Pool::new(PoolConfig { threads: 2, ..PoolConfig::default() }).unwrap());
        let ops = Native::open(None, Dtype::F32, &pool).unwrap();
        let table =
            NativeEmbedding::load(&ops, &checkpoint, checkpoint.embedding(), Dtype::F32.into()).unwrap();
        let whole = checkpoint.read(checkpoint.embedding()).unwrap();
        let (rows, width) = table.shape(Dtype::F32);
        assert_eq!((rows * width * 4, table.bytes()), (whole.len(), whole.len()));
        let look_up = |tokens: &[u32]| {
            let mut found = vec![0; tokens.len() * width * 4];
            table.look_up(&pool, tokens, width * 4, &mut found).unwrap();
            for (&token, found) in tokens.iter().zip(found.chunks_exact(width * 4)) {
                assert_eq!(found, &whole[token as usize * width * 4..][..width * 4], "{token}");
            }
        };
        let check = || {
            // A single row, and enough rows for several threads.
            look_up(&[rows as u32 - 1]);
            look_up(&(0..rows as u32).rev().step_by(3).collect::<Vec<_>>());
        };
        let rest = table.deferred_weights().unwrap();
        check();
        assert_eq!(rest.missing_bytes(), whole.len());
        rest.load().unwrap();
        rest.load().unwrap();
        assert_eq!(rest.missing_bytes(), 0);
        check();
    }

    #[test]
    fn rows_of_another_dtype_are_loaded_at_once() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/mixtral-bf16");
        let checkpoint = Arc::new(Checkpoint::open(folder).unwrap());
        let pool = Arc::new(Pool::new(PoolConfig { threads: 1, ..PoolConfig::default() }).unwrap());
        let ops = Native::open(None, Dtype::F32, &pool).unwrap();
        let table =
            NativeEmbedding::load(&ops, &checkpoint, checkpoint.embedding(), Dtype::F32.into()).unwrap();
        assert_eq!(table.deferred_weights().map(|rest| rest.missing_bytes()), Some(0));
        let floats = remoe_weights::load_floats(&checkpoint, checkpoint.embedding()).unwrap();
        let (rows, width) = table.shape(Dtype::F32);
        assert_eq!((rows * width, table.bytes()), (floats.len(), 4 * floats.len()));
        let mut found = vec![0; width * 4];
        table.look_up(&pool, &[rows as u32 - 1], width * 4, &mut found).unwrap();
        let last: Vec<u8> =
            floats[(rows - 1) * width..].iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(found, last);
    }
}
