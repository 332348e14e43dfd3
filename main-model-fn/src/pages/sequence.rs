//! The pages of one sequence.

use super::prefixes::Tenant;
use super::{Page, Pages, pages_of};
use crate::backend::PAGE_POSITIONS;

/// The keys and values of one sequence.
pub(crate) struct SequenceCache {
    pub(super) tenant: Tenant,
    pub(super) pages: Vec<Page>,
    pub(super) length: usize,
    /// How many of its pages were kept, from the first on.
    pub(super) kept: usize,
}

impl SequenceCache {
    /// Of a sequence of `tenant`, without pages.
    pub(crate) fn new(tenant: Tenant) -> Self {
        Self { tenant, pages: Vec::new(), length: 0, kept: 0 }
    }

    /// Positions that have been forwarded.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Pages that it holds.
    pub(crate) fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Their numbers, in order.
    pub(crate) fn page_ids(&self) -> Vec<usize> {
        self.pages.iter().map(|page| page.id).collect()
    }

    /// Pages that it lacks for `positions` in all.
    pub(crate) fn lacking(&self, positions: usize) -> usize {
        pages_of(positions).saturating_sub(self.pages.len())
    }

    /// Takes the pages that it lacks for `positions` in all. False where there are not enough.
    pub(crate) fn reserve(&mut self, positions: usize, pages: &mut Pages) -> bool {
        for _ in 0..self.lacking(positions) {
            match pages.take() {
                Some(page) => self.pages.push(page),
                None => return false,
            }
        }
        true
    }

    /// The same sequence a second time, for another continuation. Full pages are shared; of the last one `copy` takes
    /// the place, and both numbers, from and to, are returned where it has to be filled.
    pub(crate) fn fork(&self, copy: Option<Page>) -> (Self, Option<(usize, usize)>) {
        let full = self.length / PAGE_POSITIONS;
        let mut pages = self.pages[..full].to_vec();
        let copied = copy.zip(self.pages.get(full)).map(|(copy, last)| {
            let ids = (last.id, copy.id);
            pages.push(copy);
            ids
        });
        (Self { tenant: self.tenant, pages, length: self.length, kept: self.kept }, copied)
    }

    /// Counts `rows` as forwarded, once every layer has their keys and values.
    pub(crate) fn advance(&mut self, rows: usize) {
        self.length += rows;
    }
}
