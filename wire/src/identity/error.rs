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
    #[error("{what} is not PEM: {reason}")]
    Pem {
        /// The certificate, the key or the authorities.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// The certificate, its key and its authorities do not go together.
    #[error("the certificate cannot be used: {0}")]
    Unusable(String),
    /// A name that is none of ours.
    #[error("{found:?} is no name of a Remoe process, such as spiffe://remoe/NAMESPACE/UID/main")]
    Name {
        /// What stands there.
        found: String,
    },
    /// A certificate has no name of ours, or several.
    #[error("the certificate has {count} names spiffe://remoe/..; exactly one is needed")]
    Names {
        /// How many it has.
        count: usize,
    },
    /// A name that is of ours, but not one that can be here.
    #[error("the certificate is that of {found}, which is no {needed}")]
    Role {
        /// Whose it is.
        found: String,
        /// What is needed.
        needed: &'static str,
    },
}
