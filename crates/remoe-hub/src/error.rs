//! Why bytes cannot be had.

use crate::egress::NotAllowed;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a source or the cache folder does not give a file. Places are named as `--model` names them;
/// no message holds a credential or a signed URL.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The source does not answer, or not as it should, also after several attempts.
    #[error("cannot reach {place}: {problem}; check address and network, or retry later")]
    Unavailable {
        /// Source that was asked for.
        place: String,
        /// Problem of the last attempt.
        problem: String,
    },
    /// Egress rules do not allow the source, or where it leads.
    #[error(
        "cannot fetch {place}: {refused}; add it to --allow-source, in a cluster to sources.allowed or \
         sources.allowedRanges of the chart"
    )]
    NotAllowed {
        /// Source that was asked for.
        place: String,
        /// The host that was to be connected to.
        refused: NotAllowed,
    },
    /// The source does not let us have it.
    #[error("access denied to {place} ({answer}); {advice}")]
    Refused {
        /// Source that was asked for.
        place: String,
        /// Answer of the source.
        answer: String,
        /// Where the credentials come from.
        advice: String,
    },
    /// The source does not have it.
    #[error("{place} does not exist ({answer})")]
    Missing {
        /// Source that was asked for.
        place: String,
        /// Answer of the source.
        answer: String,
    },
    /// The file at the source is no longer the one of which bytes are there already.
    #[error("{place} changed at its source ({change}); restart to use the new version")]
    Changed {
        /// The file.
        place: String,
        /// Difference between the versions.
        change: String,
    },
    /// The server sends whole files only.
    #[error(
        "cannot fetch {place}: the server lacks range requests (206), required above {limit} bytes; use another server"
    )]
    NoRanges {
        /// The file.
        place: String,
        /// The longest file that is read as a whole, in bytes.
        limit: u64,
    },
    /// The source answers something that makes no sense.
    #[error("invalid answer from {place}: {problem}")]
    Answer {
        /// Source that was asked for.
        place: String,
        /// Fault of the answer.
        problem: String,
    },
    /// The bytes are not those that the source promises.
    #[error(
        "checksum mismatch of {place}: expected SHA-256 {expected}, got {found}; removed from the cache, retry"
    )]
    Checksum {
        /// The file.
        place: String,
        /// As the source states it.
        expected: String,
        /// As it is.
        found: String,
    },
    /// Another process holds bytes of the file and makes no progress.
    #[error(
        "cannot fetch {place}: another process holds {} without progress for {seconds} s; stop it",
        cache.display()
    )]
    Stalled {
        /// The file.
        place: String,
        /// The file in the cache.
        cache: PathBuf,
        /// How long nothing came.
        seconds: u64,
    },
    /// The source sends nothing for longer than a setting allows.
    #[error("no byte for {after:?} ({before}): {last}; raise {flag} to wait longer")]
    Silent {
        /// The time that the setting allows.
        after: Duration,
        /// How much arrived before, and at what rate.
        before: String,
        /// The setting.
        flag: &'static str,
        /// Why the last attempt failed.
        last: Box<FetchError>,
    },
    /// The settings of a source cannot be used.
    #[error("{what}: {problem}")]
    Settings {
        /// The variable or argument.
        what: String,
        /// Fault of the setting.
        problem: String,
    },
    /// The cache folder cannot be used.
    #[error("cannot use the model cache {}: {source}", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

impl FetchError {
    pub(crate) fn cache(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Cache { path: path.to_owned(), source }
    }
}

/// [`ErrorKind::TimedOut`] where the same may succeed later, as [`remoe_model::Store`] has it.
impl From<FetchError> for io::Error {
    fn from(error: FetchError) -> Self {
        let kind = match &error {
            FetchError::Unavailable { .. } | FetchError::Stalled { .. } | FetchError::Silent { .. } => {
                ErrorKind::TimedOut
            }
            FetchError::Cache { source, .. } => source.kind(),
            FetchError::Missing { .. } => ErrorKind::NotFound,
            FetchError::Refused { .. } => ErrorKind::PermissionDenied,
            // As sockets report connections that an administrator has prohibited.
            FetchError::NotAllowed { .. } => ErrorKind::HostUnreachable,
            FetchError::Changed { .. }
            | FetchError::NoRanges { .. }
            | FetchError::Answer { .. }
            | FetchError::Checksum { .. }
            | FetchError::Settings { .. } => ErrorKind::InvalidData,
        };
        Self::new(kind, error)
    }
}
