//! Fields of `config.json` that belong to other architectures than the config's family.
//!
//! A config may have fields that its family does not read; most are harmless. The fields in this file change the results
//! of the architecture that they belong to. A checkpoint with such a field is not what its `model_type` claims, and
//! ignoring the field would silently give wrong results. Values that have no effect (neutral values) are accepted.

use serde_json::Value;

use crate::error::CheckpointError;
use crate::family::Family::{
    self, DeepseekV2, DeepseekV3, Gpt2Moe, GptOss, GraniteMoe, Mixtral, Olmoe, Phimoe, Qwen2Moe, Qwen3Moe,
};
use crate::fields::{Fields, abbreviated, same_number};
use crate::json_constants::Constant;
use crate::rope::RopeFacts;

/// A value of a field that has no effect. Null never has one.
#[derive(Debug, Clone, Copy)]
enum Neutral {
    Flag(bool),
    Number(f64),
    Text(&'static str),
    EmptyList,
    /// Infinity, as a limit.
    Unlimited,
}

use Neutral::{EmptyList, Flag, Number, Text, Unlimited};

impl Neutral {
    fn matches(self, value: &Value) -> bool {
        match self {
            Flag(flag) => value.as_bool() == Some(flag),
            Number(number) => same_number(value, number),
            Text(text) => value.as_str() == Some(text),
            EmptyList => value.as_array().is_some_and(Vec::is_empty),
            Unlimited => Constant::from_value(value) == Some(Constant::Infinity),
        }
    }
}

/// A field, its neutral values, and the families in which it is not checked: they read it, or always do what it says.
type FieldRule = (&'static str, &'static [Neutral], &'static [Family]);

const FALSE: &[Neutral] = &[Flag(false)];
const ONE: &[Neutral] = &[Number(1.0)];
const ZERO: &[Neutral] = &[Number(0.0)];
const NO_NEUTRAL_VALUE: &[Neutral] = &[];
const SOFTMAX: &[Neutral] = &[Text("softmax")];
const DEEPSEEK: &[Family] = &[DeepseekV2, DeepseekV3];
/// Families with fixed biases, whatever a field says.
const BIASED: &[Family] = &[GptOss, Gpt2Moe];
/// Families with norms of queries and keys.
const QK_NORM: &[Family] = &[Olmoe, Qwen3Moe];
/// Families with layer norms instead of RMS norms.
const LAYER_NORM: &[Family] = &[Phimoe, Gpt2Moe];

const RULES: &[FieldRule] = &[
    // Scores and logits.
    ("attn_logit_softcapping", NO_NEUTRAL_VALUE, &[]),
    ("final_logit_softcapping", NO_NEUTRAL_VALUE, &[]),
    ("router_logit_softcapping", NO_NEUTRAL_VALUE, &[]),
    ("query_pre_attn_scalar", NO_NEUTRAL_VALUE, &[]),
    ("attn_temperature_tuning", &[Flag(false), Number(0.0)], &[]),
    ("attention_value_scale", ONE, &[]),
    ("attn_scale", NO_NEUTRAL_VALUE, &[]),
    ("scale_attn_weights", &[Flag(true)], &[Gpt2Moe]),
    ("scale_attn_by_inverse_layer_idx", FALSE, &[Gpt2Moe]),
    ("attention_multiplier", NO_NEUTRAL_VALUE, &[GraniteMoe]),
    ("embedding_multiplier", ONE, &[GraniteMoe]),
    ("residual_multiplier", ONE, &[GraniteMoe]),
    ("logits_scaling", ONE, &[GraniteMoe]),
    ("logit_scale", ONE, &[]),
    ("scale_emb", ONE, &[]),
    ("scale_depth", NO_NEUTRAL_VALUE, &[]),
    ("dim_model_base", NO_NEUTRAL_VALUE, &[]),
    ("mup_enabled", FALSE, &[]),
    // Norms.
    ("use_qk_norm", FALSE, QK_NORM),
    ("qk_norm", FALSE, QK_NORM),
    ("qk_layernorm", FALSE, QK_NORM),
    ("norm_type", &[Text("rms_norm"), Text("rmsnorm"), Text("RMSNorm")], LAYER_NORM),
    ("use_rms_norm", &[Flag(true)], LAYER_NORM),
    ("sandwich_norm", FALSE, &[]),
    ("zero_centered_norm", FALSE, &[]),
    // Biases.
    (
        "attention_bias",
        FALSE,
        &[Qwen2Moe, Olmoe, DeepseekV2, DeepseekV3, Qwen3Moe, GraniteMoe, Phimoe, GptOss, Gpt2Moe],
    ),
    ("qkv_bias", FALSE, &[Qwen2Moe, GptOss, Gpt2Moe]),
    ("o_bias", FALSE, BIASED),
    ("use_bias", FALSE, BIASED),
    ("bias", FALSE, BIASED),
    ("add_bias_linear", FALSE, BIASED),
    ("mlp_bias", FALSE, BIASED),
    ("router_bias", FALSE, BIASED),
    ("moe_router_bias", FALSE, BIASED),
    ("use_expert_bias", FALSE, BIASED),
    ("moe_router_enable_expert_bias", FALSE, &[DeepseekV3]),
    ("lm_head_bias", FALSE, &[Phimoe]),
    // Positions.
    ("position_embedding_type", &[Text("rope"), Text("rotary")], &[Gpt2Moe]),
    ("no_rope_layers", &[EmptyList], &[]),
    ("no_rope_layer_interval", NO_NEUTRAL_VALUE, &[]),
    ("nope_layer_interval", NO_NEUTRAL_VALUE, &[]),
    ("rope_local_base_freq", NO_NEUTRAL_VALUE, &[]),
    ("rope_interleave", FALSE, DEEPSEEK),
    ("rotary_dim", NO_NEUTRAL_VALUE, &[]),
    ("rotary_percent", ONE, &[]),
    ("rope_percent", ONE, &[]),
    // Attention.
    ("index_topk", NO_NEUTRAL_VALUE, &[]),
    ("clip_qkv", &[Unlimited], &[Olmoe]),
    ("q_lora_rank", NO_NEUTRAL_VALUE, DEEPSEEK),
    ("kv_lora_rank", NO_NEUTRAL_VALUE, DEEPSEEK),
    ("use_mla", FALSE, DEEPSEEK),
    ("use_attention_sinks", FALSE, &[GptOss]),
    ("add_swa_attention_sink_bias", FALSE, &[]),
    ("attn_output_gate", FALSE, &[]),
    ("linear_num_value_heads", NO_NEUTRAL_VALUE, &[]),
    ("full_attention_interval", ONE, &[]),
    ("sliding_window_pattern", ONE, &[]),
    ("dual_chunk_attention_config", NO_NEUTRAL_VALUE, &[]),
    ("parallel_attn", FALSE, &[]),
    ("hc_mult", ONE, &[]),
    // Layers with experts, and routing.
    ("first_k_dense_replace", ZERO, DEEPSEEK),
    ("moe_layer_freq", ONE, &[]),
    ("moe_layer_interval", ONE, &[]),
    ("interleave_moe_layer_step", ONE, &[]),
    ("moe_layer_start_index", ZERO, &[]),
    ("num_dense_layers", ZERO, &[]),
    ("moe_layers", NO_NEUTRAL_VALUE, &[]),
    ("mlp_only_layers", &[EmptyList], &[Qwen2Moe, Qwen3Moe]),
    ("decoder_sparse_step", ONE, &[Qwen2Moe, Qwen3Moe]),
    ("scoring_func", SOFTMAX, &[DeepseekV3]),
    ("score_function", SOFTMAX, &[DeepseekV3]),
    ("moe_router_activation_func", SOFTMAX, &[DeepseekV3]),
    ("topk_method", &[Text("greedy")], DEEPSEEK),
    ("n_group", &[Number(0.0), Number(1.0)], DEEPSEEK),
    ("topk_group", &[Number(0.0), Number(1.0)], DEEPSEEK),
    ("routed_scaling_factor", ONE, DEEPSEEK),
    ("num_shared_experts", ZERO, &[]),
    ("n_shared_experts", ZERO, DEEPSEEK),
    ("shared_expert_intermediate_size", ZERO, &[Qwen2Moe]),
    ("norm_min", NO_NEUTRAL_VALUE, &[]),
    ("zero_expert_num", ZERO, &[]),
    // Computation of experts.
    ("swiglu_limit", &[Unlimited], &[GptOss]),
    ("swiglu_limits", NO_NEUTRAL_VALUE, &[]),
    ("swiglu_alpha", NO_NEUTRAL_VALUE, &[GptOss]),
    ("use_double_wide_mlp", FALSE, &[]),
    ("hidden_activation", &[Text("silu"), Text("swish")], &[]),
    ("activation_function", &[Text("silu"), Text("swish")], &[Gpt2Moe]),
    // Multi-token prediction layers, which would be mistaken for layers of the model.
    ("num_nextn_predict_layers", ZERO, &[DeepseekV3]),
    ("num_mtp_layers", ZERO, &[DeepseekV3]),
    // Storage of weights.
    ("compression_config", NO_NEUTRAL_VALUE, &[]),
    ("quantization", NO_NEUTRAL_VALUE, &[]),
];

/// Fields with a single supported value in some families, whose behaviour is fixed.
const FIXED: &[(&str, bool, &[Family])] = &[
    ("use_qk_norm", true, QK_NORM),
    ("qk_norm", true, QK_NORM),
    ("qk_layernorm", true, QK_NORM),
    ("rope_interleave", true, &[DeepseekV2]),
    ("use_mla", true, DEEPSEEK),
    ("use_attention_sinks", true, &[GptOss]),
    // The weights of chosen experts are not normalised.
    ("norm_topk_prob", false, &[DeepseekV2]),
    ("norm_topk_prob", true, &[Mixtral, GraniteMoe, GptOss]),
];

/// Refuses fields and values that ask for something that models of the family do not do.
pub(crate) fn refuse(fields: Fields<'_>, family: Family) -> Result<(), CheckpointError> {
    let name = family.name();
    for (field, neutral, unchecked_in) in RULES {
        if let Some(value) = fields.get(field)
            && !unchecked_in.contains(&family)
            && !neutral.iter().any(|neutral| neutral.matches(value))
        {
            let message = format!("{}: not supported by family {name}", abbreviated(value));
            return Err(fields.unsupported(field, message));
        }
    }
    for (field, supported, families) in FIXED {
        if let Some(value) = fields.get(field)
            && families.contains(&family)
            && value.as_bool() != Some(*supported)
        {
            return Err(fields.unsupported(
                field,
                format!("{}: expected {supported} in family {name}", abbreviated(value)),
            ));
        }
    }
    // PhiMoE reads its own factors of longrope.
    if family != Phimoe
        && let Some(rope) = RopeFacts::parameters(fields)?
    {
        for field in ["short_mscale", "long_mscale"] {
            rope.refuse(field, "only PhiMoE has it")?;
        }
    }
    // These families apply a window whenever `sliding_window` is given.
    if [Mixtral, Phimoe, GptOss].contains(&family)
        && fields.get("use_sliding_window").is_some_and(|value| value.as_bool() != Some(true))
        && fields.get("sliding_window").is_some()
    {
        let message = format!("it contradicts sliding_window, which models of family {name} always apply");
        return Err(fields.unsupported("use_sliding_window", message));
    }
    Ok(())
}
