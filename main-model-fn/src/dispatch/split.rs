//! Splits one layer's remote work over replicas and into messages.

use super::hosts::LayerHosts;
use super::pace::ReplicaPace;
use crate::routing::Routed;
use bytes::Bytes;
use remoe_plan::longest_first_beside;
use remoe_proto::MAX_PAYLOAD;
use std::collections::BTreeMap;

/// Rows whose computation takes as long as reading an expert's weights from memory: 6 bytes per (hidden, width) in
/// bfloat16 against 6 operations, at about 25 GB/s and 400 GFLOP/s.
const READ_UNITS: u64 = 16;

/// Most tokens of a call that counts as decoding. Such a call goes to several replicas only if that pays off; a larger
/// call always goes to all.
const DECODE_TOKENS: usize = 16;

/// Engine time that one more message costs, in seconds: writing it, reading its answer, and the wake-ups.
const MESSAGE_SECONDS: f64 = 1e-4;

/// Factor by which the gain of a split must exceed the cost of its messages.
const MIN_GAIN: f64 = 2.0;

/// Returns the units of work of `rows` rows for one expert; one unit is the computation of one row.
pub(super) fn work_units(rows: u64) -> u64 {
    READ_UNITS + rows
}

/// Content of one message: token rows, the experts of each, and the slots of the answer's rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    /// Hidden states: one row per token, compute dtype, little endian.
    pub(crate) rows: Bytes,
    /// Number of experts per token.
    pub(crate) counts: Vec<u32>,
    /// Expert ids, token by token.
    pub(crate) experts: Vec<u32>,
    /// Slot of each answer row: index of its (token, expert) pair in [`Routed`].
    pub(crate) slots: Vec<u32>,
}

impl Message {
    /// Returns the message's work: rows to compute, and reads of experts as equivalent rows.
    pub(crate) fn units(&self) -> u64 {
        let mut experts = self.experts.clone();
        experts.sort_unstable();
        experts.chunk_by(|a, b| a == b).map(|rows| work_units(rows.len() as u64)).sum()
    }
}

/// Returns the slots of remote experts by host class; ascending.
pub(crate) fn remote_slots(routed: &Routed, hosts: &LayerHosts) -> Vec<Vec<u32>> {
    let mut slots = vec![Vec::new(); hosts.class_count()];
    for (slot, &expert) in (0..).zip(&routed.experts) {
        if let Some(class) = hosts.class_of(expert) {
            slots[class].push(slot);
        }
    }
    slots
}

/// Returns the number of tokens of each expert among `slots`.
fn tokens_by_expert(routed: &Routed, slots: &[u32]) -> BTreeMap<u32, u64> {
    let mut tokens = BTreeMap::new();
    for &slot in slots {
        *tokens.entry(routed.experts[slot as usize]).or_default() += 1;
    }
    tokens
}

/// Returns the number of replicas, at most `replicas`, that `slots` are split over; at least 1.
///
/// A prompt goes to all replicas. Decoding goes to as many as save more compute time than their messages cost, given the
/// slowest replica's `pace`.
pub(crate) fn part_count(routed: &Routed, slots: &[u32], replicas: usize, pace: ReplicaPace) -> usize {
    if routed.tokens() > DECODE_TOKENS || replicas <= 1 {
        return replicas.max(1);
    }
    let loads: Vec<u64> = tokens_by_expert(routed, slots).into_values().map(work_units).collect();
    let all: u64 = loads.iter().sum();
    let Some(unsplit_seconds) = pace.best_seconds(all) else { return 1 };
    let gain = |parts: usize| {
        // Experts are not divided: a part has at least the largest expert, and at least an equal share.
        let equal = all.div_ceil(parts as u64);
        let largest = loads.iter().copied().max().unwrap_or(0).max(equal);
        let saved = unsplit_seconds - pace.best_seconds(largest).unwrap_or(unsplit_seconds);
        saved - MIN_GAIN * MESSAGE_SECONDS * (parts - 1) as f64
    };
    let max_parts = replicas.min(loads.len()).max(1);
    (2..=max_parts)
        .filter(|&parts| gain(parts) > 0.0)
        .max_by(|&a, &b| gain(a).total_cmp(&gain(b)))
        .unwrap_or(1)
}

/// Splits `slots` over interchangeable replicas that have `in_flight` units of work each.
///
/// Experts are not divided. They are assigned by longest processing time first (LPT), by token counts; ties go to the
/// lower expert id, then to the lower replica index. Returns each replica's slots, ascending; without replicas, all
/// slots in one part.
///
/// Graham's LPT rule (SIAM J. Appl. Math. 17, 1969), as the Remoe paper applies it to experts.
pub(crate) fn split(routed: &Routed, slots: &[u32], in_flight: &[u64]) -> Vec<Vec<u32>> {
    if in_flight.len() <= 1 {
        return vec![slots.to_vec()];
    }
    let experts = tokens_by_expert(routed, slots);
    let weights: Vec<f64> = experts.values().map(|&count| work_units(count) as f64).collect();
    let in_flight: Vec<f64> = in_flight.iter().map(|&units| units as f64).collect();
    let assigned = longest_first_beside(&weights, &in_flight);
    let mut part_of = vec![0; experts.len()];
    for (part, replica) in assigned.iter().enumerate() {
        for &item in &replica.items {
            part_of[item] = part;
        }
    }
    let part_of: BTreeMap<u32, usize> = experts.into_keys().zip(part_of).collect();
    let mut parts = vec![Vec::new(); in_flight.len()];
    for &slot in slots {
        let part = part_of.get(&routed.experts[slot as usize]).copied().unwrap_or(0);
        parts[part].push(slot);
    }
    parts
}

/// Cuts `slots` (ascending) into messages whose request and answer both fit into the wire's payload limit. A message
/// contains each of its tokens' rows of `inputs` once.
pub(crate) fn messages(routed: &Routed, slots: &[u32], inputs: &[u8], row_bytes: usize) -> Vec<Message> {
    let max_rows = (MAX_PAYLOAD / row_bytes).max(1);
    slots
        // A message never has more token rows than answer rows.
        .chunks(max_rows)
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
    use crate::dispatch::hosts::layer_hosts;
    use crate::routing_check::RemoteSets;
    use proptest::prelude::*;
    use remoe_proto::v1::LayerExperts;
    use std::collections::BTreeSet;

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

    /// Returns the hosts of the `remote` experts if each endpoint hosts one of `sets`.
    fn hosts(remote: &[u32], sets: &[Vec<u32>]) -> LayerHosts {
        let sets: Vec<[LayerExperts; 1]> =
            sets.iter().map(|set| [LayerExperts { layer: 0, experts: set.clone() }]).collect();
        let remote = RemoteSets::from([(0, remote.iter().copied().collect())]);
        layer_hosts(&remote, sets.iter().map(<[_; 1]>::as_slice)).remove(&0).unwrap()
    }

    /// Returns the slots of the experts from `first` on.
    fn pairs_from(routed: &Routed, first: u32) -> Vec<u32> {
        let remote: Vec<u32> = (first..64).collect();
        remote_slots(routed, &hosts(&remote, &[])).concat()
    }

    #[test]
    fn token_is_sent_once_and_answers_stay_below_the_limit() {
        let row_bytes = MAX_PAYLOAD / 3;
        let routed = routed(2, 4, 3, 1);
        let inputs = [vec![1; row_bytes], vec![2; row_bytes]].concat();
        let slots = pairs_from(&routed, 0);
        let messages = messages(&routed, &slots, &inputs, row_bytes);
        assert_eq!(messages.len(), 2);
        assert_eq!(messages[0].counts, [3]);
        assert_eq!(messages[0].rows.len(), row_bytes);
        assert_eq!(messages[1].rows[0], 2);
    }

    #[test]
    fn decoding_is_split_if_computing_takes_longer_than_messages() {
        let at = |nanoseconds: u64| {
            let mut pace = ReplicaPace::default();
            pace.observe(1000, std::time::Duration::from_micros(nanoseconds));
            pace
        };
        // 8 experts of one token: 136 units.
        let one = routed(1, 64, 8, 1);
        let slots = pairs_from(&one, 0);
        assert_eq!(part_count(&one, &slots, 4, ReplicaPace::default()), 1, "the pace is unknown");
        assert_eq!(part_count(&one, &slots, 1, at(1 << 20)), 1);
        assert_eq!(part_count(&one, &slots, 4, at(100)), 1, "14 us of work");
        assert_eq!(part_count(&one, &slots, 4, at(4_000)), 2, "544 us of work");
        assert_eq!(part_count(&one, &slots, 4, at(1 << 20)), 4, "143 ms of work");
        assert_eq!(part_count(&one, &slots, 99, at(1 << 30)), 8, "never more than experts");
        // One expert cannot be split.
        let all_in_one = Routed { top_k: 1, experts: vec![3; 16], weights: vec![1.0; 16] };
        let slots = pairs_from(&all_in_one, 0);
        assert_eq!(part_count(&all_in_one, &slots, 4, at(1 << 30)), 1);
        // A prompt always goes to all.
        let prompt = routed(17, 64, 8, 1);
        let slots = pairs_from(&prompt, 0);
        assert_eq!(part_count(&prompt, &slots, 3, ReplicaPace::default()), 3);
        assert_eq!(part_count(&prompt, &slots, 0, ReplicaPace::default()), 1);
    }

    #[test]
    fn work_in_flight_counts_in_the_split() {
        let routed = Routed { top_k: 1, experts: vec![0, 1, 2], weights: vec![1.0; 3] };
        assert_eq!(
            split(&routed, &[0, 1, 2], &[0, 0]),
            [vec![0, 2], vec![1]],
            "ties: lower expert, then part"
        );
        assert_eq!(split(&routed, &[0, 1, 2], &[30, 0]), [vec![2], vec![0, 1]]);
        assert_eq!(split(&routed, &[0, 1, 2], &[1000, 0]), [vec![], vec![0, 1, 2]]);
        assert_eq!(split(&routed, &[1, 2], &[]), [vec![1, 2]], "without replicas, one part");
    }

    proptest! {
        #[test]
        fn every_pair_goes_once_to_a_present_host(
            tokens in 1_usize..40,
            experts in 1_u32..12,
            k in 1_usize..6,
            seed: u64,
            remote in prop::collection::btree_set(0_u32..12, 1..12),
            sets in prop::collection::vec(prop::collection::btree_set(0_u32..12, 0..12), 0..6),
            down in prop::collection::btree_set(0_usize..6, 0..4),
        ) {
            let routed = routed(tokens, experts, k.min(experts as usize), seed);
            let remote: Vec<u32> = remote.into_iter().collect();
            let listed: Vec<Vec<u32>> = sets.iter().map(|set| set.iter().copied().collect()).collect();
            let hosts = hosts(&remote, &listed);
            let mut in_flight = vec![0; sets.len()];
            let (mut placed, mut left) = (BTreeSet::new(), BTreeSet::<u32>::new());
            for (class, slots) in remote_slots(&routed, &hosts).iter().enumerate() {
                let mut ready = hosts.hosts_of_class(class).to_vec();
                ready.retain(|host| !down.contains(host));
                ready.sort_by_key(|&host| in_flight[host]);
                let loads: Vec<u64> = ready.iter().map(|&host| in_flight[host]).collect();
                let parts = split(&routed, slots, &loads);
                prop_assert_eq!(parts.len(), ready.len().max(1));
                for (part, slots) in parts.iter().enumerate() {
                    let Some(&host) = ready.get(part) else {
                        left.extend(slots);
                        continue;
                    };
                    for &slot in slots {
                        prop_assert!(sets[host].contains(&routed.experts[slot as usize]));
                        prop_assert!(placed.insert(slot), "slot {slot} goes twice");
                    }
                    in_flight[host] += super::tokens_by_expert(&routed, slots).into_values().map(work_units).sum::<u64>();
                }
            }
            for (slot, expert) in (0..).zip(&routed.experts) {
                let is_hosted = (0..sets.len()).any(|host| sets[host].contains(expert) && !down.contains(&host));
                let is_remote = remote.contains(expert);
                prop_assert_eq!(placed.contains(&slot), is_remote && is_hosted);
                prop_assert_eq!(left.contains(&slot), is_remote && !is_hosted);
            }
        }

        #[test]
        fn every_pair_goes_once_and_loads_are_balanced(
            tokens in 1_usize..40, experts in 1_u32..12, k in 1_usize..6, replicas in 1_usize..4, seed: u64, remote_from in 0_u32..12,
        ) {
            let routed = routed(tokens, experts, k.min(experts as usize), seed);
            let slots = pairs_from(&routed, remote_from);
            let parts = split(&routed, &slots, &vec![0; replicas]);
            let mut all: Vec<u32> = parts.concat();
            all.sort_unstable();
            prop_assert_eq!(&all, &slots);
            let loads = |slots: &[u32]| -> Vec<u64> { super::tokens_by_expert(&routed, slots).into_values().map(work_units).collect() };
            let heaviest = loads(&slots).into_iter().max().unwrap_or(0);
            let largest = parts.iter().map(|part| loads(part).iter().sum()).max().unwrap_or(0);
            let all: u64 = loads(&slots).iter().sum();
            // Graham's bound on the largest load.
            prop_assert!(largest * replicas as u64 <= all + (replicas as u64 - 1) * heaviest);
            let row_bytes = 8;
            let inputs: Vec<u8> = (0..tokens * row_bytes).map(|i| (i / row_bytes) as u8).collect();
            for (part, load) in parts.iter().zip(parts.iter().map(|part| loads(part).iter().sum::<u64>())) {
                let units: u64 = messages(&routed, part, &inputs, row_bytes).iter().map(Message::units).sum();
                prop_assert_eq!(units, load);
            }
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
