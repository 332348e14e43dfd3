//! From router logits to the experts of each token. Pure, on the host, in float32.

use half::bf16;
use remoe_kernels::Dtype;
use remoe_model::RoutingFacts;

/// The experts of every token of one layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Routed {
    /// Experts per token.
    pub(crate) top_k: usize,
    /// tokens x top_k expert ids, ascending within a token.
    pub(crate) experts: Vec<u32>,
    /// The weights in the same order, as they multiply the experts' outputs.
    pub(crate) weights: Vec<f32>,
}

impl Routed {
    /// Number of tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.experts.len() / self.top_k.max(1)
    }

    /// (expert, weight) of `token`, experts ascending.
    pub(crate) fn of(&self, token: usize) -> impl Iterator<Item = (u32, f32)> + '_ {
        let range = token * self.top_k..(token + 1) * self.top_k;
        self.experts[range.clone()].iter().copied().zip(self.weights[range].iter().copied())
    }
}

/// Selects `top_k` experts for each row of `logits` (tokens x experts) by the family's rule.
/// Equal scores go to the lower id. `dtype` is the compute dtype, to which some families round
/// their weights.
pub(crate) fn route(
    logits: &[f32],
    experts: usize,
    top_k: usize,
    facts: &RoutingFacts,
    dtype: Dtype,
) -> Routed {
    let tokens = logits.len() / experts.max(1);
    let mut routed = Routed {
        top_k,
        experts: Vec::with_capacity(tokens * top_k),
        weights: Vec::with_capacity(tokens * top_k),
    };
    let mut scores = vec![0.0_f32; experts];
    let mut chosen: Vec<(u32, f32)> = Vec::with_capacity(experts);
    for row in logits.chunks_exact(experts) {
        softmax(row, &mut scores);
        select(&scores, top_k, facts, &mut chosen);
        if facts.normalise {
            let sum: f32 = chosen.iter().map(|&(_, weight)| weight).sum();
            chosen.iter_mut().for_each(|(_, weight)| *weight /= sum);
        }
        if facts.scale != 1.0 {
            let scale = facts.scale as f32;
            chosen.iter_mut().for_each(|(_, weight)| *weight *= scale);
        }
        chosen.sort_unstable_by_key(|&(expert, _)| expert);
        for &(expert, weight) in &chosen {
            routed.experts.push(expert);
            routed.weights.push(if facts.weights_in_compute_dtype && dtype == Dtype::Bf16 {
                bf16::from_f32(weight).to_f32()
            } else {
                weight
            });
        }
    }
    routed
}

fn softmax(logits: &[f32], scores: &mut [f32]) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for (score, logit) in scores.iter_mut().zip(logits) {
        *score = (logit - max).exp();
        sum += *score;
    }
    scores.iter_mut().for_each(|score| *score /= sum);
}

/// The `top_k` best (expert, score) in descending order of score.
fn select(scores: &[f32], top_k: usize, facts: &RoutingFacts, chosen: &mut Vec<(u32, f32)>) {
    chosen.clear();
    match &facts.groups {
        None => chosen.extend((0..).zip(scores.iter().copied())),
        // DeepSeek-V2's group-limited routing (arXiv 2405.04434, section 2.2.2): only the groups
        // with the best single experts take part; the others count as zero.
        Some(groups) => {
            let size = scores.len() / groups.groups;
            let mut best: Vec<(u32, f32)> = (0..)
                .zip(scores.chunks_exact(size))
                .map(|(group, scores)| (group, scores.iter().copied().fold(f32::NEG_INFINITY, f32::max)))
                .collect();
            best.sort_by(descending);
            best.truncate(groups.chosen);
            chosen.extend((0..).zip(scores.iter().copied()).map(|(expert, score)| {
                let group = expert / size as u32;
                let kept = best.iter().any(|&(kept, _)| kept == group);
                (expert, if kept { score } else { 0.0 })
            }));
        }
    }
    // Partial selection: only the best top_k need an order.
    if top_k < chosen.len() {
        chosen.select_nth_unstable_by(top_k, descending);
        chosen.truncate(top_k);
    }
    chosen.sort_unstable_by(descending);
}

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
            logits_in_float32: false,
            normalise: true,
            scale: 1.0,
            groups: None,
            weights_in_compute_dtype: false,
        }
    }

    fn chosen(logits: &[f32], top_k: usize, facts: &RoutingFacts) -> Vec<(u32, f32)> {
        route(logits, logits.len(), top_k, facts, Dtype::F32).of(0).collect()
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
        let third = route(&logits, 4, 2, &rounded, Dtype::Bf16).weights[1];
        assert_eq!(third, bf16::from_f32(third).to_f32());
        assert_ne!(third, 1.0 / 3.0);
    }

    #[test]
    fn only_the_best_groups_take_part() {
        let limited = RoutingFacts { groups: Some(GroupFacts { groups: 3, chosen: 1 }), ..facts() };
        // The best single expert is in the last group; the second best overall is not.
        let found = chosen(&[2.9, 0.0, 2.8, 0.0, 3.0, 1.0], 2, &limited);
        assert_eq!(found.iter().map(|&(expert, _)| expert).collect::<Vec<_>>(), [4, 5]);
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
