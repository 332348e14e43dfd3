//! Tensors of the CPU backend, in buffers that are reused.

use crate::backend::BackendError;
use remoe_kernels::Dtype;
use std::sync::{Arc, Mutex, PoisonError};

/// Most unused buffers that are kept.
const MAX_UNUSED_BUFFERS: usize = 16;

/// Unused buffers of dropped tensors.
///
/// A fresh buffer costs zeroing and page faults. For a prompt these take as long as some of the operations.
#[derive(Clone, Default)]
pub(super) struct BufferPool(Arc<Mutex<Vec<Vec<u8>>>>);

impl BufferPool {
    /// Returns at least `bytes` bytes of any content: the smallest buffer that fits, but none of over eight times the size.
    fn take(&self, bytes: usize) -> Vec<u8> {
        let mut unused = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |buffer: &Vec<u8>| buffer.len() >= bytes && buffer.len() / 8 <= bytes;
        let fitting = unused.iter().enumerate().filter(|(_, buffer)| fits(buffer));
        let best = fitting.min_by_key(|(_, buffer)| buffer.len()).map(|(index, _)| index);
        match best {
            Some(index) => unused.swap_remove(index),
            None => vec![0; bytes],
        }
    }

    /// Puts `buffer` back. If there are too many, drops the smallest.
    fn put(&self, buffer: Vec<u8>) {
        let mut unused = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        unused.push(buffer);
        if unused.len() > MAX_UNUSED_BUFFERS
            && let Some((smallest, _)) = unused.iter().enumerate().min_by_key(|(_, buffer)| buffer.len())
        {
            unused.swap_remove(smallest);
        }
    }
}

/// A matrix on the host: `rows` x `width` elements of `dtype`, little endian.
pub struct Rows {
    pub(super) dtype: Dtype,
    pub(super) rows: usize,
    pub(super) width: usize,
    buffer: Vec<u8>,
    buffers: BufferPool,
}

impl Rows {
    /// Creates a matrix with arbitrary content.
    pub(super) fn new(buffers: &BufferPool, dtype: Dtype, rows: usize, width: usize) -> Self {
        let buffer = buffers.take(rows * width * dtype.bytes());
        Self { dtype, rows, width, buffer, buffers: buffers.clone() }
    }

    /// Returns the bytes of one row.
    pub(super) fn row_bytes(&self) -> usize {
        self.width * self.dtype.bytes()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[..self.rows * self.row_bytes()]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.rows * self.row_bytes();
        &mut self.buffer[..bytes]
    }

    /// Checks that the matrix has `rows` x `width` elements. `what` names it in the error.
    ///
    /// # Errors
    /// Fails if it has another size.
    pub(super) fn expect(&self, what: &'static str, rows: usize, width: usize) -> Result<(), BackendError> {
        for (actual, expected) in [(self.rows, rows), (self.width, width)] {
            if actual != expected {
                return Err(BackendError::Shape { what, actual, expected });
            }
        }
        Ok(())
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        self.buffers.put(std::mem::take(&mut self.buffer));
    }
}
