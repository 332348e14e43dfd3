//! Limits and rules of a connection to a source.

use crate::egress::Egress;
use crate::timeouts::FetchTimeouts;

/// Limits and rules of a connection to a source.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// Limits of waiting.
    pub patience: FetchTimeouts,
    /// Hosts and addresses that may be connected to.
    pub egress: Egress,
    /// Credentials of the machine or pod may be asked for: a web identity, or a metadata service.
    pub ambient_credentials: bool,
}
