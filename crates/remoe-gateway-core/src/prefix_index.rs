//! Prefix affinity: remembers which main functions have had requests with the same prefix. Their prefix caches may
//! still have it.
//!
//! This is a guess: gateways see bytes, not tokens, and are not told of evictions. So it may only disturb the balance
//! of load within a limit.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a block of a body: about a hundred tokens.
const BLOCK_BYTES: usize = 512;
/// Largest number of blocks of a prefix.
const MAX_PREFIX_BLOCKS: usize = 128;
/// Largest number of blocks in the index, of all models of a process: about 6 MiB. The half that was used last is
/// never evicted.
const MAX_INDEXED_BLOCKS: usize = 1 << 16;
/// Largest number of main functions that are remembered for one block.
const MAX_HOLDERS: usize = 4;

/// Prefix of a request's body. Element `i` is a hash of the blocks 0 to `i` together. Empty if the body is shorter
/// than a block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PromptPrefix(Arc<[u64]>);

impl PromptPrefix {
    /// Makes the prefix of `body`. Prefixes of different tenants never match, because tenants share no prefix cache.
    pub(crate) fn new(tenant: &str, body: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        tenant.hash(&mut hasher);
        let blocks = body.chunks_exact(BLOCK_BYTES).take(MAX_PREFIX_BLOCKS).map(|block| {
            hasher.write(block);
            hasher.finish()
        });
        Self(blocks.collect())
    }
}

/// Index from prefixes to the backends that have had them, for all models of a process, so that its memory has one
/// bound. Clones share it.
#[derive(Clone, Default)]
pub struct PrefixIndex(Arc<Mutex<PrefixHolders>>);

#[derive(Default)]
struct PrefixHolders {
    /// Ids of backends by keys of blocks, the latest last. New and used entries are put here.
    young: HashMap<u64, Vec<u64>>,
    /// Older entries. They are evicted when `young` is full and takes their place.
    old: HashMap<u64, Vec<u64>>,
    /// Number of epochs so far.
    epochs: u64,
}

impl PrefixIndex {
    /// Returns an empty index for one model.
    pub(crate) fn of_model(&self) -> ModelPrefixIndex {
        ModelPrefixIndex { all: self.clone(), epoch: self.locked().next_epoch() }
    }

    fn locked(&self) -> MutexGuard<'_, PrefixHolders> {
        // A panic can only lose entries, so a poisoned lock is used as it is.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for PrefixIndex {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let locked = self.locked();
        formatter.debug_tuple("PrefixIndex").field(&(locked.young.len() + locked.old.len())).finish()
    }
}

/// Time of a model from a start of its functions until they all stop. Ids of backends are unique only within an
/// epoch.
#[derive(Debug, Clone, Copy)]
struct ModelEpoch(u64);

impl ModelEpoch {
    /// Returns the key of `block` in this epoch.
    fn key(self, block: u64) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.0, block).hash(&mut hasher);
        hasher.finish()
    }
}

/// Index from prefixes to the backends of one model.
pub(crate) struct ModelPrefixIndex {
    all: PrefixIndex,
    epoch: ModelEpoch,
}

impl ModelPrefixIndex {
    /// Returns the backend that has had the longest part of `prefix`, and of several the least busy one. `backends`
    /// are ids with numbers of requests in flight. Returns `None` if that backend has too many more requests than the
    /// least busy of all: more than `max_imbalance`, or than the number of matching blocks.
    pub(crate) fn holder(
        &self,
        prefix: &PromptPrefix,
        backends: impl Iterator<Item = (u64, usize)> + Clone,
        max_imbalance: usize,
    ) -> Option<u64> {
        let min_requests = backends.clone().map(|(_, requests)| requests).min()?;
        let mut locked = self.all.locked();
        for (index, block) in prefix.0.iter().enumerate().rev() {
            let Some(holders) = locked.holders(self.epoch.key(*block)) else { continue };
            let matching = backends.clone().filter(|(id, _)| holders.contains(id));
            let Some((id, requests)) = matching.min_by_key(|(_, requests)| *requests) else { continue };
            return (requests <= min_requests + max_imbalance.min(index + 1)).then_some(id);
        }
        None
    }

    /// Records that `backend` gets a request with `prefix`.
    pub(crate) fn record(&self, prefix: &PromptPrefix, backend: u64) {
        let mut locked = self.all.locked();
        for block in prefix.0.iter() {
            locked.add(self.epoch.key(*block), backend);
        }
    }

    /// Forgets all prefixes, because the model's functions stop. The entries stay in memory until new ones evict
    /// them.
    pub(crate) fn forget(&mut self) {
        self.epoch = self.all.locked().next_epoch();
    }
}

impl PrefixHolders {
    fn next_epoch(&mut self) -> ModelEpoch {
        self.epochs += 1;
        ModelEpoch(self.epochs)
    }

    /// Returns the backends that have had the block of `key`. Makes the entry young, so that it is not evicted with
    /// the old ones.
    fn holders(&mut self, key: u64) -> Option<&Vec<u64>> {
        if let Some(holders) = self.old.remove(&key) {
            self.put(key, holders);
        }
        self.young.get(&key)
    }

    fn add(&mut self, key: u64, backend: u64) {
        let mut holders = self.old.remove(&key).or_else(|| self.young.remove(&key)).unwrap_or_default();
        holders.retain(|holder| *holder != backend);
        if holders.len() == MAX_HOLDERS {
            holders.remove(0);
        }
        holders.push(backend);
        self.put(key, holders);
    }

    /// Inserts `key`, which is in neither map. If `young` is full, evicts all of `old`.
    fn put(&mut self, key: u64, holders: Vec<u64>) {
        if self.young.len() >= MAX_INDEXED_BLOCKS / 2 {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, holders);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a body of `shared_blocks` equal blocks, and three of the letter `own`.
    fn body(shared_blocks: usize, own: char) -> Vec<u8> {
        let mut body = vec![b'x'; shared_blocks * BLOCK_BYTES];
        body.extend(own.to_string().repeat(3 * BLOCK_BYTES).bytes());
        body
    }

    #[test]
    fn backend_with_longest_prefix_is_chosen_unless_busy() {
        let locked = PrefixIndex::default().of_model();
        let prefix_of = |shared, own| PromptPrefix::new("t", &body(shared, own));
        let idle = [(1, 0), (2, 0), (3, 0)];
        assert_eq!(locked.holder(&prefix_of(4, 'a'), idle.into_iter(), 4), None);
        locked.record(&prefix_of(2, 'b'), 1);
        locked.record(&prefix_of(4, 'c'), 2);
        assert_eq!(locked.holder(&prefix_of(4, 'a'), idle.into_iter(), 4), Some(2));
        assert_eq!(locked.holder(&prefix_of(2, 'a'), idle.into_iter(), 4), Some(1));
        assert_eq!(locked.holder(&prefix_of(0, 'a'), idle.into_iter(), 4), None);
        // Both have seen the first two blocks: the less busy one.
        assert_eq!(locked.holder(&prefix_of(2, 'a'), [(1, 2), (2, 1), (3, 0)].into_iter(), 4), Some(2));
        // A longer match permits a larger imbalance.
        assert_eq!(locked.holder(&prefix_of(4, 'a'), [(2, 4), (3, 0)].into_iter(), 4), Some(2));
        assert_eq!(locked.holder(&prefix_of(4, 'a'), [(2, 5), (3, 0)].into_iter(), 4), None);
        assert_eq!(locked.holder(&prefix_of(1, 'a'), [(2, 2), (3, 0)].into_iter(), 4), None);
        // Backends that are gone or full are not offered. Prefixes of another tenant do not match.
        assert_eq!(locked.holder(&prefix_of(4, 'a'), [(1, 0), (3, 0)].into_iter(), 4), Some(1));
        let other = PromptPrefix::new("other", &body(4, 'a'));
        assert_eq!(locked.holder(&other, idle.into_iter(), 4), None);
    }

    #[test]
    fn prefix_index_is_bounded_and_evicts_oldest_across_models() {
        let all = PrefixIndex::default();
        let (locked, other) = (all.of_model(), all.of_model());
        let prefix_of = |number: usize| PromptPrefix::new(&number.to_string(), &body(1, 'a'));
        for number in 0..MAX_INDEXED_BLOCKS {
            locked.record(&prefix_of(number), 1);
            other.record(&prefix_of(number), 3);
            locked.record(&prefix_of(0), 2);
            // A used entry becomes young again.
            locked.holder(&prefix_of(number / 2), [(1, 0)].into_iter(), 1);
            let locked = all.locked();
            assert!(locked.young.len() + locked.old.len() <= MAX_INDEXED_BLOCKS);
        }
        let find_holder = |number| locked.holder(&prefix_of(number), [(1, 0), (2, 0), (3, 0)].into_iter(), 1);
        assert_eq!(
            (find_holder(0), find_holder(1), find_holder(MAX_INDEXED_BLOCKS - 1)),
            (Some(1), None, Some(1))
        );
        let prefix = prefix_of(5);
        (10..20).for_each(|backend| locked.record(&prefix, backend));
        assert_eq!(all.locked().young.get(&locked.epoch.key(prefix.0[0])).map(Vec::len), Some(MAX_HOLDERS));
    }

    #[test]
    fn models_share_the_memory_bound_and_nothing_else() {
        let all = PrefixIndex::default();
        let (mut one, other) = (all.of_model(), all.of_model());
        let prefix = PromptPrefix::new("t", &body(2, 'a'));
        let find_holder = |locked: &ModelPrefixIndex| locked.holder(&prefix, [(1, 0), (2, 0)].into_iter(), 1);
        one.record(&prefix, 2);
        assert_eq!((find_holder(&one), find_holder(&other)), (Some(2), None), "each model has its own ids");
        other.record(&prefix, 1);
        assert_eq!((find_holder(&one), find_holder(&other)), (Some(2), Some(1)));
        one.forget();
        assert_eq!((find_holder(&one), find_holder(&other)), (None, Some(1)), "others have not slept");
    }
}
