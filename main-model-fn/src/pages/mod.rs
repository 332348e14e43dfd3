//! Keys and values in pages: who holds which, and what is kept for later.
//!
//! All pages come from one budget. A sequence holds the pages of its positions; those that are full are never
//! written again, so that sequences with the same beginning hold the same ones. A full page stays after the last
//! sequence has let go of it, under the tokens that it holds and all before them ([`prefixes`]), until its place is
//! needed: the page that was used longest ago goes first. Pages are only numbers here; a [`crate::Backend`] keeps
//! what is in them.

mod prefixes;
mod sequence;

pub use prefixes::Tenant;
pub(crate) use sequence::SequenceCache;

use crate::backend::PAGE_POSITIONS;
use prefixes::Prefixes;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Pages that hold `positions`.
pub(crate) fn pages_of(positions: usize) -> usize {
    positions.div_ceil(PAGE_POSITIONS)
}

/// A page that a sequence holds. Clones hold the same page; with the last of them the page becomes idle or free.
pub(crate) struct Page {
    id: usize,
    table: Rc<RefCell<Table>>,
}

impl Clone for Page {
    fn clone(&self) -> Self {
        Table::hold(&self.table, self.id)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.table.borrow_mut().release(self.id);
    }
}

/// When a kept page was last used: which use of a chain it was, and how far from the chain's end. Ends of chains are
/// older than their beginnings, without which nobody finds them.
type Used = (u64, Reverse<u32>);

/// The state of one page.
#[derive(Clone, Copy, Default)]
struct Entry {
    /// [`Page`] values of it.
    holders: u32,
    /// Where it is in the prefix cache.
    kept: Option<Used>,
}

/// The state of every page. All changes are O(log pages).
struct Table {
    entries: Vec<Entry>,
    free: Vec<usize>,
    /// Kept pages that no sequence holds, by their last use.
    idle: BTreeMap<Used, usize>,
    limit: usize,
}

impl Table {
    fn hold(table: &Rc<RefCell<Self>>, id: usize) -> Page {
        let mut this = table.borrow_mut();
        let entry = &mut this.entries[id];
        entry.holders += 1;
        if let (1, Some(used)) = (entry.holders, entry.kept) {
            this.idle.remove(&used);
        }
        drop(this);
        Page { id, table: table.clone() }
    }

    fn release(&mut self, id: usize) {
        let entry = &mut self.entries[id];
        entry.holders -= 1;
        if entry.holders == 0 {
            match entry.kept {
                Some(used) => drop(self.idle.insert(used, id)),
                None => self.free.push(id),
            }
        }
    }

    /// The page is in the prefix cache, and was last used then; none: it is not any more.
    fn keep(&mut self, id: usize, used: Option<Used>) {
        let entry = &mut self.entries[id];
        let before = std::mem::replace(&mut entry.kept, used);
        if entry.holders > 0 {
            return;
        }
        if let Some(before) = before {
            self.idle.remove(&before);
        }
        match used {
            Some(used) => drop(self.idle.insert(used, id)),
            None => self.free.push(id),
        }
    }

    /// A page that is free: one that was used before, else a new one.
    fn take_free(&mut self) -> Option<usize> {
        self.free.pop().or_else(|| {
            (self.entries.len() < self.limit).then(|| {
                self.entries.push(Entry::default());
                self.entries.len() - 1
            })
        })
    }

    fn free(&self) -> usize {
        self.limit - self.entries.len() + self.free.len()
    }
}

/// All pages.
pub(crate) struct Pages {
    table: Rc<RefCell<Table>>,
    prefixes: Prefixes,
}

impl Pages {
    /// `limit` pages, none of which is held.
    pub(crate) fn new(limit: usize) -> Self {
        let table = Table { entries: Vec::new(), free: Vec::new(), idle: BTreeMap::new(), limit };
        let table = Rc::new(RefCell::new(table));
        Self { prefixes: Prefixes::new(table.clone()), table }
    }

    /// How many there are.
    pub(crate) fn limit(&self) -> usize {
        self.table.borrow().limit
    }

    /// Pages that sequences hold, each counted once.
    pub(crate) fn held(&self) -> usize {
        let table = self.table.borrow();
        table.limit - table.free() - table.idle.len()
    }

    /// Whether `count` pages are free, after as many idle ones as necessary have gone from the prefix cache: those that
    /// were used longest ago.
    pub(crate) fn make_free(&mut self, count: usize) -> bool {
        loop {
            let table = self.table.borrow();
            if table.free() >= count {
                return true;
            }
            let Some((_, &oldest)) = table.idle.first_key_value() else { return false };
            drop(table);
            self.prefixes.forget(oldest);
        }
    }

    /// A page for a sequence to hold; none where every page is held.
    pub(crate) fn take(&mut self) -> Option<Page> {
        if !self.make_free(1) {
            return None;
        }
        let id = self.table.borrow_mut().take_free()?;
        Some(Table::hold(&self.table, id))
    }

    /// A sequence of `tenant` that begins with the kept pages of `tokens`, as many as there are and leave a token to
    /// forward.
    pub(crate) fn begin(
        &mut self,
        tenant: Tenant,
        tokens: impl Fn(usize) -> u32,
        count: usize,
    ) -> SequenceCache {
        let mut cache = SequenceCache::new(tenant);
        let mut chain = self.prefixes.begin(tenant);
        for page in 0..count.saturating_sub(1) / PAGE_POSITIONS {
            let Some((page, longer)) = self.prefixes.find(chain, &block(&tokens, page)) else {
                break;
            };
            cache.pages.push(page);
            chain = longer;
        }
        cache.kept = cache.pages.len();
        cache.length = cache.kept * PAGE_POSITIONS;
        cache
    }

    /// Keeps the pages of `cache`, a sequence of `tokens`, once another one has become full.
    pub(crate) fn keep(&mut self, cache: &mut SequenceCache, tokens: impl Fn(usize) -> u32) {
        let full = cache.length / PAGE_POSITIONS;
        if cache.kept == full {
            return;
        }
        let mut chain = self.prefixes.begin(cache.tenant);
        for (index, page) in cache.pages[..full].iter().enumerate() {
            chain = self.prefixes.keep(chain, block(&tokens, index), page.id);
        }
        cache.kept = full;
    }
}

/// The tokens of page `page` of a sequence.
fn block(tokens: &impl Fn(usize) -> u32, page: usize) -> Block {
    std::array::from_fn(|at| tokens(page * PAGE_POSITIONS + at))
}

/// The tokens of a full page.
type Block = [u32; PAGE_POSITIONS];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const PAGE: usize = PAGE_POSITIONS;

    #[test]
    fn plans_leave_room_for_pages_of_this_size() {
        assert_eq!(PAGE, remoe_plan::PAGE_POSITIONS as usize);
    }

    /// Forwards the sequence `tokens` from wherever `cache` is.
    fn forward(pages: &mut Pages, cache: &mut SequenceCache, tokens: &[u32]) -> bool {
        if !cache.reserve(tokens.len(), pages) {
            return false;
        }
        cache.advance(tokens.len() - cache.length());
        pages.keep(cache, |at| tokens[at]);
        true
    }

    fn begin(pages: &mut Pages, tenant: Tenant, tokens: &[u32]) -> SequenceCache {
        pages.begin(tenant, |at| tokens[at], tokens.len())
    }

    #[test]
    fn what_was_computed_is_found_again_within_a_tenant() {
        let mut pages = Pages::new(10);
        let tokens: Vec<u32> = (0..3 * PAGE as u32).collect();
        let mut first = begin(&mut pages, Tenant::default(), &tokens);
        assert_eq!(first.length(), 0);
        assert!(forward(&mut pages, &mut first, &tokens));
        // A token is left to forward.
        let again = begin(&mut pages, Tenant::default(), &tokens);
        assert_eq!((again.length(), &again.page_ids()[..]), (2 * PAGE, &first.page_ids()[..2]));
        let mut longer = tokens.clone();
        longer.push(7);
        assert_eq!(begin(&mut pages, Tenant::default(), &longer).length(), 3 * PAGE);
        longer[PAGE] = 9;
        assert_eq!(begin(&mut pages, Tenant::default(), &longer).length(), PAGE);
        longer[0] = 9;
        assert_eq!(begin(&mut pages, Tenant::default(), &longer).length(), 0, "the second page alone");
        assert_eq!(begin(&mut pages, Tenant::named(b"1"), &tokens).length(), 0, "another tenant's");
        drop((first, again));
        assert_eq!(
            begin(&mut pages, Tenant::default(), &tokens).length(),
            2 * PAGE,
            "kept although nobody holds it"
        );
    }

    #[test]
    fn the_oldest_goes_first_and_nothing_that_is_held() {
        let mut pages = Pages::new(4);
        let tokens = |first: u32| -> Vec<u32> { (first..first + 2 * PAGE as u32).collect() };
        for first in [0, 1000] {
            let mut cache = begin(&mut pages, Tenant::default(), &tokens(first));
            assert!(forward(&mut pages, &mut cache, &tokens(first)));
        }
        let held = begin(&mut pages, Tenant::default(), &tokens(0));
        assert_eq!(held.length(), PAGE);
        let mut third = begin(&mut pages, Tenant::default(), &tokens(2000));
        assert!(forward(&mut pages, &mut third, &tokens(2000)));
        let longer: Vec<u32> = (1000..1001 + 2 * PAGE as u32).collect();
        assert_eq!(begin(&mut pages, Tenant::default(), &longer).length(), PAGE, "ends go before beginnings");
        let mut fourth = begin(&mut pages, Tenant::default(), &tokens(3000));
        assert!(!fourth.reserve(2 * PAGE, &mut pages), "one is held by each of two others, two by a third");
        drop(held);
        assert!(fourth.reserve(2 * PAGE, &mut pages));
    }

    proptest! {
        /// Whatever sequences begin, grow and end: a page is held by those whose tokens it has, and nobody else.
        #[test]
        fn pages_hold_what_their_holders_forwarded(
            steps in prop::collection::vec((0_usize..6, 0_u32..2, 1_usize..50, any::<bool>()), 1..100),
            limit in 4_usize..12,
        ) {
            let mut pages = Pages::new(limit);
            let mut contents = vec![Vec::new(); limit];
            let mut running: Vec<Option<(Vec<u32>, SequenceCache)>> = (0..6).map(|_| None).collect();
            for (slot, kind, grow, end) in steps {
                let (mut tokens, mut cache) = match running[slot].take() {
                    Some(running) => running,
                    None => {
                        let tokens = vec![kind; 70];
                        let cache = begin(&mut pages, Tenant::default(), &tokens);
                        (tokens, cache)
                    }
                };
                tokens.extend((0..grow).map(|at| kind + at as u32 % 2));
                let done = cache.length();
                if forward(&mut pages, &mut cache, &tokens) {
                    for at in done..tokens.len() {
                        let page: &mut Vec<u32> = &mut contents[cache.page_ids()[at / PAGE]];
                        page.truncate(at % PAGE);
                        page.push(tokens[at]);
                    }
                    for (at, block) in tokens.chunks(PAGE).enumerate() {
                        prop_assert_eq!(&contents[cache.page_ids()[at]][..block.len()], block);
                    }
                    running[slot] = (!end).then_some((tokens, cache));
                } else {
                    drop(cache);
                }
                let caches = running.iter().flatten().flat_map(|(_, cache)| cache.page_ids());
                prop_assert_eq!(pages.held(), caches.collect::<BTreeSet<_>>().len());
                for (tokens, cache) in running.iter().flatten() {
                    for (at, block) in tokens[..cache.length()].chunks(PAGE).enumerate() {
                        prop_assert_eq!(&contents[cache.page_ids()[at]][..block.len()], block);
                    }
                }
            }
            running.clear();
            prop_assert_eq!(pages.held(), 0);
            prop_assert!(pages.make_free(limit), "a page that nobody holds does not become free");
        }
    }
}
