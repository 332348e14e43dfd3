//! Selection of rows of a tensor.

use crate::library::{Tensor, TorchDevice};
use main_model_fn::backend::BackendError;
use std::sync::Arc;

/// Row numbers, for all tensors with the same rows.
pub(crate) enum RowSelection {
    /// Consecutive rows, which are selected as a view.
    Range { first: i64, count: i64 },
    /// Row numbers on the device.
    Index(Tensor),
}

impl RowSelection {
    pub(crate) fn new(device: &Arc<TorchDevice>, rows: &[i64]) -> Result<Self, BackendError> {
        let first = rows.first().copied().unwrap_or(0);
        if rows.iter().zip(first..).all(|(&row, expected)| row == expected) {
            return Ok(Self::Range { first, count: rows.len() as i64 });
        }
        Ok(Self::Index(Tensor::from_slice(device, rows)?))
    }

    /// Returns the selected rows of `tensor`.
    pub(crate) fn select(&self, tensor: &Tensor) -> Result<Tensor, BackendError> {
        match self {
            Self::Range { first: 0, count } if tensor.size().first() == Some(count) => Ok(tensor.alias()),
            Self::Range { first, count } => tensor.narrow(0, *first, *count),
            Self::Index(rows) => tensor.index_select(0, rows),
        }
    }
}
