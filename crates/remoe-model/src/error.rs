//! Errors of checkpoints, always with the file and, where there is one, the field or tensor.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// Why a checkpoint cannot be used. Every message names the file; [`CheckpointError::field`] is the
/// config field or the tensor that it is about.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("cannot read {}: {source}{}", path.display(), advice(source))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The store of the files cannot give one. What it says names the file.
    #[error("{source}")]
    Store {
        /// The file, or the place of all.
        path: PathBuf,
        /// Error of the store.
        source: io::Error,
    },
    /// A file that the checkpoint needs is not there.
    #[error("missing {}: {message}", path.display())]
    MissingFile {
        /// Where the file was expected.
        path: PathBuf,
        /// Remedy.
        message: String,
    },
    /// A file is not the JSON that it should be.
    #[error("invalid {}: {message}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The field at whose value the parser stopped, where there is one.
        field: Option<String>,
        /// Reason, with its position where the parser knows it.
        message: String,
    },
    /// A field has a value that no model can have.
    #[error("{}: field `{field}`: {message}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field, with dots between nested names.
        field: String,
        /// Reason, and the expected value.
        message: String,
    },
    /// A field asks for something that this version does not do.
    #[error("{}: field `{field}` is not supported: {message}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The field, with dots between nested names.
        field: String,
        /// Value of the field, and the supported values.
        message: String,
    },
    /// The header of a safetensors file is not usable.
    #[error("{}: {message}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Reason.
        message: String,
    },
    /// The model needs a tensor that no file of the checkpoint holds.
    #[error("{}: missing tensor `{tensor}`: {message}", path.display())]
    MissingTensor {
        /// The file that should name it: the only safetensors file, or the index.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Why it is needed.
        message: String,
    },
    /// A tensor has the wrong shape, type or place.
    #[error("{}: tensor `{tensor}`: {message}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Reason, and the expected tensor.
        message: String,
    },
    /// The file ended before the tensor did: it became shorter after it was opened.
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
        /// Position in the file at which nothing more was there.
        at: u64,
        /// Bytes that are missing.
        missing: u64,
    },
    /// A caller asked for a layer, expert or range that the checkpoint does not have.
    #[error("{}: {message}", path.display())]
    Request {
        /// The folder of the checkpoint.
        path: PathBuf,
        /// Request, and the available range.
        message: String,
    },
}

impl CheckpointError {
    /// The file or folder that the error is about.
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

    /// The config field or the tensor that the error is about, where there is one; `credentials` where a
    /// store refuses them.
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

    /// Reports if the same may succeed later: the source of the files did not answer, or the system had no file or
    /// memory left to read with. Everything else is a fault of the checkpoint or of the request.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Store { source, .. } => source.kind() == ErrorKind::TimedOut || shortage(source).is_some(),
            Self::Io { source, .. } => shortage(source).is_some(),
            _ => false,
        }
    }

    pub(crate) fn json(path: &Path, field: Option<String>, message: impl Into<String>) -> Self {
        Self::Json { path: path.to_owned(), field, message: shown(message, MESSAGE_BYTES) }
    }

    pub(crate) fn field_value(path: &Path, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Field {
            path: path.to_owned(),
            field: shown(field, NAME_BYTES),
            message: shown(message, MESSAGE_BYTES),
        }
    }

    pub(crate) fn unsupported(path: &Path, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Unsupported {
            path: path.to_owned(),
            field: shown(field, NAME_BYTES),
            message: shown(message, MESSAGE_BYTES),
        }
    }

    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        // An error of the system has nothing inside, see `Store`.
        if source.get_ref().is_some() { Self::Store { path, source } } else { Self::Io { path, source } }
    }

    pub(crate) fn header(path: &Path, message: impl Into<String>) -> Self {
        Self::Header { path: path.to_owned(), message: shown(message, MESSAGE_BYTES) }
    }

    pub(crate) fn tensor(path: &Path, tensor: &str, message: impl Into<String>) -> Self {
        Self::Tensor {
            path: path.to_owned(),
            tensor: shown(tensor, NAME_BYTES),
            message: shown(message, MESSAGE_BYTES),
        }
    }
}

/// Returns the remedy where the system itself was short of a resource, whatever the file is.
fn shortage(error: &io::Error) -> Option<&'static str> {
    // The error of a store may have that of the system inside.
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

/// At most `limit` bytes of a text, for messages: what they quote of a file can be as long as the file.
pub(crate) fn shown(text: impl Into<String>, limit: usize) -> String {
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
