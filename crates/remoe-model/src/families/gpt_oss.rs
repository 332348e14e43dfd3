//! gpt-oss (OpenAI): `GptOssConfig` and `modeling_gpt_oss.py` of transformers 5.17.
//!
//! - Attention with an attention sink for each head; every other layer has a sliding window.
//! - Biases on attention, router and experts. The activation of experts is a clamped SwiGLU.
//! - Router: the experts of the largest logits, softmax over them.
//! - Norms multiply by their weights before they round.
//! - All experts of a layer are stored in two tensors, with gate and up columns interleaved.
//!
//! transformers does not read `hidden_act`, which must be silu.

use super::{BlockNames, Family, FusedLayout, TensorNames, USUAL_BLOCK, USUAL_NAMES};
use crate::config::{CommonConfig, Defaults, ModelConfig};
use crate::error::CheckpointError;
use crate::facts::{
    Activation, AttentionFacts, ExpertBiases, GqaFacts, LayerFacts, MlpFacts, MoeFacts, NormKind,
    RoutingFacts, Score,
};
use crate::fields::Fields;
use crate::rope::{RopeFacts, RopeLayout};

pub(super) const NAMES: TensorNames = TensorNames {
    blocks: &[BlockNames { router: "router", fused: FusedLayout::Interleaved, ..USUAL_BLOCK }],
    ..USUAL_NAMES
};

const DEFAULTS: Defaults = Defaults {
    vocab_size: 201_088,
    hidden_size: 2880,
    layers: 36,
    heads: 64,
    context_length: 131_072,
    norm_eps: 1e-5,
    bos: None,
    eos: None,
};

/// `GptOssExperts.limit`, the only one that the kernels support.
const LIMIT: f64 = 7.0;
/// `GptOssExperts.alpha`, the only one that the kernels support.
const ALPHA: f64 = 1.702;

pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let common = CommonConfig::read(fields, &DEFAULTS)?;
    if let Some(limit) = fields.optional_number("swiglu_limit")?.filter(|limit| *limit != LIMIT) {
        return Err(fields.unsupported("swiglu_limit", format!("{limit}; experts are clamped at {LIMIT}")));
    }
    if let Some(alpha) = fields.optional_number("swiglu_alpha")?.filter(|alpha| *alpha != ALPHA) {
        return Err(fields.unsupported("swiglu_alpha", format!("{alpha}; experts compute with {ALPHA}")));
    }
    if let Some(other) = fields.text("hidden_act")?.filter(|name| !["silu", "swish"].contains(name)) {
        return Err(
            fields.unsupported("hidden_act", format!("`{other}`; gpt-oss has a clamped SwiGLU, silu"))
        );
    }
    if RopeFacts::parameters(fields)?.is_none() {
        return Err(
            fields.error("rope_parameters", "is missing; gpt-oss needs the parameters of rope type yarn")
        );
    }
    let head_dim = match fields.is_null("head_dim") {
        true => common.hidden_per_head()?,
        false => fields.size("head_dim", 64)?,
    };
    if head_dim % 2 != 0 {
        return Err(fields.error("head_dim", format!("is {head_dim}, rotation needs an even number")));
    }
    let rope = RopeFacts::parse(fields, 150_000.0, head_dim, RopeLayout::Halves, common.context_length)?;
    let bias = fields.flag("attention_bias", true)?;
    let kv_heads = common.kv_heads(8)?;
    let (experts, top_k) = common.experts(["num_local_experts", "num_experts"], 128, Some(4))?;
    let moe = MoeFacts {
        routing: RoutingFacts { score: Score::SoftmaxOfChosen, bias: true, ..RoutingFacts::SOFTMAX },
        biases: ExpertBiases::All,
        ..MoeFacts::plain(experts, top_k, fields.size("intermediate_size", 2880)?)
    };
    let layers = windows(&common)?
        .into_iter()
        .map(|window| LayerFacts {
            attention: AttentionFacts::Gqa(GqaFacts {
                qkv_bias: bias,
                o_bias: bias,
                window,
                sinks: true,
                ..GqaFacts::plain(common.heads, kv_heads, head_dim)
            }),
            mlp: MlpFacts::Moe(moe.clone()),
        })
        .collect();
    let config = common.finish(Family::GptOss, layers, rope)?;
    Ok(ModelConfig { norm: NormKind::RmsInFloat32, activation: Activation::ClampedSwiglu, ..config })
}

/// Returns the window of each layer. Without `layer_types`, every other layer has one, beginning with the first.
fn windows(common: &CommonConfig<'_>) -> Result<Vec<Option<usize>>, CheckpointError> {
    let fields = common.fields;
    let slides = match common.layer_types()? {
        None => (0..common.layers).map(|layer| layer % 2 == 0).collect(),
        Some(slides) => slides,
    };
    let window = match fields.optional_size("sliding_window")? {
        None if !fields.is_null("sliding_window") => Some(128),
        given => given,
    };
    if slides.contains(&true) && window.is_none() {
        return Err(fields.error("sliding_window", "is null, but layers have sliding attention"));
    }
    Ok(slides.into_iter().map(|slides| window.filter(|_| slides)).collect())
}
