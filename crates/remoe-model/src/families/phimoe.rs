//! PhiMoE (Microsoft, Phi-3.5-MoE): `PhimoeConfig` and `modeling_phimoe.py` of transformers 5.17.
//!
//! - Layer norms with biases.
//! - Router: two experts by Sparsemixer, with the threshold `router_jitter_noise`, in inference, too.
//! - Rope type longrope, with PhiMoE's own factors of cosines and sines. A sliding window applies to every layer.

use super::{BlockNames, Family, TensorNames, USUAL_BLOCK, USUAL_NAMES, uniform_layer_types};
use crate::config::{CommonConfig, Defaults, ModelConfig};
use crate::error::CheckpointError;
use crate::facts::{AttentionFacts, GqaFacts, LayerFacts, MlpFacts, MoeFacts, NormKind, RoutingFacts, Score};
use crate::fields::Fields;
use crate::rope::{RopeFacts, RopeLayout, RopeScaling};

pub(super) const NAMES: TensorNames = TensorNames {
    blocks: &[
        BlockNames { block: "block_sparse_moe", ..USUAL_BLOCK },
        BlockNames { router: "router", ..USUAL_BLOCK },
    ],
    gate: "w1",
    up: "w3",
    down: "w2",
    ..USUAL_NAMES
};

const DEFAULTS: Defaults = Defaults {
    vocab_size: 32_064,
    hidden_size: 4096,
    layers: 32,
    heads: 32,
    context_length: 131_072,
    norm_eps: 1e-5,
    bos: Some(1),
    eos: Some(2),
};

/// Number of experts that Sparsemixer chooses, whatever the config says.
const TOP_K: usize = 2;

pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let common = CommonConfig::read(fields, &DEFAULTS)?;
    let window = fields.optional_size("sliding_window")?;
    uniform_layer_types(&common, if window.is_some() { "sliding_attention" } else { "full_attention" })?;
    let head_dim = common.head_dim()?;
    let bias = fields.flag("attention_bias", false)?;
    let attention = AttentionFacts::Gqa(GqaFacts {
        qkv_bias: bias,
        o_bias: bias,
        window,
        ..GqaFacts::plain(common.heads, common.kv_heads(8)?, head_dim)
    });
    let (experts, top_k) = common.experts(["num_local_experts", "num_experts"], 16, Some(TOP_K))?;
    if top_k != TOP_K {
        let message = format!("{top_k}; PhiMoE's sparsemixer chooses {TOP_K}");
        return Err(fields.unsupported("num_experts_per_tok", message));
    }
    let jitter = fields.number("router_jitter_noise", 0.01)?;
    if !(0.0..=1.0).contains(&jitter) {
        return Err(fields.error("router_jitter_noise", format!("is {jitter}, expected 0 to 1")));
    }
    let moe = MoeFacts {
        routing: RoutingFacts { score: Score::SparseMixer { jitter }, ..RoutingFacts::SOFTMAX },
        ..MoeFacts::plain(experts, top_k, fields.size("intermediate_size", 6400)?)
    };
    let rope = RopeFacts::parse(fields, 1_000_000.0, head_dim, RopeLayout::Halves, common.context_length)?;
    let rope = with_factors(fields, rope)?;
    let layer = LayerFacts { attention, mlp: MlpFacts::Moe(moe) };
    let layers = vec![layer; common.layers];
    let head_bias = fields.flag("lm_head_bias", false)?;
    let config = common.finish(Family::Phimoe, layers, rope)?;
    Ok(ModelConfig { norm: NormKind::Layer, head_bias, ..config })
}

/// Replaces the attention factors of longrope by those of `PhimoeRotaryEmbedding`.
fn with_factors(fields: Fields<'_>, rope: RopeFacts) -> Result<RopeFacts, CheckpointError> {
    let (attention_factor, scaling) = match rope.scaling {
        RopeScaling::None => return Ok(rope),
        RopeScaling::Long { short, long, factor: context_factor, original, .. } => {
            let parameters = RopeFacts::parameters(fields)?.unwrap_or(fields);
            let factor = |name: &str| {
                let missing = || parameters.error(name, "is missing, longrope of PhiMoE needs it");
                parameters.optional_positive(name)?.ok_or_else(missing)
            };
            let long_attention_factor = Some(factor("long_mscale")?);
            let scaling =
                RopeScaling::Long { short, long, long_attention_factor, factor: context_factor, original };
            (factor("short_mscale")?, scaling)
        }
        _ => {
            let message = "PhiMoE's rope types are default and longrope";
            return Err(fields.unsupported("rope_parameters", message));
        }
    };
    Ok(RopeFacts { attention_factor, scaling, ..rope })
}
