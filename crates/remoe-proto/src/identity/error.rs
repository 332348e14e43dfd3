//! Errors of certificates and names.

use std::io;
use std::path::PathBuf;

/// Why an identity cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A part of a certificate's files cannot be read.
    #[error("cannot parse {what} as PEM: {reason}")]
    Pem {
        /// The certificate, the key or the authorities.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// The certificate, its key and its authorities do not go together.
    #[error("cannot use the certificate: {0}")]
    Unusable(String),
    /// A name that is not an identity of Remoe.
    #[error("invalid identity {found:?}: expected a name such as spiffe://remoe/NAMESPACE/UID/main")]
    Name {
        /// Name that was found.
        found: String,
    },
    /// A certificate has no name that is an identity of Remoe, or several.
    #[error("invalid certificate: expected one name spiffe://remoe/.., got {count}")]
    Names {
        /// Number of such names.
        count: usize,
    },
    /// An identity of Remoe, but not of a role that is expected here.
    #[error("invalid certificate: expected that of {needed}, got that of {found}")]
    Role {
        /// Identity that was found.
        found: String,
        /// Role that is needed.
        needed: &'static str,
    },
}
