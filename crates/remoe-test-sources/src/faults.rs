//! Faults that tests inject into a server.

use std::collections::BTreeSet;

/// Faults of a server. The default is no fault.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Bytes after which a response breaks off.
    pub cut_after: Option<u64>,
    /// Number of further responses that break off.
    pub cuts: usize,
    /// Files that are treated as missing.
    pub absent: BTreeSet<String>,
    /// Range requests are ignored: every response contains the whole file.
    pub no_ranges: bool,
    /// Rate of each response. `None`: unlimited.
    pub bytes_per_second: Option<u64>,
    /// Responses hang after their first chunk.
    pub hang: bool,
    /// Number of further requests that fail with [`Self::status`].
    pub failures: usize,
    /// Status of failures. 0 stands for 503.
    pub status: u16,
    /// Part of all ETags. Changing it simulates a changed file.
    pub version: u64,
    /// ETag and date are not sent.
    pub no_validators: bool,
    /// Number of requests for which the hub's signed URLs are valid. 0: unlimited.
    pub uses_of_signed_urls: usize,
}
