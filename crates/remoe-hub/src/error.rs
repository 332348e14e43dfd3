//! Errors of the fetcher.

use crate::egress::NotAllowed;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Error of a source or of the cache folder. Locations have the form of `--model`. Messages never contain credentials
/// or signed URLs.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// All attempts to reach the source failed.
    #[error("cannot reach {location}: {problem}; check address and network, or retry later")]
    Unavailable {
        /// Source that was asked for.
        location: String,
        /// Cause of the last attempt's failure.
        problem: String,
    },
    /// Egress rules do not allow the source, or a target of its redirects.
    #[error(
        "cannot fetch {location}: {refused}; add it to --allow-source, in a cluster to sources.allowed or \
         sources.allowedRanges of the chart"
    )]
    NotAllowed {
        /// Source that was asked for.
        location: String,
        /// Refused host.
        refused: NotAllowed,
    },
    /// The source denies access.
    #[error("access denied to {location} ({answer}); {advice}")]
    Refused {
        /// Source that was asked for.
        location: String,
        /// Status and error text of the source.
        answer: String,
        /// Remedy, with the variables that set the credentials.
        advice: String,
    },
    /// The source does not have the file or revision.
    #[error("{location} does not exist ({answer})")]
    Missing {
        /// Source that was asked for.
        location: String,
        /// Status and error text of the source.
        answer: String,
    },
    /// The file changed at its source after some of its bytes were cached.
    #[error("{location} changed at its source ({change}); restart to use the new version")]
    Changed {
        /// The file.
        location: String,
        /// Difference between the versions.
        change: String,
    },
    /// The server does not support range requests, and the file is too large to be fetched whole.
    #[error(
        "cannot fetch {location}: the server lacks range requests (206), required above {limit} bytes; use another server"
    )]
    NoRanges {
        /// The file.
        location: String,
        /// Size limit of files that are fetched whole, in bytes.
        limit: u64,
    },
    /// The source's response violates its protocol.
    #[error("invalid answer from {location}: {problem}")]
    InvalidResponse {
        /// Source that was asked for.
        location: String,
        /// Fault of the response.
        problem: String,
    },
    /// The fetched file does not have the checksum that the source states.
    #[error(
        "checksum mismatch of {location}: expected SHA-256 {expected}, got {found}; removed from the cache, retry"
    )]
    Checksum {
        /// The file.
        location: String,
        /// SHA-256 that the source states, in hexadecimal.
        expected: String,
        /// SHA-256 of the fetched file, in hexadecimal.
        found: String,
    },
    /// Another process holds the lock on bytes of the file, and makes no progress.
    #[error(
        "cannot fetch {location}: another process holds {} without progress for {seconds} s; stop it",
        cache.display()
    )]
    Stalled {
        /// The file.
        location: String,
        /// Path of the file in the cache.
        cache: PathBuf,
        /// Time without progress.
        seconds: u64,
    },
    /// The source sent nothing for longer than the stall limit.
    #[error("no byte for {after:?} ({before}): {last}; raise {flag} to wait longer")]
    Silent {
        /// Stall limit.
        after: Duration,
        /// Bytes that arrived before, and their rate, as a phrase.
        before: String,
        /// Flag that sets the limit.
        flag: &'static str,
        /// Error of the last attempt.
        last: Box<FetchError>,
    },
    /// A setting is invalid, or the fetcher cannot start with it.
    #[error("{what}: {problem}")]
    Settings {
        /// Variable, argument or failed action.
        what: String,
        /// Fault, with the expected value.
        problem: String,
    },
    /// The cache folder cannot be used.
    #[error("cannot use the model cache {}: {source}", path.display())]
    Cache {
        /// File or folder in the cache.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

impl FetchError {
    pub(crate) fn cache(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Cache { path: path.to_owned(), source }
    }
}

/// Maps errors that may pass to [`ErrorKind::TimedOut`], as the contract of [`remoe_model::Store`] requires.
impl From<FetchError> for io::Error {
    fn from(error: FetchError) -> Self {
        let kind = match &error {
            FetchError::Unavailable { .. } | FetchError::Stalled { .. } | FetchError::Silent { .. } => {
                ErrorKind::TimedOut
            }
            FetchError::Cache { source, .. } => source.kind(),
            FetchError::Missing { .. } => ErrorKind::NotFound,
            FetchError::Refused { .. } => ErrorKind::PermissionDenied,
            // The error that sockets report for administratively prohibited connections.
            FetchError::NotAllowed { .. } => ErrorKind::HostUnreachable,
            FetchError::Changed { .. }
            | FetchError::NoRanges { .. }
            | FetchError::InvalidResponse { .. }
            | FetchError::Checksum { .. }
            | FetchError::Settings { .. } => ErrorKind::InvalidData,
        };
        Self::new(kind, error)
    }
}
