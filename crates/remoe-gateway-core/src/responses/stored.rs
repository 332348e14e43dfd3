//! Stored responses and their bounds.

use bytes::Bytes;
use std::sync::Arc;

/// Bounds of a response store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponseLimits {
    /// Largest number of stored responses.
    pub responses: usize,
    /// Largest size of all of them in bytes.
    pub bytes: usize,
}

impl Default for ResponseLimits {
    /// Returns 4,096 responses, 64 MiB.
    fn default() -> Self {
        Self { responses: 4096, bytes: 64 << 20 }
    }
}

/// A stored response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredResponse {
    /// Name of the tenant.
    pub(super) tenant: Arc<str>,
    /// Time when it was stored, in nanoseconds since 1970. Unique in a store.
    pub(super) at: u64,
    /// All items up to and including its output, as a JSON list without brackets.
    pub(super) items: Arc<str>,
    /// Body as the client got it.
    pub(crate) response: Bytes,
}

impl StoredResponse {
    /// Returns the size that counts against [`ResponseLimits::bytes`].
    pub(super) fn bytes(&self) -> usize {
        self.items.len() + self.response.len()
    }
}
