//! KV cache: pages of keys and values, the sequences that hold them, and the prefix cache of full pages.
//!
//! All pages come from one pool of fixed size. A sequence holds the pages of its positions. A full page is never written
//! again, so sequences with the same prefix share it. When the last sequence releases a full page, it stays in the
//! prefix cache ([`prefix_cache`]), found by its tokens and all tokens before them. If the pool runs out of free pages,
//! the least recently used cached page is evicted. This module handles page ids only; a [`crate::Backend`] stores the
//! keys and values.
//!
//! Layers with sliding-window attention have pages of their own ([`PageNeeds`]). A sequence releases such a page when
//! no later position can attend to it. Windowed pages can be evicted separately from the others: a sequence can reuse
//! a cached prefix only if the pages of the window before its end are still cached.

mod needs;
mod page_sets;
mod prefix_cache;
mod sequence;

pub(crate) use needs::assign_page_tables;
pub use prefix_cache::CacheScope;
pub use remoe_model::kv_pages::PageNeeds;
pub(crate) use remoe_model::kv_pages::pages_of;
pub(crate) use sequence::{BlockPages, PageCopy, SequenceCache};

use crate::backend::PAGE_POSITIONS;
use page_sets::{PageSet, PageSetTable};
use prefix_cache::PrefixCache;
use std::cell::RefCell;
use std::rc::Rc;

/// Page pool of the KV cache, with the prefix cache.
pub(crate) struct KvPagePool {
    table: Rc<RefCell<PageSetTable>>,
    prefixes: PrefixCache,
    needs: PageNeeds,
}

impl KvPagePool {
    /// Creates a pool of `limit` free pages for sequences with these `needs`.
    pub(crate) fn new(limit: usize, needs: PageNeeds) -> Self {
        let table = Rc::new(RefCell::new(PageSetTable::new(limit)));
        Self { prefixes: PrefixCache::new(table.clone()), table, needs }
    }

    /// Returns the number of pages, free or not.
    pub(crate) fn limit(&self) -> usize {
        self.table.borrow().limit()
    }

    /// Returns the number of pages that sequences hold; a shared page counts once.
    pub(crate) fn held_pages(&self) -> usize {
        self.table.borrow().held()
    }

    /// Evicts least recently used pages from the prefix cache until `blocks` blocks of positions fit. Returns false if
    /// they do not fit even then.
    pub(crate) fn free_blocks(&mut self, blocks: usize) -> bool {
        let count = blocks.saturating_mul(self.needs.of_block());
        loop {
            let table = self.table.borrow();
            if table.free() >= count {
                return true;
            }
            let Some(oldest) = table.least_recently_used() else { return false };
            drop(table);
            self.prefixes.evict(oldest);
        }
    }

    /// Takes the pages of one block of positions from the pool. Returns `None` if they cannot be freed.
    pub(crate) fn allocate_block(&mut self) -> Option<BlockPages> {
        if !self.free_blocks(1) {
            return None;
        }
        let whole = PageSetTable::allocate(&self.table, self.needs.whole)?;
        let windowed = match self.needs.windowed {
            0 => None,
            count => Some(PageSetTable::allocate(&self.table, count)?),
        };
        Some(BlockPages { whole, windowed })
    }

    /// Creates the cache of a sequence of `count` tokens in `scope`, with the pages of its longest cached prefix.
    ///
    /// At least one token is left to forward.
    pub(crate) fn begin_sequence(
        &mut self,
        scope: CacheScope,
        tokens: impl Fn(usize) -> u32,
        count: usize,
    ) -> SequenceCache {
        let mut cache = SequenceCache::new(scope);
        let mut chain = self.prefixes.begin(scope);
        // From block `windowed_from` on, all found blocks have their windowed pages.
        let (mut found, mut usable, mut windowed_from) = (Vec::new(), 0, 0);
        for index in 0..count.saturating_sub(1) / PAGE_POSITIONS {
            let Some((cached, longer)) = self.prefixes.find(chain, &block_tokens(&tokens, index)) else {
                break;
            };
            if self.needs.windowed > 0 && !cached.has_windowed() {
                windowed_from = index + 1;
            }
            found.push((chain, cached));
            chain = longer;
            if windowed_from <= self.first_visible_block(index + 1) {
                usable = index + 1;
            }
        }
        let first_visible = self.first_visible_block(usable);
        for (index, (chain, cached)) in found.into_iter().take(usable).enumerate() {
            cache.blocks.push(self.prefixes.hold(chain, cached, index >= first_visible));
        }
        cache.cached_blocks = usable;
        cache.released_blocks = first_visible.min(usable);
        cache.length = usable * PAGE_POSITIONS;
        cache
    }

    /// Returns the first block whose windowed pages the positions behind the first `blocks` blocks attend to.
    fn first_visible_block(&self, blocks: usize) -> usize {
        self.needs.first_seen(blocks * PAGE_POSITIONS)
    }

    /// Adds the full pages of `cache`, a sequence of `tokens`, to the prefix cache. Releases windowed pages that no later
    /// position attends to.
    pub(crate) fn cache_full_pages(&mut self, cache: &mut SequenceCache, tokens: impl Fn(usize) -> u32) {
        let full = cache.length / PAGE_POSITIONS;
        if cache.cached_blocks != full {
            let mut chain = self.prefixes.begin(cache.scope);
            for (index, pages) in cache.blocks[..full].iter().enumerate() {
                chain = self.prefixes.insert(chain, block_tokens(&tokens, index), pages);
            }
            cache.cached_blocks = full;
        }
        cache.release_before(self.needs.first_seen(cache.length));
    }
}

/// Returns the tokens of block `index` of a sequence.
fn block_tokens(tokens: &impl Fn(usize) -> u32, index: usize) -> BlockTokens {
    std::array::from_fn(|offset| tokens(index * PAGE_POSITIONS + offset))
}

/// Tokens of a full block of positions.
type BlockTokens = [u32; PAGE_POSITIONS];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::backend::RELEASED_PAGE;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const PAGE: usize = PAGE_POSITIONS;

    #[test]
    fn page_size_is_the_same_in_plans_and_models() {
        assert_eq!(PAGE, remoe_plan::PAGE_POSITIONS as usize);
        assert_eq!(PAGE, remoe_model::kv_pages::PAGE_POSITIONS);
    }

    /// Forwards the sequence `tokens` from the end of `cache` on.
    fn forward(pages: &mut KvPagePool, cache: &mut SequenceCache, tokens: &[u32]) -> bool {
        if !cache.reserve(tokens.len(), pages) {
            return false;
        }
        cache.advance(tokens.len() - cache.length());
        pages.cache_full_pages(cache, |at| tokens[at]);
        true
    }

    fn begin(pages: &mut KvPagePool, scope: CacheScope, tokens: &[u32]) -> SequenceCache {
        pages.begin_sequence(scope, |at| tokens[at], tokens.len())
    }

    /// Returns the ids of a sequence's pages in its only page table.
    fn ids(cache: &SequenceCache) -> Vec<usize> {
        cache.page_tables().into_iter().next().unwrap_or_default()
    }

    #[test]
    fn cached_prefix_is_found_within_its_tenant_only() {
        let mut pages = KvPagePool::new(10, PageNeeds::default());
        let tokens: Vec<u32> = (0..3 * PAGE as u32).collect();
        let mut first = begin(&mut pages, CacheScope::default(), &tokens);
        assert_eq!(first.length(), 0);
        assert!(forward(&mut pages, &mut first, &tokens));
        // One token is left to forward.
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
            "cached although no sequence holds it"
        );
    }

    #[test]
    fn eviction_takes_oldest_unheld_pages_first() {
        let mut pages = KvPagePool::new(4, PageNeeds::default());
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
            "later blocks are evicted before earlier ones"
        );
        let mut fourth = begin(&mut pages, CacheScope::default(), &tokens(3000));
        assert!(!fourth.reserve(2 * PAGE, &mut pages), "two others hold one page each, a third holds two");
        drop(held);
        assert!(fourth.reserve(2 * PAGE, &mut pages));
    }

    /// Contents of each page: tokens as they were forwarded.
    type Contents = Vec<Vec<u32>>;

    /// Checks that the pages of a sequence of `tokens` hold what it attends to: all positions, or those of the window.
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
        /// Sequences begin, grow, fork and end in any order. A page always holds the tokens of the sequences that hold it.
        #[test]
        fn pages_hold_what_their_holders_forwarded(
            steps in prop::collection::vec((0_usize..6, 0_u32..2, 1_usize..50, 0_usize..3), 1..100),
            limit in 4_usize..24,
            (whole, windowed, window) in prop::sample::select(
                vec![(1, 0, 0), (1, 1, 1), (1, 2, 8), (1, 1, 33), (2, 1, 70), (0, 1, 40)]
            ),
        ) {
            let needs = PageNeeds { whole, windowed, window };
            let mut pages = KvPagePool::new(limit, needs);
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
                for page_ids in cache.page_tables() {
                    for at in done..tokens.len() {
                        let page = &mut contents[page_ids[at / PAGE]];
                        page.truncate(at % PAGE);
                        page.push(tokens[at]);
                    }
                }
                prop_assert!(forward(&mut pages, &mut cache, &tokens));
                let most = needs.pages(tokens.len(), tokens.len() - done);
                prop_assert!(cache.pages() <= most, "{} pages, not {most}", cache.pages());
                check(needs, &contents, &cache, &tokens);
                if end == 1 {
                    let copy = if cache.length().is_multiple_of(PAGE) { None } else { pages.allocate_block() };
                    if cache.length().is_multiple_of(PAGE) || copy.is_some() {
                        let (fork, copies) = cache.fork(copy);
                        for PageCopy { from, to } in copies {
                            contents[to] = contents[from].clone();
                        }
                        running[(slot + 1) % 6] = Some((tokens.clone(), fork));
                    }
                }
                running[slot] = (end != 0).then_some((tokens, cache));
                let caches = running.iter().flatten().flat_map(|(_, cache)| cache.page_tables());
                let held: BTreeSet<usize> = caches.flatten().filter(|id| *id != RELEASED_PAGE).collect();
                prop_assert_eq!(pages.held_pages(), held.len());
                for (tokens, cache) in running.iter().flatten() {
                    check(needs, &contents, cache, tokens);
                }
            }
            running.clear();
            prop_assert_eq!(pages.held_pages(), 0);
            prop_assert!(pages.free_blocks(limit / needs.of_block()), "pages that no sequence holds can be freed");
        }
    }

    /// If windowed pages are evicted, the prefix before them is not reused until it is computed again.
    #[test]
    fn prefix_without_window_pages_is_not_reused() {
        let needs = PageNeeds { whole: 1, windowed: 1, window: 40 };
        let mut pages = KvPagePool::new(12, needs);
        let tokens: Vec<u32> = (0..6 * PAGE as u32 + 1).collect();
        let mut first = begin(&mut pages, CacheScope::default(), &tokens);
        for block in 1..=6 {
            assert!(forward(&mut pages, &mut first, &tokens[..block * PAGE]));
        }
        assert_eq!((first.pages(), pages.held_pages()), (6 + 2, 8), "six whole pages, two within the window");
        drop(first);
        let found =
            |pages: &mut KvPagePool, count: usize| begin(pages, CacheScope::default(), &tokens[..count]);
        assert_eq!(found(&mut pages, tokens.len()).length(), 6 * PAGE);
        assert!(pages.free_blocks(2), "evicts the least recently used windowed pages");
        assert_eq!(
            found(&mut pages, 5 * PAGE + 1).length(),
            0,
            "no prefix of this length has all window pages"
        );
        let again = found(&mut pages, tokens.len());
        assert_eq!((again.length(), again.pages()), (6 * PAGE, 8), "the whole sequence has");
        drop(again);
        let mut whole = SequenceCache::new(CacheScope::default());
        for block in 1..=5 {
            assert!(forward(&mut pages, &mut whole, &tokens[..block * PAGE]));
        }
        drop(whole);
        assert_eq!(found(&mut pages, 5 * PAGE + 1).length(), 5 * PAGE, "computed again");
    }
}
