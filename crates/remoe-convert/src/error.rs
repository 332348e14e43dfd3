//! Why a checkpoint was not converted.

use remoe_model::CheckpointError;
use std::io;
use std::path::{Path, PathBuf};

/// Error of a conversion.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The checkpoint to convert, or the resulting one, cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// An option does not fit the model.
    #[error("{name} {message}")]
    Option {
        /// The option.
        name: &'static str,
        /// Problem with its value, and the expected value.
        message: String,
    },
    /// There is something where the result should go.
    #[error("cannot write to {}: not an empty folder; use an empty or new folder", .0.display())]
    Occupied(PathBuf),
    /// The result cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file or folder.
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
