//! What the parts of a model take at rest.

use crate::config::ModelConfig;
use crate::layout::{LayerMlp, LayerTensors, Layout};
use crate::tensors::{AttentionTensors, Linear, QueryTensors, TensorRef};

/// Bytes of the parts of a model, in the stored dtype.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// One routed expert.
    pub expert_bytes: u64,
    /// Per layer everything but its routed experts: norms, attention, router, shared experts, or the
    /// dense MLP.
    pub non_expert_layer_bytes: Vec<u64>,
    /// Embedding, last norm and head; tied weights once.
    pub outside_bytes: u64,
    /// What one token adds to the cache of each layer.
    pub kv_layer_bytes_per_token: Vec<u64>,
    /// What one token adds to the cache of all layers.
    pub kv_bytes_per_token: u64,
    /// One token's hidden state.
    pub token_bytes: u64,
    /// All weights: `outside_bytes` + the sum of `non_expert_layer_bytes` + layers with experts x
    /// experts x `expert_bytes`.
    pub total_bytes: u64,
}

impl Sizes {
    pub(crate) fn of(config: &ModelConfig, layout: &Layout) -> Self {
        let expert_bytes = layout.layers.iter().find_map(|layer| match &layer.mlp {
            LayerMlp::Moe { experts, .. } => experts.get(0).map(|expert| expert.bytes()),
            LayerMlp::Dense(_) => None,
        });
        let expert_bytes = expert_bytes.unwrap_or(0);
        let non_expert: Vec<u64> = layout.layers.iter().map(non_expert_bytes).collect();
        let head = if config.tie_embeddings { 0 } else { layout.head.bytes };
        let head = head + optional(layout.head_bias.as_ref());
        let outside_bytes = layout.embedding.bytes + linear(&layout.final_norm) + head;
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

fn non_expert_bytes(layer: &LayerTensors) -> u64 {
    let mlp = match &layer.mlp {
        LayerMlp::Dense(mlp) => mlp.bytes(),
        LayerMlp::Moe { router, shared, .. } => {
            router.tensors().map(|tensor| tensor.bytes).sum::<u64>()
                + shared.as_ref().map_or(0, |shared| shared.mlp.bytes() + optional(shared.gate.as_ref()))
        }
    };
    linear(&layer.norms.attention) + linear(&layer.norms.mlp) + attention(&layer.attention) + mlp
}

fn attention(tensors: &AttentionTensors) -> u64 {
    match tensors {
        AttentionTensors::Gqa(gqa) => {
            [&gqa.q, &gqa.k, &gqa.v, &gqa.o].into_iter().map(linear).sum::<u64>()
                + optional(gqa.q_norm.as_ref())
                + optional(gqa.k_norm.as_ref())
                + optional(gqa.sinks.as_ref())
        }
        AttentionTensors::Mla(mla) => {
            let query = match &mla.query {
                QueryTensors::Direct(weight) => weight.bytes,
                QueryTensors::Latent { a, a_norm, b } => linear(a) + a_norm.bytes + b.bytes,
            };
            query + linear(&mla.kv_a) + mla.kv_a_norm.bytes + mla.kv_b.bytes + linear(&mla.o)
        }
    }
}

fn linear(linear: &Linear) -> u64 {
    linear.weight.bytes + optional(linear.bias.as_ref())
}

fn optional(tensor: Option<&TensorRef>) -> u64 {
    tensor.map_or(0, |tensor| tensor.bytes)
}
