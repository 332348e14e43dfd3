//! Fate-style prediction: the gates themselves, applied to token embeddings.
//!
//! Fate predicts a layer's experts from the input of the layer before. The Remoe paper (section V-B)
//! adjusts it to whole prompts: every layer's norm and gate see the token's embedding, and the top-k of
//! all tokens are counted.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::phase::Phase;
use crate::predictor::Predictor;
use crate::shares::Shares;
use crate::vector::dot;

/// Weights of one layer that decide its routing.
#[derive(Debug, Clone)]
pub struct GateWeights {
    /// Weight of the RMS norm before the experts, [hidden].
    pub norm: Vec<f32>,
    /// The router, [experts, hidden].
    pub gate: Vec<f32>,
}

impl GateWeights {
    /// Experts of this layer for a hidden state: the `top_k` largest logits, ties to the lower id,
    /// ascending. `epsilon` is the norm's.
    pub(crate) fn route(&self, hidden: &[f32], epsilon: f32, top_k: usize) -> Vec<u16> {
        let mean_square = dot(hidden, hidden) / hidden.len() as f32;
        let inverse = 1.0 / (mean_square + epsilon).sqrt();
        let normed: Vec<f32> =
            hidden.iter().zip(&self.norm).map(|(x, weight)| x * inverse * weight).collect();
        top(self.gate.chunks_exact(hidden.len()).map(|row| dot(row, &normed)), top_k)
    }

    /// Refuses weights of other sizes.
    pub(crate) fn check(&self, hidden: usize, experts: usize) -> Result<(), PredictError> {
        PredictError::require_size("the norm before a router", hidden, self.norm.len())?;
        PredictError::require_size("a router", experts * hidden, self.gate.len())
    }
}

/// The indices of the `count` largest scores, ties to the lower one, ascending.
pub(crate) fn top(scores: impl Iterator<Item = f32>, count: usize) -> Vec<u16> {
    let mut ranked: Vec<(f32, u16)> = scores.zip(0..).collect();
    ranked.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut chosen: Vec<u16> = ranked.into_iter().take(count).map(|(_, index)| index).collect();
    chosen.sort_unstable();
    chosen
}

/// The Fate-style baseline. Groups of group-limited routers are not looked at.
#[derive(Debug, Clone)]
pub struct Fate {
    embedding: Embedding,
    layers: Vec<GateWeights>,
    experts: usize,
    top_k: usize,
    epsilon: f32,
}

impl Fate {
    /// From the weights of each layer with experts.
    ///
    /// # Errors
    /// A weight does not have the model's size.
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

    fn predict(&self, prompt: &[u32], _: Phase) -> Result<Shares, PredictError> {
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
        Shares::from_counts(self.experts, &counts)
    }

    fn bytes(&self) -> u64 {
        0
    }
}
