//! Which rows of a matrix.

use crate::library::{Tensor, TorchDevice};
use main_model_fn::backend::BackendError;
use std::sync::Arc;

/// Some rows of tensors with the same rows.
pub(crate) enum Rows {
    /// So many from one on: a view.
    Following(i64, i64),
    /// Their numbers.
    Index(Tensor),
}

impl Rows {
    pub(crate) fn new(device: &Arc<TorchDevice>, rows: &[i64]) -> Result<Self, BackendError> {
        let first = rows.first().copied().unwrap_or(0);
        if rows.iter().zip(first..).all(|(&row, expected)| row == expected) {
            return Ok(Self::Following(first, rows.len() as i64));
        }
        Ok(Self::Index(Tensor::from_slice(device, rows)?))
    }

    pub(crate) fn of(&self, all: &Tensor) -> Result<Tensor, BackendError> {
        match self {
            Self::Following(0, count) if all.size().first() == Some(count) => Ok(all.alias()),
            Self::Following(first, count) => all.narrow(0, *first, *count),
            Self::Index(rows) => all.index_select(0, rows),
        }
    }
}
