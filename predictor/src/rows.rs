//! Matrix of float32 rows, which may borrow the bytes of a file.

use crate::error::PredictError;
use bytes::Bytes;
use zerocopy::{FromBytes, IntoBytes};

/// Rows of equal width.
///
/// Rows that come from a file stay in the bytes they were read (or mapped) into; the first change
/// copies them.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    width: usize,
    values: Values,
}

#[derive(Debug, Clone)]
enum Values {
    Owned(Vec<f32>),
    /// Aligned for float32, little-endian, a whole number of them.
    Shared(Bytes),
}

impl Rows {
    pub(crate) fn new(width: usize) -> Self {
        Self { width, values: Values::Owned(Vec::new()) }
    }

    pub(crate) fn from_values(width: usize, values: Vec<f32>) -> Self {
        Self { width, values: Values::Owned(values) }
    }

    /// Rows in `bytes`; they are copied only where `bytes` is not aligned.
    pub(crate) fn from_bytes(what: &'static str, width: usize, bytes: Bytes) -> Result<Self, PredictError> {
        if !bytes.len().is_multiple_of(width * 4) {
            let expected = bytes.len().next_multiple_of(width.max(1) * 4);
            return Err(PredictError::Size { what, expected, found: bytes.len() });
        }
        let values = if <[f32]>::ref_from_bytes(&bytes).is_ok() {
            Values::Shared(bytes)
        } else {
            Values::Owned(bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect())
        };
        Ok(Self { width, values })
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }

    pub(crate) fn len(&self) -> usize {
        self.values().len() / self.width.max(1)
    }

    pub(crate) fn values(&self) -> &[f32] {
        match &self.values {
            Values::Owned(values) => values,
            // The constructor checked the alignment.
            Values::Shared(bytes) => <[f32]>::ref_from_bytes(bytes).unwrap_or_default(),
        }
    }

    pub(crate) fn row(&self, index: usize) -> &[f32] {
        let start = index * self.width;
        self.values().get(start..start + self.width).unwrap_or_default()
    }

    /// Returns the rows of `indices` alone, in that order.
    pub(crate) fn gather(&self, indices: &[u32]) -> Self {
        let mut values = Vec::with_capacity(indices.len() * self.width);
        indices.iter().for_each(|&index| values.extend_from_slice(self.row(index as usize)));
        Self::from_values(self.width, values)
    }

    /// Writes row `index`, which may be one beyond the last.
    pub(crate) fn set(&mut self, index: usize, row: &[f32]) {
        if let Values::Shared(_) = self.values {
            self.values = Values::Owned(self.values().to_vec());
        }
        let (start, end) = (index * self.width, (index + 1) * self.width);
        if let Values::Owned(values) = &mut self.values {
            if values.len() < end {
                values.resize(end, 0.0);
            }
            if let Some(target) = values.get_mut(start..end) {
                target.copy_from_slice(row);
            }
        }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.values().as_bytes()
    }

    pub(crate) fn bytes(&self) -> u64 {
        size_of_val(self.values()) as u64
    }
}
