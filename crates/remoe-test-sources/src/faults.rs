//! Faults that a server shows on request.

use std::collections::BTreeSet;

/// Faults of a server; the default is none.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Answers break off after this many bytes.
    pub cut_after: Option<u64>,
    /// How many further answers break off; the ones behind them are whole.
    pub cuts: usize,
    /// Files that are not there.
    pub absent: BTreeSet<String>,
    /// Ranges are not understood: every answer is the whole file.
    pub no_ranges: bool,
    /// Bytes per second of one answer.
    pub bytes_per_second: Option<u64>,
    /// Answers stop after their first bytes, without an end.
    pub hang: bool,
    /// How many further requests are answered with [`Self::status`].
    pub failures: usize,
    /// The status of failures; 503 where it is 0.
    pub status: u16,
    /// Part of all ETags: another one is another version.
    pub version: u64,
    /// Neither ETag nor date is told.
    pub no_validators: bool,
    /// Signed URLs, which the hub redirects to, hold for this many requests; 0: forever.
    pub uses_of_signed_urls: usize,
}
