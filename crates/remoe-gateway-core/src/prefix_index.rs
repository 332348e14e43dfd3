//! Prefix affinity: remembers which main functions have seen the beginning of a request. Their prefix cache may still
//! hold it.
//!
//! A guess, and no more: gateways see bytes, not tokens, and do not learn what a function evicts. A wrong guess costs
//! the balance that it is allowed to disturb.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a body that are compared as one: about a hundred tokens.
const BLOCK: usize = 512;
/// Blocks of a body that are compared.
const MOST_BLOCKS: usize = 128;
/// Blocks that are remembered in a process, of all its models: half of them at least, by what was last asked. About 6
/// MiB.
const MOST_KNOWN: usize = 1 << 16;
/// Main functions that are remembered of one beginning.
const MOST_HOLDERS: usize = 4;

/// How the body of a request begins: for each of its first blocks what names the body as far as its end. Empty where it
/// is shorter than a block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PromptPrefix(Arc<[u64]>);

impl PromptPrefix {
    /// Returns the beginning of `body`, which `tenant` sent: the prefix caches of functions are separate for each
    /// tenant.
    pub(crate) fn of(tenant: &str, body: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        tenant.hash(&mut hasher);
        let blocks = body.chunks_exact(BLOCK).take(MOST_BLOCKS).map(|block| {
            hasher.write(block);
            hasher.finish()
        });
        Self(blocks.collect())
    }
}

/// Backends by the beginnings that they have seen, for all models of a process: memory has one bound, however many
/// models there are. Clones share it.
#[derive(Clone, Default)]
pub struct PrefixIndex(Arc<Mutex<PrefixHolders>>);

#[derive(Default)]
struct PrefixHolders {
    /// The ids of backends by keys of blocks, the latest last.
    young: HashMap<u64, Vec<u64>>,
    /// Entries that were last used before as many others as `young` may have.
    old: HashMap<u64, Vec<u64>>,
    /// Lives that have begun.
    lives: u64,
}

impl PrefixIndex {
    /// Returns the empty memory of one model.
    pub(crate) fn of_model(&self) -> ModelPrefixIndex {
        ModelPrefixIndex { all: self.clone(), life: self.known().begin() }
    }

    fn known(&self) -> MutexGuard<'_, PrefixHolders> {
        // Every change of it is whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for PrefixIndex {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let known = self.known();
        formatter.debug_tuple("Beginnings").field(&(known.young.len() + known.old.len())).finish()
    }
}

/// A model from when its functions start until they have stopped: ids of backends mean something within one alone.
#[derive(Debug, Clone, Copy)]
struct ModelLife(u64);

impl ModelLife {
    /// Returns the key for `block` of a request in this life.
    fn key(self, block: u64) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.0, block).hash(&mut hasher);
        hasher.finish()
    }
}

/// Backends of one model by the beginnings that they have seen.
pub(crate) struct ModelPrefixIndex {
    all: PrefixIndex,
    life: ModelLife,
}

impl ModelPrefixIndex {
    /// Returns the one of `backends` (ids, with the requests that each has) that has seen the most of `beginning`; of
    /// several, the least busy. None if it has too many more requests than the least busy of all. A longer beginning
    /// may take more; all together at most `most` more.
    pub(crate) fn holder(
        &self,
        beginning: &PromptPrefix,
        backends: impl Iterator<Item = (u64, usize)> + Clone,
        most: usize,
    ) -> Option<u64> {
        let least = backends.clone().map(|(_, requests)| requests).min()?;
        let mut known = self.all.known();
        for (index, block) in beginning.0.iter().enumerate().rev() {
            let Some(holders) = known.holders(self.life.key(*block)) else { continue };
            let there = backends.clone().filter(|(id, _)| holders.contains(id));
            let Some((id, requests)) = there.min_by_key(|(_, requests)| *requests) else { continue };
            return (requests <= least + most.min(index + 1)).then_some(id);
        }
        None
    }

    /// Notes that `backend` sees `beginning`.
    pub(crate) fn seen(&self, beginning: &PromptPrefix, backend: u64) {
        let mut known = self.all.known();
        for block in beginning.0.iter() {
            known.add(self.life.key(*block), backend);
        }
    }

    /// Forgets everything, for functions that stop: those that start next have seen nothing. Old entries are evicted as
    /// new requests come.
    pub(crate) fn forget(&mut self) {
        self.life = self.all.known().begin();
    }
}

impl PrefixHolders {
    fn begin(&mut self) -> ModelLife {
        self.lives += 1;
        ModelLife(self.lives)
    }

    /// Returns the backends that have seen `key`. An entry that is used again is not evicted with the old ones.
    fn holders(&mut self, key: u64) -> Option<&Vec<u64>> {
        if let Some(holders) = self.old.remove(&key) {
            self.put(key, holders);
        }
        self.young.get(&key)
    }

    fn add(&mut self, key: u64, backend: u64) {
        let mut holders = self.old.remove(&key).or_else(|| self.young.remove(&key)).unwrap_or_default();
        holders.retain(|holder| *holder != backend);
        if holders.len() == MOST_HOLDERS {
            holders.remove(0);
        }
        holders.push(backend);
        self.put(key, holders);
    }

    /// Inserts `key`, which is in neither half.
    fn put(&mut self, key: u64, holders: Vec<u64>) {
        if self.young.len() >= MOST_KNOWN / 2 {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, holders);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(shared: usize, own: char) -> Vec<u8> {
        let mut body = vec![b'x'; shared * BLOCK];
        body.extend(own.to_string().repeat(3 * BLOCK).bytes());
        body
    }

    #[test]
    fn who_has_seen_the_most_is_chosen_unless_it_is_busy() {
        let known = PrefixIndex::default().of_model();
        let of = |shared, own| PromptPrefix::of("t", &body(shared, own));
        let idle = [(1, 0), (2, 0), (3, 0)];
        assert_eq!(known.holder(&of(4, 'a'), idle.into_iter(), 4), None);
        known.seen(&of(2, 'b'), 1);
        known.seen(&of(4, 'c'), 2);
        assert_eq!(known.holder(&of(4, 'a'), idle.into_iter(), 4), Some(2));
        assert_eq!(known.holder(&of(2, 'a'), idle.into_iter(), 4), Some(1));
        assert_eq!(known.holder(&of(0, 'a'), idle.into_iter(), 4), None);
        // Both have seen the first two blocks: the less busy one.
        assert_eq!(known.holder(&of(2, 'a'), [(1, 2), (2, 1), (3, 0)].into_iter(), 4), Some(2));
        // A long beginning is worth more of a wait than a short one, and none is worth any.
        assert_eq!(known.holder(&of(4, 'a'), [(2, 4), (3, 0)].into_iter(), 4), Some(2));
        assert_eq!(known.holder(&of(4, 'a'), [(2, 5), (3, 0)].into_iter(), 4), None);
        assert_eq!(known.holder(&of(1, 'a'), [(2, 2), (3, 0)].into_iter(), 4), None);
        // A backend that is gone, or has no room, is not among them; what another tenant sent does not count.
        assert_eq!(known.holder(&of(4, 'a'), [(1, 0), (3, 0)].into_iter(), 4), Some(1));
        let other = PromptPrefix::of("other", &body(4, 'a'));
        assert_eq!(known.holder(&other, idle.into_iter(), 4), None);
    }

    #[test]
    fn prefix_index_is_bounded_and_evicts_oldest_across_models() {
        let all = PrefixIndex::default();
        let (known, other) = (all.of_model(), all.of_model());
        let of = |number: usize| PromptPrefix::of(&number.to_string(), &body(1, 'a'));
        for number in 0..MOST_KNOWN {
            known.seen(&of(number), 1);
            other.seen(&of(number), 3);
            known.seen(&of(0), 2);
            // What is found again is young again.
            known.holder(&of(number / 2), [(1, 0)].into_iter(), 1);
            let known = all.known();
            assert!(known.young.len() + known.old.len() <= MOST_KNOWN);
        }
        let asked = |number| known.holder(&of(number), [(1, 0), (2, 0), (3, 0)].into_iter(), 1);
        assert_eq!((asked(0), asked(1), asked(MOST_KNOWN - 1)), (Some(1), None, Some(1)));
        let one = of(5);
        (10..20).for_each(|backend| known.seen(&one, backend));
        assert_eq!(all.known().young.get(&known.life.key(one.0[0])).map(Vec::len), Some(MOST_HOLDERS));
    }

    #[test]
    fn models_share_the_room_and_nothing_else() {
        let all = PrefixIndex::default();
        let (mut one, other) = (all.of_model(), all.of_model());
        let beginning = PromptPrefix::of("t", &body(2, 'a'));
        let asked = |known: &ModelPrefixIndex| known.holder(&beginning, [(1, 0), (2, 0)].into_iter(), 1);
        one.seen(&beginning, 2);
        assert_eq!((asked(&one), asked(&other)), (Some(2), None), "ids are each model's own");
        other.seen(&beginning, 1);
        assert_eq!((asked(&one), asked(&other)), (Some(2), Some(1)));
        one.forget();
        assert_eq!((asked(&one), asked(&other)), (None, Some(1)), "others have not slept");
    }
}
