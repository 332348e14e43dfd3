//! Identities of processes: names in certificates, and connections that verify them.
//!
//! Every process has a certificate whose one name of the form `spiffe://remoe/..` says what it is
//! ([`Identity`]). Both ends of a connection show theirs, signed by the same authority, and each looks at the
//! other's name after the handshake ([`Trust`]). Files are read again when they change ([`Keyring`]):
//! connections that stand are left alone, new ones use what is there by then, and whom it belongs to.

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
