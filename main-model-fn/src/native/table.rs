//! A table of which an answer uses a few rows of many: they are looked up in the checkpoint until all are in memory, so
//! that the first answer does not wait for the rest.

use crate::backend::Rest;
use remoe_model::{Checkpoint, CheckpointError, StoredAs, TensorRef};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Bytes that come in one piece in the time in which a disk or a network finds a row: rows that cost as much as the whole
/// table are looked up no more, it is read.
const SEEK_BYTES: usize = 128 << 10;

/// The rows of a tensor, as they are stored.
pub struct Table {
    checkpoint: Arc<Checkpoint>,
    tensor: TensorRef,
    rows: usize,
    row_bytes: usize,
    whole: OnceLock<Vec<u8>>,
    /// Held by whoever reads all of it.
    reading: Mutex<()>,
    /// Rows that were asked for before it was there, and so many of them that all are read.
    asked: AtomicUsize,
    many: usize,
}

impl Table {
    /// Whether the rows of `tensor` lie in the checkpoint one after the other, as elements of its type.
    pub(super) fn can_have(tensor: &TensorRef) -> bool {
        tensor.stored == StoredAs::Plain && tensor.strides.is_none()
    }

    /// The rows of `tensor`, none of which is read yet.
    pub(super) fn new(checkpoint: &Arc<Checkpoint>, tensor: &TensorRef) -> Self {
        let rows = tensor.shape.first().copied().unwrap_or(0);
        let bytes = tensor.bytes as usize;
        Self {
            rows,
            row_bytes: bytes / rows.max(1),
            many: bytes.div_ceil(SEEK_BYTES),
            checkpoint: checkpoint.clone(),
            tensor: tensor.clone(),
            whole: OnceLock::new(),
            reading: Mutex::default(),
            asked: AtomicUsize::new(0),
        }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes of memory that it takes when it is there.
    pub(super) fn bytes(&self) -> usize {
        self.rows * self.row_bytes
    }

    /// Writes the rows `tokens`, each of which there is, to `to`.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    pub(super) fn look_up(&self, tokens: &[u32], to: &mut [u8]) -> Result<(), CheckpointError> {
        if self.whole.get().is_none() {
            let before = self.asked.fetch_add(tokens.len(), Ordering::Relaxed);
            if before + tokens.len() >= self.many {
                self.read()?;
            }
        }
        let rows = tokens.iter().map(|&token| token as usize).zip(to.chunks_exact_mut(self.row_bytes));
        if let Some(whole) = self.whole.get() {
            for (row, to) in rows {
                to.copy_from_slice(&whole[row * self.row_bytes..][..self.row_bytes]);
            }
            return Ok(());
        }
        let row_bytes = self.row_bytes as u64;
        for (row, to) in rows {
            let first = row as u64 * row_bytes;
            self.checkpoint.read_into(&self.tensor, first..first + row_bytes, to)?;
        }
        Ok(())
    }
}

impl Rest for Table {
    fn missing_bytes(&self) -> usize {
        if self.whole.get().is_some() { 0 } else { self.bytes() }
    }

    fn read(&self) -> Result<(), CheckpointError> {
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        if self.whole.get().is_none() {
            let whole = self.checkpoint.read(&self.tensor)?;
            // Nobody else sets it meanwhile.
            let _first = self.whole.set(whole);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use super::*;
    use std::path::Path;

    fn table(many: usize) -> Table {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/mixtral-basic");
        let checkpoint = Arc::new(Checkpoint::open(folder).unwrap());
        Table { many, ..Table::new(&checkpoint, checkpoint.embedding()) }
    }

    #[test]
    fn rows_are_the_same_before_and_after_the_table_is_read() {
        let table = table(usize::MAX);
        let tokens: Vec<u32> = (0..table.rows() as u32).rev().step_by(3).collect();
        let look_up = || {
            let mut rows = vec![0; tokens.len() * table.row_bytes()];
            table.look_up(&tokens, &mut rows).unwrap();
            rows
        };
        let before = look_up();
        assert_eq!(table.missing_bytes(), table.bytes());
        table.read().unwrap();
        table.read().unwrap();
        assert_eq!(table.missing_bytes(), 0);
        assert_eq!(look_up(), before);
        let whole = table.checkpoint.read(&table.tensor).unwrap();
        assert_eq!(table.bytes(), whole.len());
        let last = tokens[0] as usize * table.row_bytes();
        assert_eq!(before[..table.row_bytes()], whole[last..]);
    }

    #[test]
    fn whoever_looks_up_many_rows_has_all_of_them_read() {
        let table = table(5);
        for (asked, is_there) in [(2, false), (2, false), (1, true), (1, true)] {
            table.look_up(&vec![7; asked], &mut vec![0; asked * table.row_bytes()]).unwrap();
            assert_eq!(table.whole.get().is_some(), is_there);
        }
    }
}
