//! Checks whether similar prompts use similar experts: the assumption that SPS rests on (the paper's figure 3).

use crate::divergence;
use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::history::History;
use crate::phase::Phase;
use crate::random::Random;
use crate::record::ActivationRecord;
use crate::shares::Shares;
use crate::vector::dot;

/// Two prompts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PromptPair {
    /// Soft cosine similarity of the prompts.
    pub prompts: f64,
    /// Similarity of the activations: 1 - JS / ln 2, with the divergence averaged over layers.
    pub activations: f64,
}

/// Each test prompt's prefill against `each` prompts of the history, drawn at random without replacement.
///
/// # Errors
/// A test record does not belong to the model.
pub fn pairs(
    embedding: &Embedding,
    history: &History,
    tests: &[ActivationRecord],
    each: usize,
    seed: u64,
) -> Result<Vec<PromptPair>, PredictError> {
    let slots: Vec<u32> = history.slots().collect();
    let mut random = Random::new(seed);
    let mut found = Vec::with_capacity(tests.len() * each.min(slots.len()));
    for test in tests {
        let vector = embedding.prompt_vector(&test.prompt)?;
        let Some(shares) = history.shares_of(test, Phase::Prefill)? else { continue };
        for index in random.sample(slots.len(), each) {
            let Some(&slot) = slots.get(index as usize) else { continue };
            let other =
                Shares::from_weights(history.experts(), history.share_row(slot, Phase::Prefill).to_vec())?;
            found.push(PromptPair {
                prompts: f64::from(dot(&vector, history.vector(slot))),
                activations: 1.0 - divergence::mean(&shares, &other) / std::f64::consts::LN_2,
            });
        }
    }
    Ok(found)
}

/// Pearson's correlation of the two similarities; 0 where one does not vary.
#[must_use]
pub fn pearson(pairs: &[PromptPair]) -> f64 {
    let count = pairs.len().max(1) as f64;
    let mean = |of: fn(&PromptPair) -> f64| pairs.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|pair| pair.prompts), mean(|pair| pair.activations));
    let (mut xy, mut xx, mut yy) = (0.0, 0.0, 0.0);
    for pair in pairs {
        let (dx, dy) = (pair.prompts - x, pair.activations - y);
        xy += dx * dy;
        xx += dx * dx;
        yy += dy * dy;
    }
    let scale = (xx * yy).sqrt();
    if scale > 0.0 { xy / scale } else { 0.0 }
}

/// Spearman's correlation: [`pearson`] of the ranks, equal values sharing their mean rank.
#[must_use]
pub fn spearman(pairs: &[PromptPair]) -> f64 {
    let prompts = ranks(&pairs.iter().map(|pair| pair.prompts).collect::<Vec<_>>());
    let activations = ranks(&pairs.iter().map(|pair| pair.activations).collect::<Vec<_>>());
    let ranked: Vec<PromptPair> = prompts
        .into_iter()
        .zip(activations)
        .map(|(prompts, activations)| PromptPair { prompts, activations })
        .collect();
    pearson(&ranked)
}

fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    let mut first = 0;
    for run in order.chunk_by(|&a, &b| values[a] == values[b]) {
        let rank = first as f64 + (run.len() - 1) as f64 / 2.0;
        run.iter().for_each(|&index| ranks[index] = rank);
        first += run.len();
    }
    ranks
}
