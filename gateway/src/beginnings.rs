//! Which main function has seen what begins like a request: its keys and values may still be there.
//!
//! A guess, and no more: gateways see bytes, not tokens, and forget nothing when a function does. A wrong one costs the
//! balance that it is allowed to disturb.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Bytes of a body that are compared as one: about a hundred tokens.
const BLOCK: usize = 512;
/// Blocks of a body that are compared.
const MOST_BLOCKS: usize = 128;
/// Beginnings that are remembered of one model: half of them at least, by what was last asked.
const MOST_KNOWN: usize = 1 << 14;
/// Main functions that are remembered of one beginning.
const MOST_HOLDERS: usize = 4;

/// How the body of a request begins: for each of its first blocks what names the body as far as its end. Empty where it is
/// shorter than a block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Beginning(Arc<[u64]>);

impl Beginning {
    /// That of `body`, which `tenant` sent: functions keep what one tenant's requests share apart from others'.
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

/// Who has seen which beginnings.
#[derive(Default)]
pub(crate) struct Beginnings {
    /// The ids of backends, the latest last.
    young: HashMap<u64, Vec<u64>>,
    /// What was asked before as many others as `young` may have.
    old: HashMap<u64, Vec<u64>>,
}

impl Beginnings {
    /// Those of `backends` (their ids, with the requests that each has) that have seen the most of `beginning`: the least
    /// busy of them, where it has not too many more than the least busy of all. A longer beginning may take more; all
    /// together at most `most` more.
    pub(crate) fn holder(
        &mut self,
        beginning: &Beginning,
        backends: impl Iterator<Item = (u64, usize)> + Clone,
        most: usize,
    ) -> Option<u64> {
        let least = backends.clone().map(|(_, requests)| requests).min()?;
        for (index, block) in beginning.0.iter().enumerate().rev() {
            self.rejuvenate(*block);
            let Some(holders) = self.young.get(block) else { continue };
            let there = backends.clone().filter(|(id, _)| holders.contains(id));
            let Some((id, requests)) = there.min_by_key(|(_, requests)| *requests) else { continue };
            return (requests <= least + most.min(index + 1)).then_some(id);
        }
        None
    }

    /// What was asked for again is not forgotten with the old.
    fn rejuvenate(&mut self, block: u64) {
        if let Some(holders) = self.old.remove(&block) {
            self.young.entry(block).or_insert(holders);
        }
    }

    /// `backend` sees `beginning`.
    pub(crate) fn seen(&mut self, beginning: &Beginning, backend: u64) {
        for block in beginning.0.iter() {
            if self.young.len() >= MOST_KNOWN / 2 {
                self.old = std::mem::take(&mut self.young);
            }
            self.rejuvenate(*block);
            let holders = self.young.entry(*block).or_default();
            holders.retain(|holder| *holder != backend);
            if holders.len() == MOST_HOLDERS {
                holders.remove(0);
            }
            holders.push(backend);
        }
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
        let mut known = Beginnings::default();
        let of = |shared, own| Beginning::of("t", &body(shared, own));
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
        // One that is gone, or has no room, is not among them; what another tenant sent is nobody's.
        assert_eq!(known.holder(&of(4, 'a'), [(1, 0), (3, 0)].into_iter(), 4), Some(1));
        let other = Beginning::of("other", &body(4, 'a'));
        assert_eq!(known.holder(&other, idle.into_iter(), 4), None);
    }

    #[test]
    fn what_is_remembered_is_bounded_and_the_latest() {
        let mut known = Beginnings::default();
        let of = |number: usize| Beginning::of(&number.to_string(), &body(1, 'a'));
        for number in 0..MOST_KNOWN {
            known.seen(&of(number), 1);
            known.seen(&of(0), 2);
            assert!(known.young.len() + known.old.len() <= MOST_KNOWN);
        }
        let mut asked = |number| known.holder(&of(number), [(1, 0), (2, 0)].into_iter(), 1);
        assert_eq!((asked(0), asked(1), asked(MOST_KNOWN - 1)), (Some(1), None, Some(1)));
        let one = of(5);
        (10..20).for_each(|backend| known.seen(&one, backend));
        assert_eq!(known.young.get(&one.0[0]).map(Vec::len), Some(MOST_HOLDERS));
    }
}
