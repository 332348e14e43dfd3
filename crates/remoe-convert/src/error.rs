//! Why a checkpoint was not converted.

use remoe_model::CheckpointError;
use std::io;
use std::path::{Path, PathBuf};

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// What is converted, or what came of it, is no checkpoint that can be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// An option does not fit the model.
    #[error("{name} {message}")]
    Option {
        /// The option.
        name: &'static str,
        /// What is wrong with its value, and what was expected.
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
        /// What the system said.
        source: io::Error,
    },
}

impl ConvertError {
    /// What the system said when `path` was written.
    pub(crate) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Write { path: path.to_owned(), source }
    }
}
