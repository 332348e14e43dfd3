//! GraniteMoE (IBM): `GraniteMoeConfig` and `modeling_granitemoe.py` of transformers 5.17.
//!
//! - Multipliers of the embedding, of the scores (in place of 1 / sqrt(head_dim)) and of the outputs of attention and MLP,
//!   and a divisor of the logits.
//! - Router: the experts of the largest logits, softmax over them in float32, rounded to the compute dtype.
//! - All experts of a layer are stored in two tensors.

use super::{BlockNames, Family, FusedLayout, TensorNames, USUAL_BLOCK, USUAL_NAMES, uniform_layer_types};
use crate::config::{CommonConfig, Defaults, ModelConfig, Multipliers};
use crate::error::CheckpointError;
use crate::facts::{AttentionFacts, GqaFacts, LayerFacts, MlpFacts, MoeFacts, RoutingFacts, Score};
use crate::fields::Fields;
use crate::rope::{RopeFacts, RopeLayout};

pub(super) const NAMES: TensorNames = TensorNames {
    blocks: &[
        BlockNames {
            block: "block_sparse_moe",
            router: "router.layer",
            fused: FusedLayout::Stacked,
            gate_up: "input_linear.weight",
            down: "output_linear.weight",
        },
        BlockNames { block: "block_sparse_moe", router: "router", ..USUAL_BLOCK },
    ],
    ..USUAL_NAMES
};

const DEFAULTS: Defaults = Defaults {
    vocab_size: 32_000,
    hidden_size: 4096,
    layers: 32,
    heads: 32,
    context_length: 2048,
    norm_eps: 1e-6,
    bos: Some(1),
    eos: Some(2),
};

pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let common = CommonConfig::read(fields, &DEFAULTS)?;
    fields.refuse("sliding_window", "GraniteMoE attends to the whole context")?;
    uniform_layer_types(&common, "full_attention")?;
    let head_dim = common.head_dim()?;
    let bias = fields.flag("attention_bias", false)?;
    let attention = AttentionFacts::Gqa(GqaFacts {
        qkv_bias: bias,
        o_bias: bias,
        softmax_scale: multiplier(fields, "attention_multiplier")?,
        ..GqaFacts::plain(common.heads, common.kv_heads(common.heads)?, head_dim)
    });
    let (experts, top_k) = common.experts(["num_local_experts", "num_experts"], 8, Some(2))?;
    let moe = MoeFacts {
        routing: RoutingFacts { score: Score::SoftmaxOfChosen, ..RoutingFacts::SOFTMAX },
        ..MoeFacts::plain(experts, top_k, fields.size("intermediate_size", 11_008)?)
    };
    let layer = LayerFacts { attention, mlp: MlpFacts::Moe(moe) };
    let rope = RopeFacts::parse(fields, 10_000.0, head_dim, RopeLayout::Halves, common.context_length)?;
    let layers = vec![layer; common.layers];
    let multipliers = Multipliers {
        embedding: multiplier(fields, "embedding_multiplier")?,
        residual: multiplier(fields, "residual_multiplier")?,
        logits_divisor: multiplier(fields, "logits_scaling")?,
    };
    Ok(ModelConfig { multipliers, ..common.finish(Family::GraniteMoe, layers, rope)? })
}

/// Reads a factor above 0 that float32 can represent.
fn multiplier(fields: Fields<'_>, name: &str) -> Result<f64, CheckpointError> {
    let value = fields.number(name, 1.0)?;
    if !(value as f32).is_normal() || value < 0.0 {
        return Err(fields.error(name, format!("is {value}, expected a float32 above 0")));
    }
    Ok(value)
}
