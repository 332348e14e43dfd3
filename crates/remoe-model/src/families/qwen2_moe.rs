//! Qwen1.5-MoE and Qwen2-MoE: `Qwen2MoeConfig` and `modeling_qwen2_moe.py` of transformers 5.17.
//!
//! - Router: softmax over all experts in float32, normalised if `norm_topk_prob` is set, rounded to the compute dtype.
//! - One shared expert with a sigmoid gate.
//! - `mlp_only_layers` and `decoder_sparse_step` declare layers as dense.

use std::collections::BTreeSet;

use super::{Family, TensorNames, USUAL_NAMES};
use crate::config::{CommonConfig, Defaults, ModelConfig};
use crate::error::CheckpointError;
use crate::facts::{AttentionFacts, GqaFacts, LayerFacts, MlpFacts, MoeFacts, RoutingFacts, SharedFacts};
use crate::fields::Fields;
use crate::rope::{RopeFacts, RopeLayout};

pub(super) const NAMES: TensorNames = USUAL_NAMES;

const DEFAULTS: Defaults = Defaults {
    vocab_size: 151_936,
    hidden_size: 2048,
    layers: 24,
    heads: 16,
    context_length: 32_768,
    norm_eps: 1e-6,
    bos: None,
    eos: None,
};

pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let common = CommonConfig::read(fields, &DEFAULTS)?;
    let head_dim = common.head_dim()?;
    let kv_heads = common.kv_heads(16)?;
    let qkv_bias = fields.flag("qkv_bias", true)?;
    let windows = windows(&common)?;
    let moe = experts(&common)?;
    let dense_width = fields.size("intermediate_size", 5632)?;
    let layers = windows
        .into_iter()
        .zip(sparse_layers(&common)?)
        .map(|(window, sparse)| LayerFacts {
            attention: AttentionFacts::Gqa(GqaFacts {
                qkv_bias,
                window,
                ..GqaFacts::plain(common.heads, kv_heads, head_dim)
            }),
            mlp: if sparse { MlpFacts::Moe(moe.clone()) } else { MlpFacts::Dense { width: dense_width } },
        })
        .collect();
    let rope = RopeFacts::parse(fields, 10_000.0, head_dim, RopeLayout::Halves, common.context_length)?;
    common.finish(Family::Qwen2Moe, layers, rope)
}

fn experts(common: &CommonConfig<'_>) -> Result<MoeFacts, CheckpointError> {
    let fields = common.fields;
    let (experts, top_k) = common.experts(["num_experts"; 2], 60, Some(4))?;
    Ok(MoeFacts {
        routing: RoutingFacts { normalise: fields.flag("norm_topk_prob", false)?, ..RoutingFacts::SOFTMAX },
        shared: Some(SharedFacts {
            count: 1,
            width: fields.size("shared_expert_intermediate_size", 5632)?,
            gated: true,
        }),
        ..MoeFacts::plain(experts, top_k, fields.size("moe_intermediate_size", 1408)?)
    })
}

/// Returns for each layer if it has routed experts.
pub(super) fn sparse_layers(common: &CommonConfig<'_>) -> Result<Vec<bool>, CheckpointError> {
    let fields = common.fields;
    let sparse_step = fields.size("decoder_sparse_step", 1)?;
    let mut dense_layers = BTreeSet::new();
    for entry in fields.list("mlp_only_layers")?.unwrap_or_default() {
        let Some(layer) = entry.as_i64() else {
            return Err(fields.error("mlp_only_layers", format!("holds {entry}, expected layer ids")));
        };
        dense_layers.insert(layer);
    }
    let sparse =
        |layer: usize| !dense_layers.contains(&(layer as i64)) && (layer + 1).is_multiple_of(sparse_step);
    Ok((0..common.layers).map(sparse).collect())
}

/// Returns the window of each layer. Without `layer_types`, layers with an even id below `max_window_layers` have one, if
/// `use_sliding_window` is set (`Qwen2MoeConfig.__post_init__`).
fn windows(common: &CommonConfig<'_>) -> Result<Vec<Option<usize>>, CheckpointError> {
    let fields = common.fields;
    let windowed = fields.flag("use_sliding_window", false)?;
    let bound = fields.count("max_window_layers", 28)?;
    let window = match fields.optional_count("sliding_window")? {
        Some(window) => window,
        None if fields.is_null("sliding_window") => 0,
        None => 4096,
    };
    let slides = match common.layer_types()? {
        None => (0..common.layers).map(|layer| windowed && layer % 2 == 0 && layer < bound).collect(),
        Some(slides) => slides,
    };
    if slides.contains(&true) && !windowed {
        return Err(fields.error("layer_types", "has sliding_attention, but use_sliding_window is false"));
    }
    if slides.contains(&true) && window == 0 {
        return Err(fields.error("sliding_window", "is 0, but layers have sliding attention"));
    }
    Ok(slides.into_iter().map(|slides| slides.then_some(window)).collect())
}
