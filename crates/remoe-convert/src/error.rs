//! Errors of conversions.

use remoe_model::CheckpointError;
use std::io;
use std::path::{Path, PathBuf};

/// Error of a conversion.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The source checkpoint, or the converted one, is invalid.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// An option does not fit the model.
    #[error("{name} {message}")]
    Option {
        /// Name of the option.
        name: &'static str,
        /// Problem with its value, and the expected value.
        message: String,
    },
    /// The output folder is not empty.
    #[error("cannot write to {}: not an empty folder; use an empty or new folder", .0.display())]
    Occupied(PathBuf),
    /// The output cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// File or folder in the output.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

impl ConvertError {
    /// Returns a closure that converts an I/O error of writing `path`.
    pub(crate) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Write { path: path.to_owned(), source }
    }
}
