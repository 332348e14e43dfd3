//! GPT-2 with its MLPs cut into experts, as `remoe convert` writes it (docs/models.md). The fields and defaults are those of
//! `GPT2Config` of transformers 5.17, plus `num_local_experts` and `num_experts_per_tok`.
//!
//! - Learned positions, layer norms with biases, attention with biases.
//! - An expert has some neurons of the original MLP: two projections without a gate. A chosen expert has weight 1
//!   (MoEfication, arXiv 2110.01786, section 3.3). If all experts are chosen, their sum plus the layer's bias equals the
//!   output of the original MLP.

use super::{BlockNames, Family, TensorNames, USUAL_BLOCK, USUAL_NAMES};
use crate::config::{CommonConfig, Defaults, FieldNames, ModelConfig};
use crate::error::CheckpointError;
use crate::facts::{
    Activation, AttentionFacts, ExpertBiases, GqaFacts, LayerFacts, MlpFacts, MoeFacts, NormKind,
    RoutingFacts, Score,
};
use crate::fields::Fields;

pub(super) const NAMES: TensorNames =
    TensorNames { blocks: &[BlockNames { router: "router", ..USUAL_BLOCK }], ..USUAL_NAMES };

const FIELDS: FieldNames = FieldNames {
    layers: "n_layer",
    heads: "n_head",
    hidden_size: "n_embd",
    context_length: "n_positions",
    norm_eps: "layer_norm_epsilon",
};

const DEFAULTS: Defaults = Defaults {
    vocab_size: 50_257,
    hidden_size: 768,
    layers: 12,
    heads: 12,
    context_length: 1024,
    norm_eps: 1e-5,
    bos: Some(50_256),
    eos: Some(50_256),
};

/// Names of other families for the same fields. `GPT2Config` reads them, too.
const ALIASES: [(&str, &str); 4] = [
    ("num_hidden_layers", FIELDS.layers),
    ("num_attention_heads", FIELDS.heads),
    ("hidden_size", FIELDS.hidden_size),
    ("max_position_embeddings", FIELDS.context_length),
];

/// Flags that change the results, with the only supported value.
const FLAGS: [(&str, bool); 3] = [
    ("scale_attn_weights", true),
    ("scale_attn_by_inverse_layer_idx", false),
    ("reorder_and_upcast_attn", false),
];

pub(super) fn parse(fields: Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    for (alias, name) in ALIASES {
        fields.refuse(alias, &format!("GPT-2 calls it {name}; remove one of the two"))?;
    }
    let common = CommonConfig::read_named(fields, &DEFAULTS, &FIELDS)?;
    for (name, supported) in FLAGS {
        if fields.flag(name, supported)? != supported {
            let message = format!("{}; it is computed with {supported}", !supported);
            return Err(fields.unsupported(name, message));
        }
    }
    let activation = match fields.text("activation_function")? {
        // The same formula; gelu_new computes it in several steps.
        None | Some("gelu_new" | "gelu_pytorch_tanh") => Activation::GeluTanh,
        Some(other) => {
            let message = format!("`{other}`; supported are gelu_new and gelu_pytorch_tanh");
            return Err(fields.unsupported("activation_function", message));
        }
    };
    let head_dim = common.hidden_per_head()?;
    let attention = AttentionFacts::Gqa(GqaFacts {
        qkv_bias: true,
        o_bias: true,
        ..GqaFacts::plain(common.heads, common.heads, head_dim)
    });
    let (experts, top_k) = common.experts(["num_local_experts"; 2], 8, Some(2))?;
    let width = match fields.optional_size("n_inner")? {
        Some(width) => width,
        None => 4 * common.hidden_size,
    };
    if !width.is_multiple_of(experts) {
        let message = format!("is {experts}, which does not divide the {width} neurons of a layer (n_inner)");
        return Err(fields.error("num_local_experts", message));
    }
    let moe = MoeFacts {
        gated: false,
        biases: ExpertBiases::Inner,
        output_bias: true,
        routing: RoutingFacts {
            score: Score::Unweighted,
            bias: true,
            logits_in_float32: true,
            ..RoutingFacts::SOFTMAX
        },
        ..MoeFacts::plain(experts, top_k, width / experts)
    };
    let layers = vec![LayerFacts { attention, mlp: MlpFacts::Moe(moe) }; common.layers];
    let tie_embeddings = fields.flag("tie_word_embeddings", true)?;
    let config = common.finish(Family::Gpt2Moe, layers, None)?;
    Ok(ModelConfig { norm: NormKind::Layer, activation, tie_embeddings, ..config })
}
