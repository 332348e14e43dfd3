//! Which remote functions answered for which rows of an iteration.

use std::ops::Range;

/// Counts of (token, expert) pairs by link and row.
#[derive(Debug, Default)]
pub(crate) struct Answered {
    rows: usize,
    /// links x rows.
    pairs: Vec<u32>,
}

impl Answered {
    /// Begins an iteration of `rows` rows under a placement with `links` links.
    pub(super) fn begin(&mut self, rows: usize, links: usize) {
        self.rows = rows;
        self.pairs.clear();
        self.pairs.resize(rows * links, 0);
    }

    /// Link `link` has answered for `slots`, of which a row has `top_k`.
    pub(super) fn count(&mut self, link: usize, slots: &[u32], top_k: usize) {
        let first = link * self.rows;
        for slot in slots {
            self.pairs[first + *slot as usize / top_k] += 1;
        }
    }

    /// Pairs of `rows` that link `link` has answered for.
    pub(crate) fn pairs(&self, link: usize, rows: Range<usize>) -> u64 {
        let first = link * self.rows;
        let counts = self.pairs.get(first + rows.start..first + rows.end).unwrap_or_default();
        counts.iter().map(|count| u64::from(*count)).sum()
    }
}
