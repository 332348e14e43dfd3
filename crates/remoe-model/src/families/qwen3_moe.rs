//! Qwen3-MoE: `Qwen3MoeConfig` and `modeling_qwen3_moe.py` of transformers 5.17.
//!
//! - RMS norm of queries and keys in each head.
//! - Router: softmax over all experts in float32, normalised if `norm_topk_prob` is set, rounded to the compute dtype.
//! - `mlp_only_layers` and `decoder_sparse_step` declare layers as dense. A sliding window applies to every layer.

use super::qwen2_moe::sparse_layers;
use super::{Family, TensorNames, USUAL_NAMES, uniform_layer_types};
use crate::config::{CommonConfig, Defaults, ModelConfig};
use crate::error::CheckpointError;
use crate::facts::{AttentionFacts, GqaFacts, LayerFacts, MlpFacts, MoeFacts, QkNorm, RoutingFacts};
use crate::fields::Fields;
use crate::rope::{RopeFacts, RopeLayout};

pub(super) const NAMES: TensorNames = USUAL_NAMES;

const DEFAULTS: Defaults = Defaults {
    vocab_size: 151_936,
    hidden_size: 2048,
    layers: 24,
    heads: 32,
    context_length: 32_768,
    norm_eps: 1e-6,
    bos: None,
    eos: None,
};

pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let common = CommonConfig::read(fields, &DEFAULTS)?;
    let head_dim = common.head_dim()?;
    let window = match fields.flag("use_sliding_window", false)? {
        false => None,
        true => match fields.optional_size("sliding_window")? {
            None if !fields.is_null("sliding_window") => Some(4096),
            given => given,
        },
    };
    uniform_layer_types(&common, if window.is_some() { "sliding_attention" } else { "full_attention" })?;
    let bias = fields.flag("attention_bias", false)?;
    let attention = AttentionFacts::Gqa(GqaFacts {
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(QkNorm::Head),
        window,
        ..GqaFacts::plain(common.heads, common.kv_heads(4)?, head_dim)
    });
    let (experts, top_k) = common.experts(["num_experts", "num_local_experts"], 128, Some(8))?;
    let moe = MoeFacts {
        routing: RoutingFacts { normalise: fields.flag("norm_topk_prob", false)?, ..RoutingFacts::SOFTMAX },
        ..MoeFacts::plain(experts, top_k, fields.size("moe_intermediate_size", 768)?)
    };
    let dense = MlpFacts::Dense { width: fields.size("intermediate_size", 6144)? };
    let layers = sparse_layers(&common)?
        .into_iter()
        .map(|sparse| LayerFacts {
            attention: attention.clone(),
            mlp: if sparse { MlpFacts::Moe(moe.clone()) } else { dense.clone() },
        })
        .collect();
    let rope = RopeFacts::parse(fields, 10_000.0, head_dim, RopeLayout::Halves, common.context_length)?;
    common.finish(Family::Qwen3Moe, layers, rope)
}
