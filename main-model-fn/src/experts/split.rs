//! One layer's remote work as messages. Pure.

use super::routing::Routed;
use bytes::Bytes;
use remoe_wire::MAX_PAYLOAD;
use std::collections::BTreeMap;

/// One message's content: token rows, the experts of each, and where the answer's rows belong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) rows: Bytes,
    pub(crate) counts: Vec<u32>,
    pub(crate) experts: Vec<u32>,
    /// Per answer row: the index of its (token, expert) pair in [`Routed`].
    pub(crate) slots: Vec<u32>,
}

/// (token, expert) pairs that go to remote functions: slots of [`Routed`], ascending.
pub(crate) fn remote_slots(routed: &Routed, is_remote: impl Fn(u32) -> bool) -> Vec<u32> {
    (0..).zip(&routed.experts).filter(|&(_, &expert)| is_remote(expert)).map(|(slot, _)| slot).collect()
}

/// Splits `slots` over `replicas` interchangeable replicas: whole experts, longest processing time
/// first by true token counts, ties by expert id, then replica index. Returns each replica's slots,
/// ascending.
///
/// Graham's LPT rule (SIAM J. Appl. Math. 17, 1969), as the Remoe paper applies it to experts.
pub(crate) fn split(routed: &Routed, slots: &[u32], replicas: usize) -> Vec<Vec<u32>> {
    let mut tokens: BTreeMap<u32, usize> = BTreeMap::new();
    for &slot in slots {
        *tokens.entry(routed.experts[slot as usize]).or_default() += 1;
    }
    let mut order: Vec<(u32, usize)> = tokens.iter().map(|(&expert, &count)| (expert, count)).collect();
    order.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    let mut loads = vec![0_usize; replicas];
    let mut replica_of: BTreeMap<u32, usize> = BTreeMap::new();
    for (expert, count) in order {
        let (replica, _) =
            loads.iter().enumerate().min_by_key(|&(replica, load)| (*load, replica)).unwrap_or((0, &0));
        loads[replica] += count;
        replica_of.insert(expert, replica);
    }
    let mut parts = vec![Vec::new(); replicas];
    for &slot in slots {
        let expert = routed.experts[slot as usize];
        parts[replica_of.get(&expert).copied().unwrap_or(0)].push(slot);
    }
    parts
}

/// Cuts `slots` (ascending) into messages whose request and answer both stay within the wire's
/// payload limit, gathering each token's row from `inputs` once per message.
pub(crate) fn messages(routed: &Routed, slots: &[u32], inputs: &[u8], row_bytes: usize) -> Vec<Message> {
    let most_rows = (MAX_PAYLOAD / row_bytes).max(1);
    slots
        // As many answer rows at most; there are never more token rows than those.
        .chunks(most_rows)
        .map(|slots| {
            let mut rows = Vec::with_capacity(slots.len().min(routed.tokens()) * row_bytes);
            let mut counts = Vec::with_capacity(slots.len());
            for token in slots.chunk_by(|a, b| *a as usize / routed.top_k == *b as usize / routed.top_k) {
                let index = token[0] as usize / routed.top_k;
                rows.extend_from_slice(&inputs[index * row_bytes..][..row_bytes]);
                counts.push(token.len() as u32);
            }
            Message {
                rows: rows.into(),
                counts,
                experts: slots.iter().map(|&slot| routed.experts[slot as usize]).collect(),
                slots: slots.to_vec(),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use proptest::prelude::*;

    fn routed(tokens: usize, experts: u32, top_k: usize, seed: u64) -> Routed {
        let mut chosen = Vec::new();
        for token in 0..tokens as u64 {
            let mut ids: Vec<u32> = (0..experts).collect();
            ids.sort_by_key(|&id| {
                (seed ^ token).wrapping_mul(u64::from(id) * 2 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20
            });
            ids.truncate(top_k);
            ids.sort_unstable();
            chosen.extend(ids);
        }
        let weights = vec![1.0; chosen.len()];
        Routed { top_k, experts: chosen, weights }
    }

    #[test]
    fn a_token_travels_once_and_answers_stay_below_the_limit() {
        let row_bytes = MAX_PAYLOAD / 3;
        let routed = routed(2, 4, 3, 1);
        let inputs = [vec![1; row_bytes], vec![2; row_bytes]].concat();
        let slots = remote_slots(&routed, |_| true);
        let messages = messages(&routed, &slots, &inputs, row_bytes);
        assert_eq!(messages.len(), 2);
        assert_eq!(messages[0].counts, [3]);
        assert_eq!(messages[0].rows.len(), row_bytes);
        assert_eq!(messages[1].rows[0], 2);
    }

    proptest! {
        #[test]
        fn every_pair_goes_once_and_loads_are_balanced(
            tokens in 1_usize..40, experts in 1_u32..12, k in 1_usize..6, replicas in 1_usize..4, seed: u64, remote_from in 0_u32..12,
        ) {
            let routed = routed(tokens, experts, k.min(experts as usize), seed);
            let slots = remote_slots(&routed, |expert| expert >= remote_from);
            let parts = split(&routed, &slots, replicas);
            let mut all: Vec<u32> = parts.concat();
            all.sort_unstable();
            prop_assert_eq!(&all, &slots);
            let weight = |expert: u32| slots.iter().filter(|&&slot| routed.experts[slot as usize] == expert).count();
            let heaviest = (0..experts).map(weight).max().unwrap_or(0);
            let largest = parts.iter().map(Vec::len).max().unwrap_or(0);
            // Graham's bound on the largest load.
            prop_assert!(largest * replicas <= slots.len() + (replicas - 1) * heaviest);
            let row_bytes = 8;
            let inputs: Vec<u8> = (0..tokens * row_bytes).map(|i| (i / row_bytes) as u8).collect();
            for part in &parts {
                for message in messages(&routed, part, &inputs, row_bytes) {
                    let mut row = 0;
                    let mut slots = message.slots.iter();
                    for &count in &message.counts {
                        for _ in 0..count {
                            let slot = *slots.next().unwrap() as usize;
                            prop_assert_eq!(message.rows[row * row_bytes] as usize, slot / routed.top_k);
                        }
                        row += 1;
                    }
                    prop_assert!(slots.next().is_none());
                    prop_assert_eq!(message.rows.len(), row * row_bytes);
                }
            }
        }
    }
}
