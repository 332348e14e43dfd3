//! The pages of one sequence.

use super::prefixes::CacheScope;
use super::{PageSet, Pages, pages_of};
use crate::backend::{PAGE_POSITIONS, RELEASED};

/// The pages of one block of positions.
#[derive(Clone)]
pub(crate) struct BlockPages {
    pub(super) whole: PageSet,
    /// Pages of layers that attend to a window, until the window has passed.
    pub(super) windowed: Option<PageSet>,
}

impl BlockPages {
    fn sets(&self) -> impl Iterator<Item = &PageSet> {
        std::iter::once(&self.whole).chain(&self.windowed)
    }

    /// Ids of the pages, one for each page table, of which the first `tables` are wanted.
    fn ids(&self, tables: usize) -> impl Iterator<Item = usize> {
        self.sets().flat_map(|set| set.pages.iter().copied()).chain(std::iter::repeat(RELEASED)).take(tables)
    }

    fn count(&self) -> usize {
        self.sets().map(|set| set.pages.len()).sum()
    }
}

/// The keys and values of one sequence.
pub(crate) struct SequenceCache {
    pub(super) tenant: CacheScope,
    pub(super) blocks: Vec<BlockPages>,
    pub(super) length: usize,
    /// How many of its blocks were kept, from the first on.
    pub(super) kept: usize,
    /// How many of its blocks have no windowed pages any more, from the first on.
    pub(super) released: usize,
}

impl SequenceCache {
    /// Creates the cache of a sequence of `tenant`, without pages.
    pub(crate) fn new(tenant: CacheScope) -> Self {
        Self { tenant, blocks: Vec::new(), length: 0, kept: 0, released: 0 }
    }

    /// Positions that have been forwarded.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Pages that it holds.
    pub(crate) fn pages(&self) -> usize {
        self.blocks.iter().map(BlockPages::count).sum()
    }

    /// Page tables: ids of its pages in order, [`RELEASED`] where it holds none any more.
    pub(crate) fn page_tables(&self) -> Vec<Vec<usize>> {
        let tables = self.blocks.last().map_or(0, BlockPages::count);
        let mut all = vec![Vec::with_capacity(self.blocks.len()); tables];
        for block in &self.blocks {
            all.iter_mut().zip(block.ids(tables)).for_each(|(table, id)| table.push(id));
        }
        all
    }

    /// Blocks whose pages it lacks for `positions` in all.
    pub(crate) fn lacking(&self, positions: usize) -> usize {
        pages_of(positions).saturating_sub(self.blocks.len())
    }

    /// Takes the pages that it lacks for `positions` in all. False where there are not enough.
    pub(crate) fn reserve(&mut self, positions: usize, pages: &mut Pages) -> bool {
        for _ in 0..self.lacking(positions) {
            match pages.take() {
                Some(block) => self.blocks.push(block),
                None => return false,
            }
        }
        true
    }

    /// Lets go of the windowed pages before block `first`.
    pub(super) fn release_before(&mut self, first: usize) {
        let first = first.min(self.blocks.len());
        if let Some(passed) = self.blocks.get_mut(self.released..first) {
            passed.iter_mut().for_each(|block| block.windowed = None);
            self.released = first;
        }
    }

    /// Duplicates the sequence for another continuation. Full pages are shared; of the last ones `copy` takes the
    /// place, and the ids of both, from and to, are returned where they have to be filled.
    pub(crate) fn fork(&self, copy: Option<BlockPages>) -> (Self, Vec<(usize, usize)>) {
        let full = self.length / PAGE_POSITIONS;
        let mut blocks = self.blocks[..full].to_vec();
        let mut copied = Vec::new();
        if let Some((copy, last)) = copy.zip(self.blocks.get(full)) {
            copied.extend(last.ids(last.count()).zip(copy.ids(copy.count())));
            blocks.push(copy);
        }
        let Self { tenant, length, kept, released, .. } = *self;
        (Self { tenant, blocks, length, kept, released }, copied)
    }

    /// Counts `rows` as forwarded, once every layer has their keys and values.
    pub(crate) fn advance(&mut self, rows: usize) {
        self.length += rows;
    }
}
