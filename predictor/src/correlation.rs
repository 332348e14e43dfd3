//! Correlation between the similarity of prompts and of their expert usage: the assumption behind SPS (figure 3 of
//! the paper).

use crate::divergence;
use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::history::History;
use crate::phase::Phase;
use crate::random::Random;
use crate::record::ActivationRecord;
use crate::shares::UsageShares;
use crate::vector::dot;

/// Similarities of two prompts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PromptPair {
    /// Soft cosine similarity of the prompts.
    pub prompt_similarity: f64,
    /// Similarity of the activations: 1 - JS / ln 2, with the divergence averaged over layers.
    pub activation_similarity: f64,
}

/// Compares the prefill of each test prompt with `per_test` prompts of the history, drawn at random without
/// replacement.
///
/// # Errors
/// A test record has another shape than the model.
pub fn pairs(
    embedding: &Embedding,
    history: &History,
    tests: &[ActivationRecord],
    per_test: usize,
    seed: u64,
) -> Result<Vec<PromptPair>, PredictError> {
    let slots: Vec<u32> = history.slots().collect();
    let mut random = Random::new(seed);
    let mut pairs = Vec::with_capacity(tests.len() * per_test.min(slots.len()));
    for test in tests {
        let vector = embedding.prompt_vector(&test.prompt)?;
        let Some(shares) = history.shares_of(test, Phase::Prefill)? else { continue };
        for index in random.sample(slots.len(), per_test) {
            let Some(&slot) = slots.get(index as usize) else { continue };
            let other = UsageShares::from_weights(
                history.experts(),
                history.share_row(slot, Phase::Prefill).to_vec(),
            )?;
            pairs.push(PromptPair {
                prompt_similarity: f64::from(dot(&vector, history.vector(slot))),
                activation_similarity: 1.0 - divergence::mean(&shares, &other) / std::f64::consts::LN_2,
            });
        }
    }
    Ok(pairs)
}

/// Returns Pearson's correlation of the two similarities, 0 if one is constant.
#[must_use]
pub fn pearson(pairs: &[PromptPair]) -> f64 {
    let count = pairs.len().max(1) as f64;
    let mean = |value: fn(&PromptPair) -> f64| pairs.iter().map(value).sum::<f64>() / count;
    let (x, y) = (mean(|pair| pair.prompt_similarity), mean(|pair| pair.activation_similarity));
    let (mut xy, mut xx, mut yy) = (0.0, 0.0, 0.0);
    for pair in pairs {
        let (dx, dy) = (pair.prompt_similarity - x, pair.activation_similarity - y);
        xy += dx * dy;
        xx += dx * dx;
        yy += dy * dy;
    }
    let scale = (xx * yy).sqrt();
    if scale > 0.0 { xy / scale } else { 0.0 }
}

/// Returns Spearman's correlation: [`pearson`] of the ranks, where equal values share their mean rank.
#[must_use]
pub fn spearman(pairs: &[PromptPair]) -> f64 {
    let prompts = ranks(&pairs.iter().map(|pair| pair.prompt_similarity).collect::<Vec<_>>());
    let activations = ranks(&pairs.iter().map(|pair| pair.activation_similarity).collect::<Vec<_>>());
    let ranked: Vec<PromptPair> = prompts
        .into_iter()
        .zip(activations)
        .map(|(prompt_similarity, activation_similarity)| PromptPair {
            prompt_similarity,
            activation_similarity,
        })
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
