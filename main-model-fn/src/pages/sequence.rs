//! KV cache pages of one sequence.

use super::prefix_cache::CacheScope;
use super::{KvPagePool, PageSet, pages_of};
use crate::backend::{PAGE_POSITIONS, RELEASED_PAGE};

/// Pages of one block of positions.
#[derive(Clone)]
pub(crate) struct BlockPages {
    pub(super) whole: PageSet,
    /// Pages of layers with sliding-window attention; `None` once the window has passed.
    pub(super) windowed: Option<PageSet>,
}

impl BlockPages {
    fn sets(&self) -> impl Iterator<Item = &PageSet> {
        std::iter::once(&self.whole).chain(&self.windowed)
    }

    /// Returns the ids of the block's pages for the first `tables` page tables, [`RELEASED_PAGE`] for released ones.
    fn ids(&self, tables: usize) -> impl Iterator<Item = usize> {
        let held = self.sets().flat_map(|set| set.pages.iter().copied());
        held.chain(std::iter::repeat(RELEASED_PAGE)).take(tables)
    }

    fn count(&self) -> usize {
        self.sets().map(|set| set.pages.len()).sum()
    }
}

/// Copy of one page's keys and values that a fork needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageCopy {
    pub(crate) from: usize,
    pub(crate) to: usize,
}

/// KV cache of one sequence.
pub(crate) struct SequenceCache {
    pub(super) scope: CacheScope,
    pub(super) blocks: Vec<BlockPages>,
    /// Positions that have been forwarded.
    pub(super) length: usize,
    /// Number of its first blocks that are in the prefix cache.
    pub(super) cached_blocks: usize,
    /// Number of its first blocks whose windowed pages are released.
    pub(super) released_blocks: usize,
}

impl SequenceCache {
    /// Creates the cache of a sequence in `scope`, without pages.
    pub(crate) fn new(scope: CacheScope) -> Self {
        Self { scope, blocks: Vec::new(), length: 0, cached_blocks: 0, released_blocks: 0 }
    }

    /// Returns the number of positions that have been forwarded.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Returns the number of pages that the sequence holds.
    pub(crate) fn pages(&self) -> usize {
        self.blocks.iter().map(BlockPages::count).sum()
    }

    /// Returns the page tables: page ids by table and block, [`RELEASED_PAGE`] for released pages.
    pub(crate) fn page_tables(&self) -> Vec<Vec<usize>> {
        let tables = self.blocks.last().map_or(0, BlockPages::count);
        let mut all = vec![Vec::with_capacity(self.blocks.len()); tables];
        for block in &self.blocks {
            all.iter_mut().zip(block.ids(tables)).for_each(|(table, id)| table.push(id));
        }
        all
    }

    /// Returns the number of blocks to allocate until the sequence has pages for `positions` positions.
    pub(crate) fn missing_blocks(&self, positions: usize) -> usize {
        pages_of(positions).saturating_sub(self.blocks.len())
    }

    /// Allocates the blocks that are missing for `positions` positions. Returns false if the pool cannot free enough.
    pub(crate) fn reserve(&mut self, positions: usize, pages: &mut KvPagePool) -> bool {
        for _ in 0..self.missing_blocks(positions) {
            match pages.allocate_block() {
                Some(block) => self.blocks.push(block),
                None => return false,
            }
        }
        true
    }

    /// Releases the windowed pages of all blocks before block `first`.
    pub(super) fn release_before(&mut self, first: usize) {
        let first = first.min(self.blocks.len());
        if let Some(passed) = self.blocks.get_mut(self.released_blocks..first) {
            passed.iter_mut().for_each(|block| block.windowed = None);
            self.released_blocks = first;
        }
    }

    /// Forks the sequence for another choice. Full pages are shared; `copy` replaces the last block if it is not full.
    ///
    /// Returns the fork and the page contents that the caller must copy.
    pub(crate) fn fork(&self, copy: Option<BlockPages>) -> (Self, Vec<PageCopy>) {
        let full = self.length / PAGE_POSITIONS;
        let mut blocks = self.blocks[..full].to_vec();
        let mut copied = Vec::new();
        if let Some((copy, last)) = copy.zip(self.blocks.get(full)) {
            let pairs = last.ids(last.count()).zip(copy.ids(copy.count()));
            copied.extend(pairs.map(|(from, to)| PageCopy { from, to }));
            blocks.push(copy);
        }
        let Self { scope, length, cached_blocks, released_blocks, .. } = *self;
        (Self { scope, blocks, length, cached_blocks, released_blocks }, copied)
    }

    /// Counts `rows` positions as forwarded, once the keys and values of every layer are written.
    pub(crate) fn advance(&mut self, rows: usize) {
        self.length += rows;
    }
}
