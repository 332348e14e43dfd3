//! What can be wrong with certificates and names.

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
    /// A name that is none of ours.
    #[error("invalid identity {found:?}: expected a name such as spiffe://remoe/NAMESPACE/UID/main")]
    Name {
        /// What stands there.
        found: String,
    },
    /// A certificate has no name of ours, or several.
    #[error("invalid certificate: expected one name spiffe://remoe/.., got {count}")]
    Names {
        /// How many it has.
        count: usize,
    },
    /// A name that is of ours, but not one that can be here.
    #[error("invalid certificate: expected that of {needed}, got that of {found}")]
    Role {
        /// Whose it is.
        found: String,
        /// What is needed.
        needed: &'static str,
    },
}
