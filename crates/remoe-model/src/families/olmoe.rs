//! OLMoE: `OlmoeConfig` and `modeling_olmoe.py` of transformers 5.17.
//!
//! - RMS norm of queries and keys over all heads together, before clipping and rotation.
//! - Router: softmax over all experts in float32, normalised if `norm_topk_prob` is set, rounded to the compute dtype.

use super::{Family, TensorNames, USUAL_NAMES, uniform_layer_types};
use crate::config::{CommonConfig, Defaults, ModelConfig};
use crate::error::CheckpointError;
use crate::facts::{AttentionFacts, GqaFacts, LayerFacts, MlpFacts, MoeFacts, QkNorm, RoutingFacts};
use crate::fields::Fields;
use crate::rope::{RopeFacts, RopeLayout};

pub(super) const NAMES: TensorNames = USUAL_NAMES;

const DEFAULTS: Defaults = Defaults {
    vocab_size: 50_304,
    hidden_size: 2048,
    layers: 16,
    heads: 16,
    context_length: 4096,
    norm_eps: 1e-5,
    bos: None,
    eos: Some(50279),
};

pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let common = CommonConfig::read(fields, &DEFAULTS)?;
    // transformers would cut its cache to the window, but not its mask.
    fields.refuse("sliding_window", "OLMoE attends to the whole context")?;
    uniform_layer_types(&common, "full_attention")?;
    let head_dim = common.head_dim()?;
    // The norms of queries and keys assume hidden_size / heads elements per head.
    if head_dim != common.hidden_per_head()? {
        return Err(fields.unsupported(
            "head_dim",
            format!("{head_dim}; OLMoE's heads have hidden_size / num_attention_heads elements"),
        ));
    }
    let clip = fields.optional_limit("clip_qkv")?;
    if let Some(clip) = clip.filter(|clip| *clip < 0.0 || !(*clip as f32).is_finite()) {
        return Err(fields.error("clip_qkv", format!("is {clip}, expected at least 0 and finite in float32")));
    }
    let bias = fields.flag("attention_bias", false)?;
    let attention = AttentionFacts::Gqa(GqaFacts {
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(QkNorm::Row),
        clip,
        ..GqaFacts::plain(common.heads, common.kv_heads(common.heads)?, head_dim)
    });
    let (experts, top_k) = common.experts(["num_experts", "num_local_experts"], 64, Some(8))?;
    let moe = MoeFacts {
        routing: RoutingFacts { normalise: fields.flag("norm_topk_prob", false)?, ..RoutingFacts::SOFTMAX },
        ..MoeFacts::plain(experts, top_k, fields.size("intermediate_size", 2048)?)
    };
    let layer = LayerFacts { attention, mlp: MlpFacts::Moe(moe) };
    let rope = RopeFacts::parse(fields, 10_000.0, head_dim, RopeLayout::Halves, common.context_length)?;
    let layers = vec![layer; common.layers];
    common.finish(Family::Olmoe, layers, rope)
}
