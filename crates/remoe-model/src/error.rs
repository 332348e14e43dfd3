//! Errors of checkpoints. Each names the file, and the field or tensor, if any.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// Failure to open or read a checkpoint. Every message names the file; [`CheckpointError::field`] returns the config field
/// or the tensor.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system cannot read a file.
    #[error("cannot read {}: {source}{}", path.display(), advice(source))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A store cannot provide a file. Its error names the file.
    #[error("{source}")]
    Store {
        /// The file, or the root of the store.
        path: PathBuf,
        /// Error of the store.
        source: io::Error,
    },
    /// A required file is missing.
    #[error("missing {}: {message}", path.display())]
    MissingFile {
        /// Expected path.
        path: PathBuf,
        /// Remedy.
        message: String,
    },
    /// A file is not valid JSON, or not an object.
    #[error("invalid {}: {message}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The field at which the parser stopped, if known.
        field: Option<String>,
        /// Reason, with the position if the parser knows it.
        message: String,
    },
    /// A field has an invalid value.
    #[error("{}: field `{field}`: {message}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field, with dots between nested names.
        field: String,
        /// Reason, and the expected value.
        message: String,
    },
    /// A field has a valid value that is not supported.
    #[error("{}: field `{field}` is not supported: {message}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The field, with dots between nested names.
        field: String,
        /// Value of the field, and the supported values.
        message: String,
    },
    /// The header of a safetensors file is invalid.
    #[error("{}: {message}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Reason.
        message: String,
    },
    /// The checkpoint lacks a tensor that the model needs.
    #[error("{}: missing tensor `{tensor}`: {message}", path.display())]
    MissingTensor {
        /// The file that should list it: the only safetensors file, or the index.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Expected shape, or the reason why it is needed.
        message: String,
    },
    /// A tensor has the wrong shape, type or position in the file, or is unexpected.
    #[error("{}: tensor `{tensor}`: {message}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Reason, and the expected tensor.
        message: String,
    },
    /// A file was truncated after it was opened, so that a tensor cannot be read.
    #[error(
        "{}: tensor `{tensor}`: truncated at or before byte {at} ({missing} bytes missing): the file changed after \
         it was opened; restore it and restart",
        path.display()
    )]
    ShortRead {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Byte position in the file at or after which it ended.
        at: u64,
        /// Bytes that are missing.
        missing: u64,
    },
    /// A caller requested a layer, expert or range that the checkpoint lacks.
    #[error("{}: {message}", path.display())]
    Request {
        /// The folder of the checkpoint.
        path: PathBuf,
        /// Request, and the available range.
        message: String,
    },
}

impl CheckpointError {
    /// Returns the path of the file or folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Io { path, .. }
            | Self::Store { path, .. }
            | Self::MissingFile { path, .. }
            | Self::Json { path, .. }
            | Self::Field { path, .. }
            | Self::Unsupported { path, .. }
            | Self::Header { path, .. }
            | Self::MissingTensor { path, .. }
            | Self::Tensor { path, .. }
            | Self::ShortRead { path, .. }
            | Self::Request { path, .. } => path,
        }
    }

    /// Returns the config field or the tensor, if any; `credentials` or `source` for errors of a store.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::Field { field, .. } | Self::Unsupported { field, .. } => Some(field),
            Self::MissingTensor { tensor, .. }
            | Self::Tensor { tensor, .. }
            | Self::ShortRead { tensor, .. } => Some(tensor),
            Self::Json { field, .. } => field.as_deref(),
            Self::Store { source, .. } if source.kind() == ErrorKind::PermissionDenied => Some("credentials"),
            Self::Store { source, .. } if source.kind() == ErrorKind::HostUnreachable => Some("source"),
            _ => None,
        }
    }

    /// Reports if a retry may succeed: the store timed out, or the system lacked file descriptors or memory. All other
    /// errors are faults of the checkpoint or of the request.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Store { source, .. } => source.kind() == ErrorKind::TimedOut || shortage(source).is_some(),
            Self::Io { source, .. } => shortage(source).is_some(),
            _ => false,
        }
    }

    pub(crate) fn json(path: &Path, field: Option<String>, message: impl Into<String>) -> Self {
        Self::Json { path: path.to_owned(), field, message: truncated(message, MESSAGE_BYTES) }
    }

    pub(crate) fn field_value(path: &Path, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Field {
            path: path.to_owned(),
            field: truncated(field, NAME_BYTES),
            message: truncated(message, MESSAGE_BYTES),
        }
    }

    pub(crate) fn unsupported(path: &Path, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Unsupported {
            path: path.to_owned(),
            field: truncated(field, NAME_BYTES),
            message: truncated(message, MESSAGE_BYTES),
        }
    }

    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        // Errors of the operating system have no inner error; errors of a store do (see `Store`).
        if source.get_ref().is_some() { Self::Store { path, source } } else { Self::Io { path, source } }
    }

    pub(crate) fn header(path: &Path, message: impl Into<String>) -> Self {
        Self::Header { path: path.to_owned(), message: truncated(message, MESSAGE_BYTES) }
    }

    pub(crate) fn tensor(path: &Path, tensor: &str, message: impl Into<String>) -> Self {
        Self::Tensor {
            path: path.to_owned(),
            tensor: truncated(tensor, NAME_BYTES),
            message: truncated(message, MESSAGE_BYTES),
        }
    }
}

/// Returns a remedy if the system lacked a resource, whatever the file.
fn shortage(error: &io::Error) -> Option<&'static str> {
    // The error of a store may contain the error of the system.
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<io::Error>());
    match Errno::from_io_error(inner.unwrap_or(error))? {
        Errno::MFILE => Some("raise the limit of open files of this process (ulimit -n)"),
        Errno::NFILE => Some("the system has too many open files; retry later"),
        Errno::NOMEM => Some("the system is out of memory; retry later, or raise its limit"),
        _ => None,
    }
}

fn advice(error: &io::Error) -> String {
    shortage(error).map(|advice| format!("; {advice}")).unwrap_or_default()
}

/// Longest name of a field or tensor in an error.
const NAME_BYTES: usize = 200;
/// Longest message of an error.
pub(crate) const MESSAGE_BYTES: usize = 1000;

/// Truncates a text for messages to `limit` bytes: a quotation can be as long as the file.
pub(crate) fn truncated(text: impl Into<String>, limit: usize) -> String {
    let mut text = text.into();
    if text.len() > limit {
        let mut end = limit - '…'.len_utf8();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}
