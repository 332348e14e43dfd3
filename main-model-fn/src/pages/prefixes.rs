//! Prefix cache: full pages, found by their tokens and all before them, and their eviction.
//!
//! A page is found under its tokens and the page before it, which makes a chain down to the beginning of the
//! sequence; keys are compared whole, so that no two beginnings are ever taken for one another. Every chain begins at
//! its tenant: how fast an answer begins tells if the same was asked before, which only the tenant may learn.

use super::table::{LastUse, Rank, Table};
use super::{Block, BlockPages};
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;
use std::sync::LazyLock;

/// Whose requests share what was computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct CacheScope([u64; 2]);

/// Keys of this process: no name can be chosen that has the hash of another one.
static KEYS: LazyLock<[RandomState; 2]> = LazyLock::new(Default::default);

impl CacheScope {
    /// The one that a gateway calls `name`: 128 bits of a keyed hash.
    pub(crate) fn named(name: &[u8]) -> Self {
        Self(KEYS.each_ref().map(|key| key.hash_one(name)))
    }
}

/// The beginning of a sequence: nothing but the tenant, or everything up to the end of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Link {
    Tenant(CacheScope),
    /// The number that the page was given when it was kept. No two ever have the same.
    Page(u64),
}

/// A way along kept pages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chain {
    end: Link,
    /// Which use of kept pages it is.
    turn: u64,
    /// Blocks on it.
    length: u32,
}

impl Chain {
    fn longer(self, page: u64) -> Self {
        // A chain of 2^32 pages has 2^37 tokens.
        Self { end: Link::Page(page), length: self.length.saturating_add(1), ..self }
    }

    /// When the whole pages that continue it were last used.
    fn used_whole(self) -> LastUse {
        (self.turn, Rank::Whole(Reverse(self.length)))
    }

    fn used_windowed(self) -> LastUse {
        (self.turn, Rank::Windowed(self.length))
    }
}

type BlockKey = (Link, Block);

/// Page sets that are kept for a block.
#[derive(Clone, Copy)]
pub(super) struct CachedBlock {
    whole: usize,
    /// `None` once they were evicted, or without windowed layers.
    windowed: Option<usize>,
    number: u64,
}

impl CachedBlock {
    /// Reports if the windowed pages are kept too.
    pub(super) fn has_windowed(&self) -> bool {
        self.windowed.is_some()
    }
}

/// The kept pages.
pub(super) struct Prefixes {
    kept: HashMap<BlockKey, CachedBlock>,
    /// Under what each set is kept, by its id: it never is twice.
    by_set: HashMap<usize, BlockKey>,
    /// Blocks that were ever kept.
    numbers: u64,
    /// Chains that were ever begun.
    turns: u64,
    table: Rc<RefCell<Table>>,
}

impl Prefixes {
    pub(super) fn new(table: Rc<RefCell<Table>>) -> Self {
        Self { kept: HashMap::new(), by_set: HashMap::new(), numbers: 0, turns: 0, table }
    }

    /// The beginning of a sequence of `tenant`.
    pub(super) fn begin(&mut self, tenant: CacheScope) -> Chain {
        self.turns += 1;
        Chain { end: Link::Tenant(tenant), turn: self.turns, length: 0 }
    }

    /// Returns what is kept of the block that continues `chain` with `block`, and the chain then.
    pub(super) fn find(&self, chain: Chain, block: &Block) -> Option<(CachedBlock, Chain)> {
        let kept = *self.kept.get(&(chain.end, *block))?;
        Some((kept, chain.longer(kept.number)))
    }

    /// Uses `kept`, which continues `chain`: holds its pages, the windowed ones if they are wanted.
    pub(super) fn hold(&self, chain: Chain, kept: CachedBlock, wants_windowed: bool) -> BlockPages {
        let hold = |id, used| {
            self.table.borrow_mut().keep(id, Some(used));
            Table::hold(&self.table, id)
        };
        BlockPages {
            whole: hold(kept.whole, chain.used_whole()),
            windowed: kept.windowed.filter(|_| wants_windowed).map(|id| hold(id, chain.used_windowed())),
        }
    }

    /// Keeps `pages`, which continue `chain` with `block`, except those that are kept of it already. Returns the chain
    /// then.
    pub(super) fn keep(&mut self, chain: Chain, block: Block, pages: &BlockPages) -> Chain {
        let key = (chain.end, block);
        if !self.kept.contains_key(&key) {
            // Kept under a page before it that has gone, so that it cannot be found any more.
            self.forget(pages.whole.id);
            let number = self.numbers;
            self.numbers += 1;
            self.kept.insert(key, CachedBlock { whole: pages.whole.id, windowed: None, number });
            self.by_set.insert(pages.whole.id, key);
        }
        let has_windowed = self.kept.get(&key).is_none_or(CachedBlock::has_windowed);
        if let Some(windowed) = pages.windowed.as_ref().filter(|_| !has_windowed) {
            self.forget(windowed.id);
            self.by_set.insert(windowed.id, key);
            if let Some(kept) = self.kept.get_mut(&key) {
                kept.windowed = Some(windowed.id);
            }
        }
        let Some(kept) = self.kept.get(&key) else { return chain };
        let mut table = self.table.borrow_mut();
        table.keep(kept.whole, Some(chain.used_whole()));
        if let Some(windowed) = kept.windowed.filter(|_| pages.windowed.is_some()) {
            table.keep(windowed, Some(chain.used_windowed()));
        }
        chain.longer(kept.number)
    }

    /// Keeps the set `id` no longer; with whole pages the windowed ones of their block go.
    pub(super) fn forget(&mut self, id: usize) {
        let Some(key) = self.by_set.remove(&id) else { return };
        let mut table = self.table.borrow_mut();
        table.keep(id, None);
        match self.kept.get_mut(&key) {
            Some(kept) if kept.whole != id => kept.windowed = None,
            Some(_) | None => {
                if let Some(windowed) = self.kept.remove(&key).and_then(|kept| kept.windowed) {
                    self.by_set.remove(&windowed);
                    table.keep(windowed, None);
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
    fn tenants_are_told_apart_by_a_keyed_hash_of_128_bits() {
        let one = CacheScope::named(b"one");
        assert_eq!((one, size_of::<CacheScope>()), (CacheScope::named(b"one"), 16));
        assert!(one != CacheScope::named(b"two") && one != CacheScope::default());
        let CacheScope([first, second]) = one;
        let mut unkeyed = DefaultHasher::new();
        b"one"[..].hash(&mut unkeyed);
        assert!(first != second && ![first, second].contains(&unkeyed.finish()));
    }
}
