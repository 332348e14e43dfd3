//! Settings of the connections to a source.

use crate::egress::Egress;
use crate::timeouts::FetchTimeouts;

/// Limits and rules of a connection to a source.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// Timeouts and retries.
    pub timeouts: FetchTimeouts,
    /// Hosts and addresses that may be connected to.
    pub egress: Egress,
    /// Use of the machine's or pod's credentials is allowed: from a web identity, or a metadata service.
    pub ambient_credentials: bool,
}
