//! Rows of requests in forwards and in layered prefills.

use crate::transformer::{OutputRows, Segment};
use std::ops::Range;

/// Rows of one request in a layered prefill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PrefillRows {
    /// Id of the prefill.
    pub(super) id: u64,
    /// Number of rows of each sequence.
    pub(super) rows: Vec<usize>,
}

/// One request's share of the rows of a forward.
pub(crate) struct RowShare {
    /// Index of the request's first row.
    pub(crate) first_row: usize,
    /// Number of rows.
    pub(crate) rows: usize,
    /// Number of rows whose logits are computed.
    pub(crate) logits: usize,
    /// Number of rows whose hidden states are computed.
    pub(crate) states: usize,
}

impl RowShare {
    /// Returns the share of a request with these `segments`.
    pub(crate) fn new(segments: &[Segment<'_>], first_row: usize) -> Self {
        let mut share = Self { first_row, rows: 0, logits: 0, states: 0 };
        for Segment { tokens, wanted, .. } in segments {
            share.rows += tokens.len();
            match wanted {
                OutputRows::None => (),
                OutputRows::Last | OutputRows::Largest(_) => share.logits += 1,
                OutputRows::All => share.logits += tokens.len(),
                OutputRows::States => share.states += tokens.len(),
            }
        }
        share
    }

    /// Returns the range of the request's rows.
    pub(crate) fn range(&self) -> Range<usize> {
        self.first_row..self.first_row + self.rows
    }
}
