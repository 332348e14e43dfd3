//! DeepSeek-V3 and R1: `DeepseekV3Config` and `modeling_deepseek_v3.py` of transformers 5.17.
//!
//! - Multi-head latent attention.
//! - Router: logits in float32, sigmoid of each, plus a correction that only affects the choice. The best groups are
//!   chosen by the sum of their two best experts. Weights are normalised, times `routed_scaling_factor`, kept in float32.
//! - Shared experts without a gate. The first layers are dense. Multi-token prediction layers, which follow the others,
//!   are not loaded.
//!
//! transformers does not read `moe_layer_freq`, which must be 1.

use super::{Family, TensorNames, USUAL_NAMES, latent, uniform_layer_types};
use crate::config::{CommonConfig, Defaults, ModelConfig};
use crate::error::CheckpointError;
use crate::facts::{GroupFacts, LayerFacts, MlpFacts, MoeFacts, RoutingFacts, Score, SharedFacts};
use crate::fields::Fields;
use crate::rope::RopeLayout;

pub(super) const NAMES: TensorNames = TensorNames { shared: "shared_experts", ..USUAL_NAMES };

const DEFAULTS: Defaults = Defaults {
    vocab_size: 129_280,
    hidden_size: 7168,
    layers: 61,
    heads: 128,
    context_length: 4096,
    norm_eps: 1e-6,
    bos: Some(0),
    eos: Some(1),
};

/// Number of best experts whose scores sum to a group's score.
const EXPERTS_PER_GROUP_SCORE: usize = 2;

pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let common = CommonConfig::read(fields, &DEFAULTS)?;
    fields.refuse("sliding_window", "DeepSeek-V3 attends to the whole context")?;
    uniform_layer_types(&common, "full_attention")?;
    for (name, only) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if let Some(other) = fields.text(name)?.filter(|text| *text != only) {
            return Err(fields.unsupported(name, format!("`{other}`; DeepSeek-V3 has {only}")));
        }
    }
    let layout =
        if fields.flag("rope_interleave", true)? { RopeLayout::Interleaved } else { RopeLayout::Halves };
    let (attention, rope) = latent::attention(&common, layout)?;
    if let Some(head_dim) = fields.optional_size("head_dim")?.filter(|&head_dim| head_dim != rope.dim) {
        return Err(
            fields.error("head_dim", format!("is {head_dim}, expected qk_rope_head_dim ({})", rope.dim))
        );
    }
    let moe = experts(&common)?;
    let dense_layers = fields.count("first_k_dense_replace", 3)?;
    let dense = MlpFacts::Dense { width: fields.size("intermediate_size", 18_432)? };
    let layers = (0..common.layers)
        .map(|layer| LayerFacts {
            attention: attention.clone(),
            mlp: if layer >= dense_layers { MlpFacts::Moe(moe.clone()) } else { dense.clone() },
        })
        .collect();
    common.finish(Family::DeepseekV3, layers, rope)
}

fn experts(common: &CommonConfig<'_>) -> Result<MoeFacts, CheckpointError> {
    let fields = common.fields;
    let (experts, top_k) = common.experts(["n_routed_experts", "num_local_experts"], 256, Some(8))?;
    let groups = GroupFacts {
        groups: fields.size("n_group", 8)?,
        chosen: fields.size("topk_group", 4)?,
        best: EXPERTS_PER_GROUP_SCORE,
    };
    if experts / groups.groups < EXPERTS_PER_GROUP_SCORE {
        let message = format!(
            "is {}, groups of the {experts} experts need {EXPERTS_PER_GROUP_SCORE} at least",
            groups.groups
        );
        return Err(fields.error("n_group", message));
    }
    latent::check_groups(common, experts, top_k, [groups.groups, groups.chosen])?;
    let expert_width = fields.size("moe_intermediate_size", 2048)?;
    let shared = fields.count("n_shared_experts", 1)?;
    Ok(MoeFacts {
        routing: RoutingFacts {
            score: Score::Sigmoid,
            logits_in_float32: true,
            corrected: true,
            normalise: fields.flag("norm_topk_prob", true)?,
            scale: latent::routed_scale(common, 2.5)?,
            groups: Some(groups),
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
