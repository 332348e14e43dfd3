//! Sizes of the parts of a checkpoint.

use crate::config::ModelConfig;
use crate::layout::{LayerMlp, Layout};
use crate::tensors::TensorRef;

/// Bytes of the parts of a model. Scales count with their weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of one routed expert.
    pub expert_bytes: u64,
    /// Bytes of each layer without its routed experts: norms, attention, router and shared experts, or dense MLP.
    pub non_expert_layer_bytes: Vec<u64>,
    /// Bytes of the embedding, learned positions, final norm and head. Tied weights count once.
    pub outside_bytes: u64,
    /// Bytes that one token adds to the KV cache of each layer.
    pub kv_layer_bytes_per_token: Vec<u64>,
    /// Bytes that one token adds to the KV cache of all layers.
    pub kv_bytes_per_token: u64,
    /// Bytes of a token's hidden state.
    pub token_bytes: u64,
    /// Bytes of all weights: `outside_bytes`, the sum of `non_expert_layer_bytes`, and `expert_bytes` for each expert of
    /// each layer.
    pub total_bytes: u64,
}

impl Sizes {
    /// Returns the sizes of the weights as stored.
    pub(crate) fn stored(config: &ModelConfig, layout: &Layout) -> Self {
        Self::count(config, layout, TensorRef::own_bytes)
    }

    /// Returns the sizes of the decoded weights.
    pub(crate) fn decoded(config: &ModelConfig, layout: &Layout) -> Self {
        Self::count(config, layout, TensorRef::decoded_bytes)
    }

    fn count(config: &ModelConfig, layout: &Layout, bytes: fn(&TensorRef) -> u64) -> Self {
        let expert_bytes = layout.layers.iter().find_map(|layer| match &layer.mlp {
            LayerMlp::Moe { experts, .. } => experts.get(0).map(|expert| expert.tensors().map(bytes).sum()),
            LayerMlp::Dense(_) => None,
        });
        let expert_bytes: u64 = expert_bytes.unwrap_or(0);
        let sum = |tensors: Vec<&TensorRef>| tensors.into_iter().map(bytes).sum::<u64>();
        let non_expert: Vec<u64> = layout.layers.iter().map(|layer| sum(layer.outside())).collect();
        let head = if config.tie_embeddings { 0 } else { bytes(&layout.head) };
        let head = head + layout.head_bias.as_ref().map_or(0, bytes);
        let outside_bytes = bytes(&layout.embedding)
            + layout.positions.as_ref().map_or(0, bytes)
            + sum(layout.final_norm.tensors().collect())
            + head;
        let experts: usize = layout
            .layers
            .iter()
            .map(|layer| match &layer.mlp {
                LayerMlp::Moe { experts, .. } => experts.len(),
                LayerMlp::Dense(_) => 0,
            })
            .sum();
        let element = config.dtype.bytes();
        let kv: Vec<u64> =
            config.layers.iter().map(|layer| layer.attention.cache_elements() as u64 * element).collect();
        Self {
            expert_bytes,
            total_bytes: outside_bytes + non_expert.iter().sum::<u64>() + experts as u64 * expert_bytes,
            non_expert_layer_bytes: non_expert,
            outside_bytes,
            kv_bytes_per_token: kv.iter().sum(),
            kv_layer_bytes_per_token: kv,
            token_bytes: config.hidden_size as u64 * element,
        }
    }
}
