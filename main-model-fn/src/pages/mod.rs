//! KV cache: pages of keys and values, the sequences that hold them, and the prefix cache of full pages.
//!
//! All pages come from one budget. A sequence holds the pages of its positions; those that are full are never
//! written again, so that sequences with the same beginning hold the same ones. A full page stays after the last
//! sequence has let go of it, under the tokens that it holds and all before them ([`prefixes`]), until its place is
//! needed: the page that was used longest ago goes first. Pages are only numbers here; a [`crate::Backend`] keeps
//! what is in them.
//!
//! Layers that attend to a window have pages of their own ([`PageNeeds`]). A sequence lets go of them once no later
//! position sees them. They stay kept like others, but may be evicted alone: a sequence can begin behind kept pages
//! only where the whole window before it is still kept.

mod needs;
mod prefixes;
mod sequence;
mod table;

pub(crate) use needs::paged;
pub use prefixes::CacheScope;
pub use remoe_model::kv_pages::PageNeeds;
pub(crate) use remoe_model::kv_pages::pages_of;
pub(crate) use sequence::{BlockPages, SequenceCache};

use crate::backend::PAGE_POSITIONS;
use prefixes::Prefixes;
use std::cell::RefCell;
use std::rc::Rc;
use table::{PageSet, Table};

/// All pages.
pub(crate) struct Pages {
    table: Rc<RefCell<Table>>,
    prefixes: Prefixes,
    needs: PageNeeds,
}

impl Pages {
    /// `limit` pages, none of which is held, for sequences with such `needs`.
    pub(crate) fn new(limit: usize, needs: PageNeeds) -> Self {
        let table = Rc::new(RefCell::new(Table::new(limit)));
        Self { prefixes: Prefixes::new(table.clone()), table, needs }
    }

    /// How many there are.
    pub(crate) fn limit(&self) -> usize {
        self.table.borrow().limit()
    }

    /// Pages that sequences hold, each counted once.
    pub(crate) fn held(&self) -> usize {
        self.table.borrow().held()
    }

    /// Evicts as many idle pages from the prefix cache as the pages of `blocks` blocks of positions need, least
    /// recently used first. Reports if so many are free then.
    pub(crate) fn make_free(&mut self, blocks: usize) -> bool {
        let count = blocks.saturating_mul(self.needs.of_block());
        loop {
            let table = self.table.borrow();
            if table.free() >= count {
                return true;
            }
            let Some(oldest) = table.oldest() else { return false };
            drop(table);
            self.prefixes.forget(oldest);
        }
    }

    /// Pages of a block of positions for a sequence to hold; none where not so many can be freed.
    pub(crate) fn take(&mut self) -> Option<BlockPages> {
        if !self.make_free(1) {
            return None;
        }
        let whole = Table::take(&self.table, self.needs.whole)?;
        let windowed = match self.needs.windowed {
            0 => None,
            count => Some(Table::take(&self.table, count)?),
        };
        Some(BlockPages { whole, windowed })
    }

    /// A sequence of `tenant` that begins with the kept pages of `tokens`, as many as there are and leave a token to
    /// forward.
    pub(crate) fn begin(
        &mut self,
        tenant: CacheScope,
        tokens: impl Fn(usize) -> u32,
        count: usize,
    ) -> SequenceCache {
        let mut cache = SequenceCache::new(tenant);
        let mut chain = self.prefixes.begin(tenant);
        let (mut found, mut usable, mut unbroken) = (Vec::new(), 0, 0);
        for index in 0..count.saturating_sub(1) / PAGE_POSITIONS {
            let Some((kept, longer)) = self.prefixes.find(chain, &block(&tokens, index)) else {
                break;
            };
            if self.needs.windowed > 0 && !kept.has_windowed() {
                unbroken = index + 1;
            }
            found.push((chain, kept));
            chain = longer;
            if unbroken <= self.first_seen_behind(index + 1) {
                usable = index + 1;
            }
        }
        let first_seen = self.first_seen_behind(usable);
        for (index, (chain, kept)) in found.into_iter().take(usable).enumerate() {
            cache.blocks.push(self.prefixes.hold(chain, kept, index >= first_seen));
        }
        cache.kept = usable;
        cache.released = first_seen.min(usable);
        cache.length = usable * PAGE_POSITIONS;
        cache
    }

    /// The first block whose windowed pages a sequence needs that goes on behind `blocks`.
    fn first_seen_behind(&self, blocks: usize) -> usize {
        self.needs.first_seen(blocks * PAGE_POSITIONS)
    }

    /// Keeps the pages of `cache`, a sequence of `tokens`, once another one has become full. Lets go of windowed
    /// pages that no later position sees.
    pub(crate) fn keep(&mut self, cache: &mut SequenceCache, tokens: impl Fn(usize) -> u32) {
        let full = cache.length / PAGE_POSITIONS;
        if cache.kept != full {
            let mut chain = self.prefixes.begin(cache.tenant);
            for (index, pages) in cache.blocks[..full].iter().enumerate() {
                chain = self.prefixes.keep(chain, block(&tokens, index), pages);
            }
            cache.kept = full;
        }
        cache.release_before(self.needs.first_seen(cache.length));
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
    use crate::backend::RELEASED;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const PAGE: usize = PAGE_POSITIONS;

    #[test]
    fn plans_leave_room_for_pages_of_this_size() {
        assert_eq!(PAGE, remoe_plan::PAGE_POSITIONS as usize);
        assert_eq!(PAGE, remoe_model::kv_pages::PAGE_POSITIONS);
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

    fn begin(pages: &mut Pages, tenant: CacheScope, tokens: &[u32]) -> SequenceCache {
        pages.begin(tenant, |at| tokens[at], tokens.len())
    }

    /// Ids of a sequence's pages where there is one page table.
    fn ids(cache: &SequenceCache) -> Vec<usize> {
        cache.page_tables().into_iter().next().unwrap_or_default()
    }

    #[test]
    fn what_was_computed_is_found_again_within_a_tenant() {
        let mut pages = Pages::new(10, PageNeeds::default());
        let tokens: Vec<u32> = (0..3 * PAGE as u32).collect();
        let mut first = begin(&mut pages, CacheScope::default(), &tokens);
        assert_eq!(first.length(), 0);
        assert!(forward(&mut pages, &mut first, &tokens));
        // A token is left to forward.
        let again = begin(&mut pages, CacheScope::default(), &tokens);
        assert_eq!((again.length(), &ids(&again)[..]), (2 * PAGE, &ids(&first)[..2]));
        let mut longer = tokens.clone();
        longer.push(7);
        assert_eq!(begin(&mut pages, CacheScope::default(), &longer).length(), 3 * PAGE);
        longer[PAGE] = 9;
        assert_eq!(begin(&mut pages, CacheScope::default(), &longer).length(), PAGE);
        longer[0] = 9;
        assert_eq!(begin(&mut pages, CacheScope::default(), &longer).length(), 0, "the second page alone");
        assert_eq!(begin(&mut pages, CacheScope::named(b"1"), &tokens).length(), 0, "another tenant's");
        drop((first, again));
        assert_eq!(
            begin(&mut pages, CacheScope::default(), &tokens).length(),
            2 * PAGE,
            "kept although no sequence holds it"
        );
    }

    #[test]
    fn the_oldest_goes_first_and_nothing_that_is_held() {
        let mut pages = Pages::new(4, PageNeeds::default());
        let tokens = |first: u32| -> Vec<u32> { (first..first + 2 * PAGE as u32).collect() };
        for first in [0, 1000] {
            let mut cache = begin(&mut pages, CacheScope::default(), &tokens(first));
            assert!(forward(&mut pages, &mut cache, &tokens(first)));
        }
        let held = begin(&mut pages, CacheScope::default(), &tokens(0));
        assert_eq!(held.length(), PAGE);
        let mut third = begin(&mut pages, CacheScope::default(), &tokens(2000));
        assert!(forward(&mut pages, &mut third, &tokens(2000)));
        let longer: Vec<u32> = (1000..1001 + 2 * PAGE as u32).collect();
        assert_eq!(
            begin(&mut pages, CacheScope::default(), &longer).length(),
            PAGE,
            "ends go before beginnings"
        );
        let mut fourth = begin(&mut pages, CacheScope::default(), &tokens(3000));
        assert!(!fourth.reserve(2 * PAGE, &mut pages), "one is held by each of two others, two by a third");
        drop(held);
        assert!(fourth.reserve(2 * PAGE, &mut pages));
    }

    /// Contents of each page: tokens as they were forwarded.
    type Contents = Vec<Vec<u32>>;

    /// Checks that a sequence of `tokens` finds in its pages what it sees: all in whole pages, the window in others.
    fn check(needs: PageNeeds, contents: &Contents, cache: &SequenceCache, tokens: &[u32]) {
        let tables = cache.page_tables();
        assert!(tables.len() == needs.of_block() || cache.length().is_multiple_of(PAGE));
        for (table, ids) in tables.iter().enumerate() {
            let first = if table < needs.whole { 0 } else { needs.first_seen(cache.length()) };
            for (at, block) in tokens[..cache.length()].chunks(PAGE).enumerate().skip(first) {
                assert_eq!(&contents[ids[at]][..block.len()], block, "table {table}, page {at}");
            }
        }
    }

    proptest! {
        /// However sequences begin, grow, fork and end, a page is held by those whose tokens it has, and by no
        /// others.
        #[test]
        fn pages_hold_what_their_holders_forwarded(
            steps in prop::collection::vec((0_usize..6, 0_u32..2, 1_usize..50, 0_usize..3), 1..100),
            limit in 4_usize..24,
            (whole, windowed, window) in prop::sample::select(
                vec![(1, 0, 0), (1, 1, 1), (1, 2, 8), (1, 1, 33), (2, 1, 70), (0, 1, 40)]
            ),
        ) {
            let needs = PageNeeds { whole, windowed, window };
            let mut pages = Pages::new(limit, needs);
            let mut contents: Contents = vec![Vec::new(); limit];
            let mut running: Vec<Option<(Vec<u32>, SequenceCache)>> = (0..6).map(|_| None).collect();
            for (slot, kind, grow, end) in steps {
                let (mut tokens, mut cache) = match running[slot].take() {
                    Some(running) => running,
                    None => {
                        let tokens = vec![kind; 70];
                        let cache = begin(&mut pages, CacheScope::default(), &tokens);
                        check(needs, &contents, &cache, &tokens);
                        (tokens, cache)
                    }
                };
                tokens.extend((0..grow).map(|at| kind + at as u32 % 2));
                let done = cache.length();
                if !cache.reserve(tokens.len(), &mut pages) {
                    continue;
                }
                for ids in cache.page_tables() {
                    for at in done..tokens.len() {
                        let page = &mut contents[ids[at / PAGE]];
                        page.truncate(at % PAGE);
                        page.push(tokens[at]);
                    }
                }
                prop_assert!(forward(&mut pages, &mut cache, &tokens));
                let most = needs.pages(tokens.len(), tokens.len() - done);
                prop_assert!(cache.pages() <= most, "{} pages, not {most}", cache.pages());
                check(needs, &contents, &cache, &tokens);
                if end == 1 {
                    let copy = if cache.length().is_multiple_of(PAGE) { None } else { pages.take() };
                    if cache.length().is_multiple_of(PAGE) || copy.is_some() {
                        let (fork, copied) = cache.fork(copy);
                        for (from, to) in copied {
                            contents[to] = contents[from].clone();
                        }
                        running[(slot + 1) % 6] = Some((tokens.clone(), fork));
                    }
                }
                running[slot] = (end != 0).then_some((tokens, cache));
                let caches = running.iter().flatten().flat_map(|(_, cache)| cache.page_tables());
                let held: BTreeSet<usize> = caches.flatten().filter(|id| *id != RELEASED).collect();
                prop_assert_eq!(pages.held(), held.len());
                for (tokens, cache) in running.iter().flatten() {
                    check(needs, &contents, cache, tokens);
                }
            }
            running.clear();
            prop_assert_eq!(pages.held(), 0);
            prop_assert!(pages.make_free(limit / needs.of_block()), "a page without a holder does not become free");
        }
    }

    /// Windowed pages that were evicted: what was found before them is found no more, until it is computed again.
    #[test]
    fn prefixes_without_their_window_are_computed_again() {
        let needs = PageNeeds { whole: 1, windowed: 1, window: 40 };
        let mut pages = Pages::new(12, needs);
        let tokens: Vec<u32> = (0..6 * PAGE as u32 + 1).collect();
        let mut first = begin(&mut pages, CacheScope::default(), &tokens);
        for block in 1..=6 {
            assert!(forward(&mut pages, &mut first, &tokens[..block * PAGE]));
        }
        assert_eq!((first.pages(), pages.held()), (6 + 2, 8), "six whole pages, two within the window");
        drop(first);
        let found = |pages: &mut Pages, count: usize| begin(pages, CacheScope::default(), &tokens[..count]);
        assert_eq!(found(&mut pages, tokens.len()).length(), 6 * PAGE);
        assert!(pages.make_free(2), "which takes the windowed pages that were used longest ago");
        assert_eq!(found(&mut pages, 5 * PAGE + 1).length(), 0, "the window of none of them is complete");
        let again = found(&mut pages, tokens.len());
        assert_eq!((again.length(), again.pages()), (6 * PAGE, 8), "but that of the last");
        drop(again);
        let mut whole = SequenceCache::new(CacheScope::default());
        for block in 1..=5 {
            assert!(forward(&mut pages, &mut whole, &tokens[..block * PAGE]));
        }
        drop(whole);
        assert_eq!(found(&mut pages, 5 * PAGE + 1).length(), 5 * PAGE, "computed again");
    }
}
