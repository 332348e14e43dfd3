//! Fate baseline: predicts routing by applying the model's gates to token embeddings.
//!
//! Fate predicts a layer's experts from the input of the previous layer. The Remoe paper (section V-B) adapts it to
//! whole prompts: the norm and the gate of every layer see the token's embedding, and the top-k experts of all tokens
//! are counted.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::phase::Phase;
use crate::predictor::Predictor;
use crate::shares::UsageShares;
use crate::vector::dot;

/// Router weights of one layer.
#[derive(Debug, Clone)]
pub struct GateWeights {
    /// Weight of the RMS norm before the router, [hidden].
    pub norm: Vec<f32>,
    /// Weight of the router, [experts, hidden].
    pub gate: Vec<f32>,
}

impl GateWeights {
    /// Routes a hidden state: returns the `top_k` experts with the largest logits, ties to the lower id, ascending.
    /// `epsilon` is that of the norm.
    pub(crate) fn route(&self, hidden: &[f32], epsilon: f32, top_k: usize) -> Vec<u16> {
        let mean_square = dot(hidden, hidden) / hidden.len() as f32;
        let inverse = 1.0 / (mean_square + epsilon).sqrt();
        let normed: Vec<f32> =
            hidden.iter().zip(&self.norm).map(|(x, weight)| x * inverse * weight).collect();
        self::top_k(self.gate.chunks_exact(hidden.len()).map(|row| dot(row, &normed)), top_k)
    }

    /// Checks the sizes of the weights.
    pub(crate) fn check(&self, hidden: usize, experts: usize) -> Result<(), PredictError> {
        PredictError::require_size("the norm before a router", hidden, self.norm.len())?;
        PredictError::require_size("a router", experts * hidden, self.gate.len())
    }
}

/// Returns the indices of the `count` largest scores, ties to the lower one, ascending.
pub(crate) fn top_k(scores: impl Iterator<Item = f32>, count: usize) -> Vec<u16> {
    let mut ranked: Vec<(f32, u16)> = scores.zip(0..).collect();
    ranked.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut chosen: Vec<u16> = ranked.into_iter().take(count).map(|(_, index)| index).collect();
    chosen.sort_unstable();
    chosen
}

/// Fate baseline. It ignores the groups of group-limited routers.
#[derive(Debug, Clone)]
pub struct Fate {
    embedding: Embedding,
    layers: Vec<GateWeights>,
    experts: usize,
    top_k: usize,
    epsilon: f32,
}

impl Fate {
    /// Creates the baseline from the router weights of each layer with experts.
    ///
    /// # Errors
    /// A weight has another size than the model.
    pub fn new(
        embedding: Embedding,
        layers: Vec<GateWeights>,
        experts: usize,
        top_k: usize,
        epsilon: f32,
    ) -> Result<Self, PredictError> {
        layers.iter().try_for_each(|layer| layer.check(embedding.hidden(), experts))?;
        Ok(Self { embedding, layers, experts, top_k, epsilon })
    }
}

impl Predictor for Fate {
    fn name(&self) -> &'static str {
        "fate"
    }

    fn predict(&self, prompt: &[u32], _: Phase) -> Result<UsageShares, PredictError> {
        self.embedding.check(prompt)?;
        let mut counts = vec![0_u32; self.layers.len() * self.experts];
        let mut hidden = vec![0.0; self.embedding.hidden()];
        for &id in prompt {
            hidden.fill(0.0);
            self.embedding.add_row(id as usize, 1.0, &mut hidden);
            for (layer, counts) in self.layers.iter().zip(counts.chunks_exact_mut(self.experts)) {
                for expert in layer.route(&hidden, self.epsilon, self.top_k) {
                    counts[usize::from(expert)] += 1;
                }
            }
        }
        UsageShares::from_counts(self.experts, &counts)
    }

    fn bytes(&self) -> u64 {
        0
    }
}
