//! Multi-head latent attention and routing fields that the DeepSeek families share.

use crate::config::CommonConfig;
use crate::error::CheckpointError;
use crate::facts::{AttentionFacts, MlaFacts};
use crate::rope::{RopeFacts, RopeLayout};

/// Default epsilon of `DeepseekV2RMSNorm(rank)` and `DeepseekV3RMSNorm(rank)`, which do not use the config's.
const LATENT_NORM_EPS: f64 = 1e-6;

/// Upper bound of `routed_scaling_factor`, above that of any model (DeepSeek-V2: 16).
const SCALE_LIMIT: f64 = 65_536.0;

/// Reads the attention of every layer, and its rotary embedding.
pub(super) fn attention(
    common: &CommonConfig<'_>,
    layout: RopeLayout,
) -> Result<(AttentionFacts, RopeFacts), CheckpointError> {
    let fields = common.fields;
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
    let rope = RopeFacts::parse(fields, 10_000.0, rope_dim, layout, common.context_length)?;
    let nope_dim = fields.size("qk_nope_head_dim", 128)?;
    let softmax_scale = ((nope_dim + rope_dim) as f64).powf(-0.5) * rope.score_mscale * rope.score_mscale;
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
    Ok((attention, rope))
}

/// Reads `routed_scaling_factor`.
pub(super) fn routed_scale(common: &CommonConfig<'_>, default: f64) -> Result<f64, CheckpointError> {
    const NAME: &str = "routed_scaling_factor";
    let scale = common.fields.number(NAME, default)?;
    if !(scale > 0.0 && scale <= SCALE_LIMIT) {
        let message = format!("is {scale}, expected a number above 0, at most {SCALE_LIMIT}");
        return Err(common.fields.error(NAME, message));
    }
    Ok(scale)
}

/// Checks the number of groups and of chosen groups against each other, the experts and `top_k`.
pub(super) fn check_groups(
    common: &CommonConfig<'_>,
    experts: usize,
    top_k: usize,
    [groups, chosen]: [usize; 2],
) -> Result<(), CheckpointError> {
    let fields = common.fields;
    if !experts.is_multiple_of(groups) {
        return Err(
            fields.error("n_group", format!("is {groups}, which does not divide the {experts} experts"))
        );
    }
    if chosen > groups {
        return Err(fields.error("topk_group", format!("is {chosen}, more than n_group ({groups})")));
    }
    // Otherwise experts outside of the chosen groups would be selected, in an order that torch leaves undefined.
    if top_k > chosen * (experts / groups) {
        return Err(fields
            .error("num_experts_per_tok", format!("is {top_k}, more than the experts of {chosen} groups")));
    }
    Ok(())
}
