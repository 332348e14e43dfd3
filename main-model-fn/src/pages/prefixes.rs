//! Which full pages are kept, by the tokens that they hold and all before them.
//!
//! A page is found under its tokens and the page before it, which makes a chain down to the beginning of the
//! sequence; keys are compared whole, so that no two beginnings are ever taken for one another. Every chain begins
//! at its tenant: how fast an answer begins tells whether somebody has asked the same before, which is nobody's
//! business but the tenant's.

use super::{Block, Page, Table, Used};
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;
use std::sync::LazyLock;

/// Whose requests share what was computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Tenant([u64; 2]);

/// Keys of this process: no name can be chosen that has the hash of another one.
static KEYS: LazyLock<[RandomState; 2]> = LazyLock::new(Default::default);

impl Tenant {
    /// The one that a gateway calls `name`: 128 bits of a keyed hash.
    pub(crate) fn named(name: &[u8]) -> Self {
        Self(KEYS.each_ref().map(|key| key.hash_one(name)))
    }
}

/// The beginning of a sequence: nothing but the tenant, or everything up to the end of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Link {
    Tenant(Tenant),
    /// The number that the page was given when it was kept. No two ever have the same.
    Page(u64),
}

/// A way along kept pages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chain {
    end: Link,
    /// Which use of kept pages it is, and its length: what pages on it were last used at.
    used: Used,
}

impl Chain {
    fn longer(self, page: u64) -> Self {
        let (turn, Reverse(length)) = self.used;
        // A chain of 2^32 pages has 2^37 tokens.
        Self { end: Link::Page(page), used: (turn, Reverse(length.saturating_add(1))) }
    }
}

type Key = (Link, Block);

struct Kept {
    page: usize,
    number: u64,
}

/// The kept pages.
pub(super) struct Prefixes {
    kept: HashMap<Key, Kept>,
    /// Under what each page is kept, by its id: it never is twice.
    by_page: HashMap<usize, Key>,
    /// Pages that were ever kept.
    numbers: u64,
    /// Chains that were ever begun.
    turns: u64,
    table: Rc<RefCell<Table>>,
}

impl Prefixes {
    pub(super) fn new(table: Rc<RefCell<Table>>) -> Self {
        Self { kept: HashMap::new(), by_page: HashMap::new(), numbers: 0, turns: 0, table }
    }

    /// The beginning of a sequence of `tenant`.
    pub(super) fn begin(&mut self, tenant: Tenant) -> Chain {
        self.turns += 1;
        Chain { end: Link::Tenant(tenant), used: (self.turns, Reverse(0)) }
    }

    /// The page that continues `chain` with `block`, and the chain then.
    pub(super) fn find(&self, chain: Chain, block: &Block) -> Option<(Page, Chain)> {
        let kept = self.kept.get(&(chain.end, *block))?;
        self.table.borrow_mut().keep(kept.page, Some(chain.used));
        Some((Table::hold(&self.table, kept.page), chain.longer(kept.number)))
    }

    /// Keeps `page`, which continues `chain` with `block`, unless there is such a page already. Returns the chain
    /// then.
    pub(super) fn keep(&mut self, chain: Chain, block: Block, page: usize) -> Chain {
        if let Some((_, chain)) = self.find(chain, &block) {
            return chain;
        }
        // Kept under a page before it that has gone, which nobody finds any more.
        self.forget(page);
        let number = self.numbers;
        self.numbers += 1;
        let key = (chain.end, block);
        self.kept.insert(key, Kept { page, number });
        self.by_page.insert(page, key);
        self.table.borrow_mut().keep(page, Some(chain.used));
        chain.longer(number)
    }

    /// Keeps `page` no longer.
    pub(super) fn forget(&mut self, page: usize) {
        if let Some(key) = self.by_page.remove(&page) {
            self.kept.remove(&key);
            self.table.borrow_mut().keep(page, None);
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
        let one = Tenant::named(b"one");
        assert_eq!((one, size_of::<Tenant>()), (Tenant::named(b"one"), 16));
        assert!(one != Tenant::named(b"two") && one != Tenant::default());
        let Tenant([first, second]) = one;
        let mut unkeyed = DefaultHasher::new();
        b"one"[..].hash(&mut unkeyed);
        assert!(first != second && ![first, second].contains(&unkeyed.finish()));
    }
}
