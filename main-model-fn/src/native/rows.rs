//! Rows of elements on the host, in memory that is used again.

use crate::backend::BackendError;
use remoe_kernels::Dtype;
use std::sync::{Arc, Mutex, PoisonError};

/// Buffers that are kept for the next tensor at most.
const SPARE: usize = 16;

/// Memory of tensors that are gone. A fresh buffer costs the kernel's zeroes and its page faults, which for a prompt
/// is as much as some of the operations.
#[derive(Clone, Default)]
pub(super) struct BufferPool(Arc<Mutex<Vec<Vec<u8>>>>);

impl BufferPool {
    /// At least `bytes` of any content: the smallest that is long enough, but none that is far too long.
    fn take(&self, bytes: usize) -> Vec<u8> {
        let mut spare = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |buffer: &Vec<u8>| buffer.len() >= bytes && buffer.len() / 8 <= bytes;
        let fitting = spare.iter().enumerate().filter(|(_, buffer)| fits(buffer));
        let best = fitting.min_by_key(|(_, buffer)| buffer.len()).map(|(index, _)| index);
        match best {
            Some(index) => spare.swap_remove(index),
            None => vec![0; bytes],
        }
    }

    /// Keeps `buffer`, or the larger ones where there are many.
    fn give(&self, buffer: Vec<u8>) {
        let mut spare = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        spare.push(buffer);
        if spare.len() > SPARE
            && let Some((least, _)) = spare.iter().enumerate().min_by_key(|(_, buffer)| buffer.len())
        {
            spare.swap_remove(least);
        }
    }
}

/// A matrix of rows.
pub struct Rows {
    pub(super) dtype: Dtype,
    pub(super) rows: usize,
    pub(super) width: usize,
    buffer: Vec<u8>,
    home: BufferPool,
}

impl Rows {
    /// Rows of any content.
    pub(super) fn new(home: &BufferPool, dtype: Dtype, rows: usize, width: usize) -> Self {
        let buffer = home.take(rows * width * dtype.bytes());
        Self { dtype, rows, width, buffer, home: home.clone() }
    }

    /// Bytes of a row.
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

    /// # Errors
    /// Rows of another size than `rows` x `width`.
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
        self.home.give(std::mem::take(&mut self.buffer));
    }
}
