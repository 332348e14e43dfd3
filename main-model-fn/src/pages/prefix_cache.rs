//! Prefix cache: finds full pages by their tokens and all tokens before them.
//!
//! The key of a page is its tokens and the page before it; these chains lead back to the beginning of the sequence. Keys
//! are compared as a whole, not by a hash, so two prefixes are never confused. Each chain starts at a
//! [`CacheScope`]: the time to first token reveals whether a prefix is cached, and only its own tenant may learn that.

use super::page_sets::{EvictionRank, LastUse, PageSetTable};
use super::{BlockPages, BlockTokens};
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;
use std::sync::LazyLock;

/// Tenant whose requests share cached prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct CacheScope([u64; 2]);

/// Random keys of this process: a client cannot choose a name that has the hash of another name.
static HASH_KEYS: LazyLock<[RandomState; 2]> = LazyLock::new(Default::default);

impl CacheScope {
    /// Returns the scope of the tenant `name` of a gateway: 128 bits of a keyed hash.
    pub(crate) fn named(name: &[u8]) -> Self {
        Self(HASH_KEYS.each_ref().map(|key| key.hash_one(name)))
    }
}

/// Prefix that a block continues: the beginning of a sequence, or everything up to the end of a cached block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ChainEnd {
    Scope(CacheScope),
    /// Serial number of the cached block; numbers are never reused.
    Block(u64),
}

/// Chain of cached blocks from the beginning of a sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct PrefixChain {
    end: ChainEnd,
    /// Serial number of this use of the prefix cache.
    use_number: u64,
    /// Blocks in the chain.
    length: u32,
}

impl PrefixChain {
    fn extended(self, block: u64) -> Self {
        // A chain of 2^32 blocks has 2^37 tokens.
        Self { end: ChainEnd::Block(block), length: self.length.saturating_add(1), ..self }
    }

    /// Returns the last use of the whole pages of the block behind this chain.
    fn whole_pages_used(self) -> LastUse {
        (self.use_number, EvictionRank::Whole(Reverse(self.length)))
    }

    /// Returns the last use of the windowed pages of the block behind this chain.
    fn windowed_pages_used(self) -> LastUse {
        (self.use_number, EvictionRank::Windowed(self.length))
    }
}

type BlockKey = (ChainEnd, BlockTokens);

/// Page sets of one cached block, by id.
#[derive(Clone, Copy)]
pub(super) struct CachedBlock {
    whole: usize,
    /// `None` if they were evicted or the model has no windowed layers.
    windowed: Option<usize>,
    /// Serial number of the block.
    number: u64,
}

impl CachedBlock {
    /// Reports if the windowed pages are cached too.
    pub(super) fn has_windowed(&self) -> bool {
        self.windowed.is_some()
    }
}

/// Index of the cached blocks.
pub(super) struct PrefixCache {
    blocks: HashMap<BlockKey, CachedBlock>,
    /// Block of each cached page set, by the set's id.
    key_of_set: HashMap<usize, BlockKey>,
    /// Serial number of the next block.
    next_number: u64,
    /// Serial number of the latest use.
    uses: u64,
    table: Rc<RefCell<PageSetTable>>,
}

impl PrefixCache {
    pub(super) fn new(table: Rc<RefCell<PageSetTable>>) -> Self {
        Self { blocks: HashMap::new(), key_of_set: HashMap::new(), next_number: 0, uses: 0, table }
    }

    /// Starts a chain at the beginning of a sequence in `scope`. Counts as one use of the cache.
    pub(super) fn begin(&mut self, scope: CacheScope) -> PrefixChain {
        self.uses += 1;
        PrefixChain { end: ChainEnd::Scope(scope), use_number: self.uses, length: 0 }
    }

    /// Looks up the block with tokens `block` behind `chain`. Returns it and the chain that ends with it.
    pub(super) fn find(&self, chain: PrefixChain, block: &BlockTokens) -> Option<(CachedBlock, PrefixChain)> {
        let cached = *self.blocks.get(&(chain.end, *block))?;
        Some((cached, chain.extended(cached.number)))
    }

    /// Holds the pages of `cached`, the block behind `chain`, for a sequence and records their use. Holds windowed pages
    /// only if `needs_windowed`.
    pub(super) fn hold(&self, chain: PrefixChain, cached: CachedBlock, needs_windowed: bool) -> BlockPages {
        let hold = |id, last_use| {
            self.table.borrow_mut().set_cached(id, Some(last_use));
            PageSetTable::hold(&self.table, id)
        };
        let windowed = cached.windowed.filter(|_| needs_windowed);
        BlockPages {
            whole: hold(cached.whole, chain.whole_pages_used()),
            windowed: windowed.map(|id| hold(id, chain.windowed_pages_used())),
        }
    }

    /// Caches `pages` as the block with tokens `block` behind `chain`. Page sets that are cached for this block already
    /// stay. Returns the chain that ends with the block.
    pub(super) fn insert(
        &mut self,
        chain: PrefixChain,
        block: BlockTokens,
        pages: &BlockPages,
    ) -> PrefixChain {
        let key = (chain.end, block);
        if !self.blocks.contains_key(&key) {
            // The set may be cached behind a block that was evicted, where it cannot be found any more.
            self.evict(pages.whole.id);
            let number = self.next_number;
            self.next_number += 1;
            self.blocks.insert(key, CachedBlock { whole: pages.whole.id, windowed: None, number });
            self.key_of_set.insert(pages.whole.id, key);
        }
        let has_windowed = self.blocks.get(&key).is_none_or(CachedBlock::has_windowed);
        if let Some(windowed) = pages.windowed.as_ref().filter(|_| !has_windowed) {
            self.evict(windowed.id);
            self.key_of_set.insert(windowed.id, key);
            if let Some(cached) = self.blocks.get_mut(&key) {
                cached.windowed = Some(windowed.id);
            }
        }
        let Some(cached) = self.blocks.get(&key) else { return chain };
        let mut table = self.table.borrow_mut();
        table.set_cached(cached.whole, Some(chain.whole_pages_used()));
        if let Some(windowed) = cached.windowed.filter(|_| pages.windowed.is_some()) {
            table.set_cached(windowed, Some(chain.windowed_pages_used()));
        }
        chain.extended(cached.number)
    }

    /// Removes the set `id` from the cache. With a block's whole pages its windowed pages are removed as well.
    pub(super) fn evict(&mut self, id: usize) {
        let Some(key) = self.key_of_set.remove(&id) else { return };
        let mut table = self.table.borrow_mut();
        table.set_cached(id, None);
        match self.blocks.get_mut(&key) {
            Some(cached) if cached.whole != id => cached.windowed = None,
            Some(_) | None => {
                if let Some(windowed) = self.blocks.remove(&key).and_then(|cached| cached.windowed) {
                    self.key_of_set.remove(&windowed);
                    table.set_cached(windowed, None);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::DefaultHasher;
    use std::hash::{Hash, Hasher};

    #[test]
    fn cache_scope_is_a_keyed_hash_of_128_bits() {
        let one = CacheScope::named(b"one");
        assert_eq!((one, size_of::<CacheScope>()), (CacheScope::named(b"one"), 16));
        assert!(one != CacheScope::named(b"two") && one != CacheScope::default());
        let CacheScope([first, second]) = one;
        let mut unkeyed = DefaultHasher::new();
        b"one"[..].hash(&mut unkeyed);
        assert!(first != second && ![first, second].contains(&unkeyed.finish()));
    }
}
