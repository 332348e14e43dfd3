//! Identities of processes: names in certificates, and connections that verify them at both ends (invariant 10 of
//! ARCHITECTURE.md).
//!
//! Every process has a certificate with one name of the form `spiffe://remoe/..`, its [`Identity`]. Both ends of a
//! connection present certificates of the same authority, and each checks the other's name after the handshake
//! ([`Trust`]). Certificate files are reloaded when they change ([`Keyring`]): new connections use the present files,
//! open ones are unaffected.

mod connect;
mod credentials;
mod error;
mod keyring;
mod name;
mod public;
mod refusal;
mod tls_stream;

pub use connect::{Connector, Counterpart, Protocol, Trust};
pub use credentials::Credentials;
pub use error::IdentityError;
pub use keyring::{CERTIFICATE, CERTIFICATES_OF_AUTHORITIES, KEY, Keyring};
pub use name::Identity;
pub use public::PublicCertificate;
pub use refusal::is_refusal;
pub use tls_stream::MaybeTlsStream;

pub(crate) use connect::{HANDSHAKE_LIMIT, PeerIdentities};
