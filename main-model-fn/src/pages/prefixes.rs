//! Which full pages are kept, by the tokens that they hold and all before them.
//!
//! A page is found under its tokens and the page before it, which makes a chain down to the beginning of the
//! sequence; keys are compared whole, so that no two beginnings are ever taken for one another. Every chain begins
//! at its tenant: how fast an answer begins tells whether somebody has asked the same before, which is nobody's
//! business but the tenant's.

use super::{Block, Page};
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

/// Whose requests share what was computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Tenant(pub(super) u64);

impl Tenant {
    /// The one that a gateway calls `name`.
    pub(crate) fn named(name: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        Self(hasher.finish())
    }
}

/// The beginning of a sequence: nothing but the tenant, or everything up to the end of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Chain {
    Tenant(Tenant),
    /// The number that the page was given when it was kept. No two ever have the same.
    Page(u64),
}

type Key = (Chain, Block);

struct Kept {
    page: Rc<Page>,
    number: u64,
    used: u64,
}

/// The kept pages.
#[derive(Default)]
pub(super) struct Prefixes {
    kept: HashMap<Key, Kept>,
    /// Under what each page is kept, by its number: it never is twice.
    by_page: HashMap<usize, Key>,
    /// By when they were used last. A page comes after those that follow it in a chain, which nobody finds without it.
    by_use: BTreeMap<u64, Key>,
    /// Pages that were ever kept.
    numbers: u64,
    /// Counts down from the use of a chain's first page to its last.
    clock: u64,
}

/// Longer than any chain: the clock's step from one use to the next.
const USE: u64 = 1 << 32;

impl Prefixes {
    /// The page that continues `chain` with `block`, and the chain then.
    pub(super) fn find(&mut self, chain: Chain, block: &Block) -> Option<(Rc<Page>, Chain)> {
        let key = (chain, *block);
        let used = self.now(chain);
        let kept = self.kept.get_mut(&key)?;
        self.by_use.remove(&kept.used);
        kept.used = used;
        self.by_use.insert(used, key);
        Some((kept.page.clone(), Chain::Page(kept.number)))
    }

    /// Keeps `page`, which continues `chain` with `block`, unless there is such a page already. Returns the chain
    /// then.
    pub(super) fn keep(&mut self, chain: Chain, block: Block, page: &Rc<Page>) -> Chain {
        if let Some((_, chain)) = self.find(chain, &block) {
            return chain;
        }
        // Kept under a page before it that has gone, which nobody finds any more.
        if let Some(old) = self.by_page.get(&page.id).copied() {
            self.forget(&old);
        }
        let (number, used) = (self.numbers, self.now(chain));
        self.numbers += 1;
        self.kept.insert((chain, block), Kept { page: page.clone(), number, used });
        self.by_page.insert(page.id, (chain, block));
        self.by_use.insert(used, (chain, block));
        Chain::Page(number)
    }

    /// Lets go of the page that was used longest ago, of those that nobody else holds. False where there is none.
    pub(super) fn forget_oldest(&mut self) -> bool {
        let is_idle = |key: &&Key| self.kept.get(key).is_some_and(|kept| Rc::strong_count(&kept.page) == 1);
        let Some(key) = self.by_use.values().find(is_idle).copied() else {
            return false;
        };
        self.forget(&key);
        true
    }

    fn forget(&mut self, key: &Key) {
        if let Some(kept) = self.kept.remove(key) {
            self.by_use.remove(&kept.used);
            self.by_page.remove(&kept.page.id);
        }
    }

    /// A time that nothing else was used at: a chain's beginning opens a new step of the clock, and what continues it
    /// is older than what it continues.
    fn now(&mut self, chain: Chain) -> u64 {
        match chain {
            Chain::Tenant(_) => self.clock = (self.clock / USE + 2) * USE,
            Chain::Page(_) => self.clock -= 1,
        }
        self.clock
    }
}
