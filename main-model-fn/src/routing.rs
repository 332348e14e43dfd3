//! Routing: selects each token's experts by the router's logits, in float32.
//!
//! On the CPU the host selects ([`RoutingRule::route`]). Devices select by operations of their own, and the host weighs the
//! selected experts ([`RoutingRule::weigh_selected`]).

use half::bf16;
use remoe_kernels::Dtype;
use remoe_model::{GroupFacts, RoutingFacts, Score};
use std::ops::Range;

/// Experts of every token in one layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Routed {
    /// Experts per token.
    pub top_k: usize,
    /// Expert ids: tokens x top_k, ascending within a token.
    pub experts: Vec<u32>,
    /// Weights of the experts' outputs, in the same order.
    pub weights: Vec<f32>,
}

impl Routed {
    /// Returns the number of tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.experts.len() / self.top_k.max(1)
    }

    /// Returns the experts and weights of the tokens in the range `tokens`.
    pub(crate) fn slice(&self, tokens: Range<usize>) -> Self {
        let slots = tokens.start * self.top_k..tokens.end * self.top_k;
        let (experts, weights) = (self.experts[slots.clone()].to_vec(), self.weights[slots].to_vec());
        Self { top_k: self.top_k, experts, weights }
    }

    /// Appends the tokens of `next`, which has the same number of experts per token.
    pub(crate) fn append(&mut self, next: Self) {
        self.top_k = next.top_k;
        self.experts.extend(next.experts);
        self.weights.extend(next.weights);
    }

    /// Returns (expert, weight) of each expert of `token`, experts ascending.
    pub(crate) fn token_experts(&self, token: usize) -> impl Iterator<Item = (u32, f32)> + '_ {
        let range = token * self.top_k..(token + 1) * self.top_k;
        self.experts[range.clone()].iter().copied().zip(self.weights[range].iter().copied())
    }
}

/// Rule by which one layer's router selects experts. Of equal scores, the lower expert id wins.
#[derive(Debug, Clone)]
pub struct RoutingRule {
    /// Number of experts of the layer.
    pub experts: usize,
    /// Number of experts that each token uses.
    pub top_k: usize,
    /// Scoring and weighting of the model family.
    pub facts: RoutingFacts,
    /// Terms added to the scores for selection only: one per expert, or none.
    pub correction: Vec<f32>,
    /// Compute dtype, to which some families round the weights.
    pub dtype: Dtype,
}

impl RoutingRule {
    /// Routes tokens by their `logits`: tokens x experts.
    pub fn route(&self, logits: &[f32]) -> Routed {
        let Self { experts, top_k, facts, .. } = self;
        let mut routed = self.empty_result(logits.len() / experts.max(&1));
        let mut scores = vec![0.0_f32; *experts];
        let mut ranks = vec![0.0_f32; *experts];
        let mut chosen: Vec<(u32, f32)> = Vec::with_capacity(*experts);
        for row in logits.chunks_exact(*experts) {
            match facts.score {
                Score::SparseMixer { .. } => {}
                Score::Softmax => softmax(row, &mut scores),
                Score::SoftmaxOfChosen | Score::Unweighted => scores.copy_from_slice(row),
                Score::Sigmoid => sigmoid(row, &mut scores),
            }
            if let Score::SparseMixer { jitter } = facts.score {
                sparsemixer(row, jitter, *top_k, &mut chosen);
            } else {
                ranks.copy_from_slice(&scores);
                ranks.iter_mut().zip(&self.correction).for_each(|(rank, correction)| *rank += correction);
                select(&ranks, *top_k, facts.groups, &mut chosen);
                chosen.iter_mut().for_each(|(expert, weight)| *weight = scores[*expert as usize]);
            }
            self.weigh(&mut chosen, &mut routed);
        }
        routed
    }

    /// Weighs experts that the device selected. `experts` and `scores`: tokens x top_k.
    pub fn weigh_selected(&self, experts: &[u32], scores: &[f32]) -> Routed {
        let mut routed = self.empty_result(experts.len() / self.top_k.max(1));
        let mut chosen = Vec::with_capacity(self.top_k);
        for (experts, scores) in experts.chunks_exact(self.top_k).zip(scores.chunks_exact(self.top_k)) {
            chosen.clear();
            chosen.extend(experts.iter().copied().zip(scores.iter().copied()));
            self.weigh(&mut chosen, &mut routed);
        }
        routed
    }

    /// Returns an empty result with capacity for `tokens` tokens.
    fn empty_result(&self, tokens: usize) -> Routed {
        Routed {
            top_k: self.top_k,
            experts: Vec::with_capacity(tokens * self.top_k),
            weights: Vec::with_capacity(tokens * self.top_k),
        }
    }

    /// Appends a token with the `chosen` experts, after turning their scores into weights.
    fn weigh(&self, chosen: &mut [(u32, f32)], routed: &mut Routed) {
        let facts = &self.facts;
        match facts.score {
            Score::SoftmaxOfChosen => softmax_in_place(chosen),
            Score::Unweighted => chosen.iter_mut().for_each(|(_, weight)| *weight = 1.0),
            Score::Softmax | Score::Sigmoid | Score::SparseMixer { .. } => {}
        }
        if facts.normalise {
            // The small term matters only if all weights are 0; the sum then stays above 0.
            let sum = chosen.iter().map(|&(_, weight)| weight).sum::<f32>() + 1e-20;
            chosen.iter_mut().for_each(|(_, weight)| *weight /= sum);
        }
        if facts.scale != 1.0 {
            let scale = facts.scale as f32;
            chosen.iter_mut().for_each(|(_, weight)| *weight *= scale);
        }
        chosen.sort_unstable_by_key(|&(expert, _)| expert);
        for &(expert, weight) in &*chosen {
            routed.experts.push(expert);
            routed.weights.push(if facts.weights_in_compute_dtype && self.dtype == Dtype::Bf16 {
                bf16::from_f32(weight).to_f32()
            } else {
                weight
            });
        }
    }
}

/// Writes the softmax of `logits` to `scores`.
fn softmax(logits: &[f32], scores: &mut [f32]) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for (score, logit) in scores.iter_mut().zip(logits) {
        *score = (logit - max).exp();
        sum += *score;
    }
    scores.iter_mut().for_each(|score| *score /= sum);
}

/// Replaces the logits in `chosen` by their softmax.
fn softmax_in_place(chosen: &mut [(u32, f32)]) {
    let max = chosen.iter().map(|&(_, logit)| logit).fold(f32::NEG_INFINITY, f32::max);
    chosen.iter_mut().for_each(|(_, weight)| *weight = (*weight - max).exp());
    let sum: f32 = chosen.iter().map(|&(_, weight)| weight).sum();
    chosen.iter_mut().for_each(|(_, weight)| *weight /= sum);
}

/// Selects experts by SparseMixer (Phi-3.5-MoE): `top_k` times the best of the remaining ones.
///
/// The weight of each is its softmax among the remaining logits that are near it.
fn sparsemixer(logits: &[f32], jitter: f64, top_k: usize, chosen: &mut Vec<(u32, f32)>) {
    let threshold = (2.0 * jitter) as f32;
    chosen.clear();
    for _ in 0..top_k {
        let remaining = || {
            let is_chosen = |expert: u32| chosen.iter().any(|&(other, _)| other == expert);
            (0..).zip(logits.iter().copied()).filter(move |&(expert, _)| !is_chosen(expert))
        };
        let Some((best, largest)) = remaining().min_by(descending) else { return };
        let is_far = |logit: f32| (largest - logit) / logit.abs().max(largest) > threshold;
        let near = remaining().filter(|&(_, logit)| !is_far(logit));
        let sum: f32 = near.map(|(_, logit)| (logit - largest).exp()).sum();
        chosen.push((best, 1.0 / sum));
    }
}

fn sigmoid(logits: &[f32], scores: &mut [f32]) {
    for (score, logit) in scores.iter_mut().zip(logits) {
        *score = 1.0 / (1.0 + (-logit).exp());
    }
}

/// Selects the `top_k` largest scores: (expert, score) in descending order of score.
fn select(scores: &[f32], top_k: usize, groups: Option<GroupFacts>, chosen: &mut Vec<(u32, f32)>) {
    chosen.clear();
    match groups {
        None => chosen.extend((0..).zip(scores.iter().copied())),
        // Group-limited routing (arXiv 2405.04434, section 2.2.2, and 2412.19437, section 2.1.2).
        Some(groups) => {
            let size = scores.len() / groups.groups;
            let mut members = Vec::with_capacity(size);
            let mut best: Vec<(u32, f32)> = (0..)
                .zip(scores.chunks_exact(size))
                .map(|(group, scores)| {
                    members.clear();
                    members.extend_from_slice(scores);
                    members.sort_unstable_by(|a: &f32, b| b.total_cmp(a));
                    (group, members.iter().take(groups.best).sum())
                })
                .collect();
            best.sort_by(descending);
            best.truncate(groups.chosen);
            for (group, _) in best {
                let first = group * size as u32;
                let members = scores.iter().skip(first as usize).take(size).copied();
                chosen.extend((first..).zip(members));
            }
        }
    }
    // Only the best top_k need an order.
    if top_k < chosen.len() {
        chosen.select_nth_unstable_by(top_k, descending);
        chosen.truncate(top_k);
    }
    chosen.sort_unstable_by(descending);
}

/// Orders by descending score, then by ascending expert id.
fn descending(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use remoe_model::{GroupFacts, Score};

    fn facts() -> RoutingFacts {
        RoutingFacts {
            score: Score::Softmax,
            bias: false,
            logits_in_float32: false,
            corrected: false,
            normalise: true,
            scale: 1.0,
            groups: None,
            weights_in_compute_dtype: false,
        }
    }

    fn route(
        logits: &[f32],
        experts: usize,
        top_k: usize,
        facts: &RoutingFacts,
        correction: &[f32],
        dtype: Dtype,
    ) -> Routed {
        let (facts, correction) = (facts.clone(), correction.to_vec());
        RoutingRule { experts, top_k, facts, correction, dtype }.route(logits)
    }

    fn chosen(logits: &[f32], top_k: usize, facts: &RoutingFacts) -> Vec<(u32, f32)> {
        route(logits, logits.len(), top_k, facts, &[], Dtype::F32).token_experts(0).collect()
    }

    #[test]
    fn equal_scores_go_to_the_lower_id() {
        let experts: Vec<u32> =
            chosen(&[1.0, 2.0, 2.0, 2.0, 0.0], 2, &facts()).into_iter().map(|(e, _)| e).collect();
        assert_eq!(experts, [1, 2]);
    }

    #[test]
    fn weights_follow_the_rule() {
        let logits = [0.0, 4.0_f32.ln(), 2.0_f32.ln(), 0.0];
        let close = |found: Vec<(u32, f32)>, expected: [(u32, f32); 2]| {
            for (found, expected) in found.iter().zip(expected) {
                assert_eq!(found.0, expected.0);
                assert!((found.1 - expected.1).abs() < 1e-6, "{found:?} {expected:?}");
            }
        };
        close(chosen(&logits, 2, &facts()), [(1, 2.0 / 3.0), (2, 1.0 / 3.0)]);
        let plain = RoutingFacts { normalise: false, scale: 4.0, ..facts() };
        close(chosen(&logits, 2, &plain), [(1, 2.0), (2, 1.0)]);
        let rounded = RoutingFacts { weights_in_compute_dtype: true, ..facts() };
        let third = route(&logits, 4, 2, &rounded, &[], Dtype::Bf16).weights[1];
        assert_eq!(third, bf16::from_f32(third).to_f32());
        assert_ne!(third, 1.0 / 3.0);
    }

    #[test]
    fn only_the_best_groups_take_part() {
        let limited = RoutingFacts { groups: Some(GroupFacts { groups: 3, chosen: 1, best: 1 }), ..facts() };
        // The best single expert is in the last group; the second best overall is not.
        let found = chosen(&[2.9, 0.0, 2.8, 0.0, 3.0, 1.0], 2, &limited);
        assert_eq!(found.iter().map(|&(expert, _)| expert).collect::<Vec<_>>(), [4, 5]);
        // The first group has the best pair.
        let pairs = RoutingFacts { groups: Some(GroupFacts { groups: 2, chosen: 1, best: 2 }), ..facts() };
        let found = chosen(&[2.9, 2.8, 0.0, 3.0, 1.0, 0.0], 2, &pairs);
        assert_eq!(found.iter().map(|&(expert, _)| expert).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn a_correction_chooses_and_does_not_weigh() {
        let sigmoid = RoutingFacts { score: Score::Sigmoid, normalise: false, corrected: true, ..facts() };
        let routed = route(&[0.0, 1.0, 2.0], 3, 1, &sigmoid, &[0.9, 0.0, 0.0], Dtype::F32);
        assert_eq!((&routed.experts[..], &routed.weights[..]), (&[0][..], &[0.5][..]));
    }

    #[test]
    fn sparsemixer_weighs_each_among_its_own() {
        let mixed = RoutingFacts { score: Score::SparseMixer { jitter: 0.1 }, normalise: false, ..facts() };
        // 9 is within a fifth of 10, 8 is on the edge, 7 is beyond; of 9 on, 7 is within 2 / 9 and 8 is near.
        let found = chosen(&[10.0, 7.0, 9.0, 8.1], 2, &mixed);
        let weight = |others: &[f32]| 1.0 / (1.0 + others.iter().map(|other| other.exp()).sum::<f32>());
        let expected = [(0, weight(&[-1.0, -1.9])), (2, weight(&[-0.9]))];
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(found.0, expected.0);
            assert!((found.1 - expected.1).abs() < 1e-6, "{found:?} {expected:?}");
        }
    }

    #[test]
    fn weights_of_the_chosen_alone() {
        let of_chosen = RoutingFacts { score: Score::SoftmaxOfChosen, normalise: false, ..facts() };
        let found = chosen(&[-90.0, 3.0_f32.ln(), -100.0, 0.0], 2, &of_chosen);
        assert_eq!((found[0].0, found[1].0), (1, 3));
        assert!((found[0].1 - 0.75).abs() < 1e-6 && (found[1].1 - 0.25).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn unweighted_experts_count_with_one() {
        let unweighted = RoutingFacts { score: Score::Unweighted, normalise: false, ..facts() };
        assert_eq!(chosen(&[-5.0, -9.0, 3.0, -5.0], 2, &unweighted), [(0, 1.0), (2, 1.0)]);
    }

    proptest! {
        #[test]
        fn experts_are_distinct_ascending_and_the_best(
            logits in prop::collection::vec(-5.0_f32..5.0, 1..20), k in 1_usize..20,
        ) {
            let top_k = k.min(logits.len());
            let found = chosen(&logits, top_k, &facts());
            prop_assert_eq!(found.len(), top_k);
            prop_assert!(found.windows(2).all(|pair| pair[0].0 < pair[1].0));
            let worst = found.iter().map(|&(e, _)| logits[e as usize]).fold(f32::INFINITY, f32::min);
            let better = logits.iter().filter(|&&logit| logit > worst).count();
            prop_assert!(better < top_k);
            let sum: f32 = found.iter().map(|&(_, weight)| weight).sum();
            prop_assert!((sum - 1.0).abs() < 1e-5);
        }
    }
}
