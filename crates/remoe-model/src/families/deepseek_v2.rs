//! DeepSeek-V2: `DeepseekV2Config` and `modeling_deepseek_v2.py` of transformers 5.17 (its own class, not the
//! checkpoint's remote code).
//!
//! - Multi-head latent attention. The norms of the latents have an epsilon of their own.
//! - Router: logits in float32, softmax over all experts, greedy or group-limited choice, weights times
//!   `routed_scaling_factor`, kept in float32.
//! - Shared experts without a gate. The first layers are dense.
//!
//! transformers does not read `norm_topk_prob`, `scoring_func` and `moe_layer_freq`. `foreign_fields.rs` refuses
//! values that differ from what transformers computes.

use super::{Family, TensorNames, USUAL_NAMES, latent, uniform_layer_types};
use crate::config::{CommonConfig, Defaults, ModelConfig};
use crate::error::CheckpointError;
use crate::facts::{GroupFacts, LayerFacts, MlpFacts, MoeFacts, RoutingFacts, SharedFacts};
use crate::fields::Fields;
use crate::rope::{RopeFacts, RopeLayout};

pub(super) const NAMES: TensorNames = TensorNames { shared: "shared_experts", ..USUAL_NAMES };

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
    let common = CommonConfig::read(fields, &DEFAULTS)?;
    fields.refuse("sliding_window", "DeepSeek-V2 attends to the whole context")?;
    uniform_layer_types(&common, "full_attention")?;
    // Only a check. Like transformers, refuses a hidden size that the heads do not divide, although the heads of latent
    // attention do not depend on it.
    common.hidden_per_head()?;
    let (attention, rope) = latent::attention(&common, RopeLayout::Interleaved)?;
    let rope = RopeFacts { in_float32: true, ..rope };
    let moe = moe_facts(&common)?;
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

fn moe_facts(common: &CommonConfig<'_>) -> Result<MoeFacts, CheckpointError> {
    let fields = common.fields;
    let (experts, top_k) = common.experts(["n_routed_experts", "num_experts"], 64, None)?;
    let groups = group_facts(common, experts, top_k)?;
    let expert_width = fields.size("moe_intermediate_size", 1407)?;
    let shared = fields.count("n_shared_experts", 2)?;
    Ok(MoeFacts {
        routing: RoutingFacts {
            logits_in_float32: true,
            scale: latent::routed_scale(common, 1.0)?,
            groups,
            weights_in_compute_dtype: false,
            ..RoutingFacts::SOFTMAX
        },
        shared: (shared > 0).then_some(SharedFacts {
            count: shared,
            width: shared * expert_width,
            gated: false,
        }),
        ..MoeFacts::plain(experts, top_k, expert_width)
    })
}

fn group_facts(
    common: &CommonConfig<'_>,
    experts: usize,
    top_k: usize,
) -> Result<Option<GroupFacts>, CheckpointError> {
    let fields = common.fields;
    match fields.text("topk_method")? {
        Some("greedy") => return Ok(None),
        // An absent field means greedy; null is refused.
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
    latent::check_groups(common, experts, top_k, [groups, chosen])?;
    // The score of a group is the score of its best expert.
    Ok(Some(GroupFacts { groups, chosen, best: 1 }))
}
