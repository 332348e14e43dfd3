//! One error for a program that people read: what was being done, and why it did not work.

use std::fmt::Display;

/// An error: what was being done and why it failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{doing}: {why}")]
pub(crate) struct BenchError {
    doing: String,
    why: String,
}

/// The result of everything here that can fail.
pub(crate) type Result<T> = std::result::Result<T, BenchError>;

impl BenchError {
    pub(crate) fn new(doing: impl Into<String>, why: impl Display) -> Self {
        Self { doing: doing.into(), why: why.to_string() }
    }
}

/// Says what was being done when something failed or was missing.
pub(crate) trait ErrorContext<T> {
    /// `doing` is only called for a failure.
    fn doing<D: Into<String>>(self, doing: impl FnOnce() -> D) -> Result<T>;
}

impl<T, E: Display> ErrorContext<T> for std::result::Result<T, E> {
    fn doing<D: Into<String>>(self, doing: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|error| BenchError::new(doing(), error))
    }
}

impl<T> ErrorContext<T> for Option<T> {
    fn doing<D: Into<String>>(self, doing: impl FnOnce() -> D) -> Result<T> {
        self.ok_or_else(|| BenchError::new(doing(), "missing"))
    }
}
