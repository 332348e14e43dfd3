//! Mixtral: `MixtralConfig` and `modeling_mixtral.py` of transformers 5.17.
//!
//! Router: softmax over all experts in float32. The best `num_experts_per_tok` are normalised to a sum of 1 and kept in
//! float32. `router_jitter_noise` and dropout only affect training.

use super::{BlockNames, Family, TensorNames, USUAL_BLOCK, USUAL_NAMES, uniform_layer_types};
use crate::config::{CommonConfig, Defaults, ModelConfig};
use crate::error::CheckpointError;
use crate::facts::{AttentionFacts, GqaFacts, LayerFacts, MlpFacts, MoeFacts, RoutingFacts};
use crate::fields::Fields;
use crate::rope::{RopeFacts, RopeLayout};

pub(super) const NAMES: TensorNames = TensorNames {
    blocks: &[BlockNames { block: "block_sparse_moe", ..USUAL_BLOCK }, USUAL_BLOCK],
    gate: "w1",
    up: "w3",
    down: "w2",
    ..USUAL_NAMES
};

const DEFAULTS: Defaults = Defaults {
    vocab_size: 32_000,
    hidden_size: 4096,
    layers: 32,
    heads: 32,
    context_length: 131_072,
    norm_eps: 1e-5,
    bos: Some(1),
    eos: Some(2),
};

pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let common = CommonConfig::read(fields, &DEFAULTS)?;
    let window = fields.optional_size("sliding_window")?;
    uniform_layer_types(&common, if window.is_some() { "sliding_attention" } else { "full_attention" })?;
    let head_dim = common.head_dim()?;
    let attention = AttentionFacts::Gqa(GqaFacts {
        window,
        ..GqaFacts::plain(common.heads, common.kv_heads(8)?, head_dim)
    });
    let (experts, top_k) = common.experts(["num_local_experts", "num_experts"], 8, Some(2))?;
    let moe = MoeFacts {
        routing: RoutingFacts { normalise: true, weights_in_compute_dtype: false, ..RoutingFacts::SOFTMAX },
        ..MoeFacts::plain(experts, top_k, fields.size("intermediate_size", 14336)?)
    };
    let layer = LayerFacts { attention, mlp: MlpFacts::Moe(moe) };
    let rope = RopeFacts::parse(fields, 1_000_000.0, head_dim, RopeLayout::Halves, common.context_length)?;
    let layers = vec![layer; common.layers];
    common.finish(Family::Mixtral, layers, rope)
}
