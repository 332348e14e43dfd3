//! Errors of certificates and identities.

use std::io;
use std::path::PathBuf;

/// Reason that an identity cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A file is not valid PEM.
    #[error("cannot parse {what} as PEM: {reason}")]
    Pem {
        /// Description of the file.
        what: &'static str,
        /// Cause.
        reason: String,
    },
    /// The certificate, its key and the authorities do not match.
    #[error("cannot use the certificate: {0}")]
    Unusable(String),
    /// A name is not an identity of Remoe.
    #[error("invalid identity {found:?}: expected a name such as spiffe://remoe/NAMESPACE/UID/main")]
    Name {
        /// Name that was found.
        found: String,
    },
    /// The certificate does not have exactly one identity of Remoe.
    #[error("invalid certificate: expected one name spiffe://remoe/.., got {count}")]
    Names {
        /// Number of such names.
        count: usize,
    },
    /// The certificate has another role than required.
    #[error("invalid certificate: expected that of {needed}, got that of {found}")]
    Role {
        /// Identity that was found.
        found: String,
        /// Role that is needed.
        needed: &'static str,
    },
}
