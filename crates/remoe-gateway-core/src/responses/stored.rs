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
    /// Name of its tenant.
    pub(super) tenant: Arc<str>,
    /// Time when it was stored, in nanoseconds since 1970; later for each.
    pub(super) at: u64,
    /// Items up to and with its output: a JSON list without brackets.
    pub(super) items: Arc<str>,
    /// Body as its client got it.
    pub(crate) response: Bytes,
}

impl StoredResponse {
    /// Returns the size that counts against [`ResponseLimits::bytes`].
    pub(super) fn bytes(&self) -> usize {
        self.items.len() + self.response.len()
    }
}
