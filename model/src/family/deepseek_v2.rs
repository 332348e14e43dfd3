//! DeepSeek-V2: `DeepseekV2Config` and `modeling_deepseek_v2.py` of transformers 5.17 (the native
//! model; `norm_topk_prob` and `moe_layer_freq` are fields that it does not read).
//!
//! Multi-head latent attention whose latents have norms with an epsilon of their own. Router logits
//! in float32, softmax over all experts, greedy or group-limited choice, weights times
//! `routed_scaling_factor`, kept in float32. Shared experts without a gate. The first layers dense.

use super::{Family, TensorNames, USUAL_NAMES, uniform_layer_types};
use crate::config::{Common, Defaults, ModelConfig};
use crate::error::CheckpointError;
use crate::facts::{
    AttentionFacts, GroupFacts, LayerFacts, MlaFacts, MlpFacts, MoeFacts, RoutingFacts, Score, SharedFacts,
};
use crate::fields::Fields;
use crate::rope::{RopeFacts, RopeLayout};

pub(super) const NAMES: TensorNames = TensorNames { shared: "shared_experts", ..USUAL_NAMES };

/// `DeepseekV2RMSNorm(rank)` is made without the config's epsilon.
const LATENT_NORM_EPS: f64 = 1e-6;

/// More than any model multiplies its experts' outputs with (DeepSeek-V2: 16).
const SCALE_LIMIT: f64 = 65_536.0;

const DEFAULTS: Defaults = Defaults {
    vocab_size: 102_400,
    hidden_size: 4096,
    layers: 32,
    heads: 32,
    context_length: 2048,
    norm_eps: 1e-6,
    bos: Some(1),
    eos: Some(2),
};

pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let common = Common::read(fields, &DEFAULTS)?;
    fields.refuse("sliding_window", "DeepSeek-V2 attends to the whole context")?;
    uniform_layer_types(&common, "full_attention")?;
    if fields.flag("mlp_bias", false)? {
        return Err(fields.unsupported("mlp_bias", "feed-forward layers with a bias are not supported"));
    }
    // transformers refuses it too, though the heads do not depend on it.
    common.even_heads()?;
    let kv_heads = common.kv_heads(common.heads)?;
    if kv_heads != common.heads {
        return Err(fields.unsupported(
            "num_key_value_heads",
            format!("{kv_heads}; latent attention has as many as num_attention_heads ({})", common.heads),
        ));
    }
    let rope_dim = fields.size("qk_rope_head_dim", 64)?;
    if rope_dim % 2 != 0 {
        return Err(fields.error("qk_rope_head_dim", format!("is {rope_dim}, rotation needs an even number")));
    }
    let rope = RopeFacts::parse(fields, 10_000.0, rope_dim, RopeLayout::Interleaved, common.context_length)?;
    let nope_dim = fields.size("qk_nope_head_dim", 128)?;
    let mscale = rope.score_mscale();
    let softmax_scale = ((nope_dim + rope_dim) as f64).powf(-0.5) * mscale * mscale;
    if !(softmax_scale as f32).is_normal() || softmax_scale <= 0.0 {
        return Err(fields.error(
            "rope_parameters",
            format!("its factor and mscale_all_dim scale the scores by {softmax_scale}, expected a finite number above 0"),
        ));
    }
    let attention = AttentionFacts::Mla(MlaFacts {
        heads: common.heads,
        q_rank: match fields.optional_size("q_lora_rank")? {
            Some(rank) => Some(rank),
            None if fields.is_null("q_lora_rank") => None,
            None => Some(1536),
        },
        kv_rank: fields.size("kv_lora_rank", 512)?,
        nope_dim,
        rope_dim,
        value_dim: fields.size("v_head_dim", 128)?,
        bias: fields.flag("attention_bias", false)?,
        latent_norm_eps: LATENT_NORM_EPS,
        softmax_scale,
    });
    let moe = experts(&common)?;
    let dense_layers = fields.count("first_k_dense_replace", 0)?;
    let dense_width = fields.size("intermediate_size", 11008)?;
    let layers = (0..common.layers)
        .map(|layer| LayerFacts {
            attention: attention.clone(),
            mlp: if layer >= dense_layers {
                MlpFacts::Moe(moe.clone())
            } else {
                MlpFacts::Dense { width: dense_width }
            },
        })
        .collect();
    common.finish(Family::DeepseekV2, layers, rope)
}

fn experts(common: &Common<'_>) -> Result<MoeFacts, CheckpointError> {
    let fields = common.fields;
    let expert_field = fields.either("n_routed_experts", "num_experts");
    let (experts, top_k) = common.experts(
        expert_field,
        fields.size(expert_field, 64)?,
        fields.required_size("num_experts_per_tok")?,
    )?;
    let groups = groups(common, experts, top_k)?;
    let expert_width = fields.size("moe_intermediate_size", 1407)?;
    let shared = fields.count("n_shared_experts", 2)?;
    let scale = fields.number("routed_scaling_factor", 1.0)?;
    if !(scale > 0.0 && scale <= SCALE_LIMIT) {
        return Err(fields.error(
            "routed_scaling_factor",
            format!("is {scale}, expected a number above 0, at most {SCALE_LIMIT}"),
        ));
    }
    Ok(MoeFacts {
        experts,
        top_k,
        expert_width,
        routing: RoutingFacts {
            score: Score::Softmax,
            logits_in_float32: true,
            normalise: false,
            scale,
            groups,
            weights_in_compute_dtype: false,
        },
        shared: (shared > 0).then_some(SharedFacts {
            count: shared,
            width: shared * expert_width,
            gated: false,
        }),
    })
}

fn groups(common: &Common<'_>, experts: usize, top_k: usize) -> Result<Option<GroupFacts>, CheckpointError> {
    let fields = common.fields;
    match fields.text("topk_method")? {
        Some("greedy") => return Ok(None),
        None if !fields.is_null("topk_method") => return Ok(None),
        Some("group_limited_greedy") => {}
        other => {
            return Err(fields.unsupported(
                "topk_method",
                format!("`{}`; supported are greedy and group_limited_greedy", other.unwrap_or("null")),
            ));
        }
    }
    let groups = fields.required_size("n_group")?;
    let chosen = fields.required_size("topk_group")?;
    if !experts.is_multiple_of(groups) {
        return Err(
            fields.error("n_group", format!("is {groups}, which does not divide the {experts} experts"))
        );
    }
    if chosen > groups {
        return Err(fields.error("topk_group", format!("is {chosen}, more than n_group ({groups})")));
    }
    // Beyond that, experts of weight 0 outside of the groups would be taken, in an order that torch
    // leaves open.
    if top_k > chosen * (experts / groups) {
        return Err(fields
            .error("num_experts_per_tok", format!("is {top_k}, more than the experts of {chosen} groups")));
    }
    Ok(Some(GroupFacts { groups, chosen }))
}
