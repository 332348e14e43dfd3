//! Fields of `config.json` that mean another architecture in a family that does not read them.
//!
//! A config may carry fields that nothing reads, most of them without meaning. Those here change the answer of the
//! model that they are of: a checkpoint that has one is not what its `model_type` says, and to leave the field out of
//! account would give another answer without a word. A value that asks for nothing is taken.

use serde_json::Value;

use crate::error::CheckpointError;
use crate::family::Family::{
    self, DeepseekV2, DeepseekV3, Gpt2Moe, GptOss, GraniteMoe, Mixtral, Olmoe, Phimoe, Qwen2Moe, Qwen3Moe,
};
use crate::fields::{Fields, cut, same_number};
use crate::json_constants::Constant;
use crate::rope::RopeFacts;

/// A value that asks for nothing; null always does.
#[derive(Debug, Clone, Copy)]
enum Neutral {
    Flag(bool),
    Number(f64),
    Text(&'static str),
    EmptyList,
    /// Infinity, which limits nothing.
    Unlimited,
}

use Neutral::{EmptyList, Flag, Number, Text, Unlimited};

impl Neutral {
    fn is(self, value: &Value) -> bool {
        match self {
            Flag(flag) => value.as_bool() == Some(flag),
            Number(number) => same_number(value, number),
            Text(text) => value.as_str() == Some(text),
            EmptyList => value.as_array().is_some_and(Vec::is_empty),
            Unlimited => Constant::of(value) == Some(Constant::Infinity),
        }
    }
}

/// A field, what it may say, and the families that it says nothing new about: they read it, or have what it asks for.
type Row = (&'static str, &'static [Neutral], &'static [Family]);

const OFF: &[Neutral] = &[Flag(false)];
const ONCE: &[Neutral] = &[Number(1.0)];
const NONE_OF_THEM: &[Neutral] = &[Number(0.0)];
const NEVER: &[Neutral] = &[];
const SOFTMAX: &[Neutral] = &[Text("softmax")];
const DEEPSEEK: &[Family] = &[DeepseekV2, DeepseekV3];
/// Their biases are those of the family, whatever a field says.
const BIASED: &[Family] = &[GptOss, Gpt2Moe];
/// Norms of queries and keys.
const QK_NORM: &[Family] = &[Olmoe, Qwen3Moe];
const LAYER_NORM: &[Family] = &[Phimoe, Gpt2Moe];

const ROWS: &[Row] = &[
    // Scores and logits.
    ("attn_logit_softcapping", NEVER, &[]),
    ("final_logit_softcapping", NEVER, &[]),
    ("router_logit_softcapping", NEVER, &[]),
    ("query_pre_attn_scalar", NEVER, &[]),
    ("attn_temperature_tuning", &[Flag(false), Number(0.0)], &[]),
    ("attention_value_scale", ONCE, &[]),
    ("attn_scale", NEVER, &[]),
    ("scale_attn_weights", &[Flag(true)], &[Gpt2Moe]),
    ("scale_attn_by_inverse_layer_idx", OFF, &[Gpt2Moe]),
    ("attention_multiplier", NEVER, &[GraniteMoe]),
    ("embedding_multiplier", ONCE, &[GraniteMoe]),
    ("residual_multiplier", ONCE, &[GraniteMoe]),
    ("logits_scaling", ONCE, &[GraniteMoe]),
    ("logit_scale", ONCE, &[]),
    ("scale_emb", ONCE, &[]),
    ("scale_depth", NEVER, &[]),
    ("dim_model_base", NEVER, &[]),
    ("mup_enabled", OFF, &[]),
    // Norms.
    ("use_qk_norm", OFF, QK_NORM),
    ("qk_norm", OFF, QK_NORM),
    ("qk_layernorm", OFF, QK_NORM),
    ("norm_type", &[Text("rms_norm"), Text("rmsnorm"), Text("RMSNorm")], LAYER_NORM),
    ("use_rms_norm", &[Flag(true)], LAYER_NORM),
    ("sandwich_norm", OFF, &[]),
    ("zero_centered_norm", OFF, &[]),
    // Biases.
    (
        "attention_bias",
        OFF,
        &[Qwen2Moe, Olmoe, DeepseekV2, DeepseekV3, Qwen3Moe, GraniteMoe, Phimoe, GptOss, Gpt2Moe],
    ),
    ("qkv_bias", OFF, &[Qwen2Moe, GptOss, Gpt2Moe]),
    ("o_bias", OFF, BIASED),
    ("use_bias", OFF, BIASED),
    ("bias", OFF, BIASED),
    ("add_bias_linear", OFF, BIASED),
    ("mlp_bias", OFF, BIASED),
    ("router_bias", OFF, BIASED),
    ("moe_router_bias", OFF, BIASED),
    ("use_expert_bias", OFF, BIASED),
    ("moe_router_enable_expert_bias", OFF, &[DeepseekV3]),
    ("lm_head_bias", OFF, &[Phimoe]),
    // Positions.
    ("position_embedding_type", &[Text("rope"), Text("rotary")], &[Gpt2Moe]),
    ("no_rope_layers", &[EmptyList], &[]),
    ("no_rope_layer_interval", NEVER, &[]),
    ("nope_layer_interval", NEVER, &[]),
    ("rope_local_base_freq", NEVER, &[]),
    ("rope_interleave", OFF, DEEPSEEK),
    ("rotary_dim", NEVER, &[]),
    ("rotary_percent", ONCE, &[]),
    ("rope_percent", ONCE, &[]),
    // Attention.
    ("index_topk", NEVER, &[]),
    ("clip_qkv", &[Unlimited], &[Olmoe]),
    ("q_lora_rank", NEVER, DEEPSEEK),
    ("kv_lora_rank", NEVER, DEEPSEEK),
    ("use_mla", OFF, DEEPSEEK),
    ("use_attention_sinks", OFF, &[GptOss]),
    ("add_swa_attention_sink_bias", OFF, &[]),
    ("attn_output_gate", OFF, &[]),
    ("linear_num_value_heads", NEVER, &[]),
    ("full_attention_interval", ONCE, &[]),
    ("sliding_window_pattern", ONCE, &[]),
    ("dual_chunk_attention_config", NEVER, &[]),
    ("parallel_attn", OFF, &[]),
    ("hc_mult", ONCE, &[]),
    // Which layers have experts, and which of them a token uses.
    ("first_k_dense_replace", NONE_OF_THEM, DEEPSEEK),
    ("moe_layer_freq", ONCE, &[]),
    ("moe_layer_interval", ONCE, &[]),
    ("interleave_moe_layer_step", ONCE, &[]),
    ("moe_layer_start_index", NONE_OF_THEM, &[]),
    ("num_dense_layers", NONE_OF_THEM, &[]),
    ("moe_layers", NEVER, &[]),
    ("mlp_only_layers", &[EmptyList], &[Qwen2Moe, Qwen3Moe]),
    ("decoder_sparse_step", ONCE, &[Qwen2Moe, Qwen3Moe]),
    ("scoring_func", SOFTMAX, &[DeepseekV3]),
    ("score_function", SOFTMAX, &[DeepseekV3]),
    ("moe_router_activation_func", SOFTMAX, &[DeepseekV3]),
    ("topk_method", &[Text("greedy")], DEEPSEEK),
    ("n_group", &[Number(0.0), Number(1.0)], DEEPSEEK),
    ("topk_group", &[Number(0.0), Number(1.0)], DEEPSEEK),
    ("routed_scaling_factor", ONCE, DEEPSEEK),
    ("num_shared_experts", NONE_OF_THEM, &[]),
    ("n_shared_experts", NONE_OF_THEM, DEEPSEEK),
    ("shared_expert_intermediate_size", NONE_OF_THEM, &[Qwen2Moe]),
    ("norm_min", NEVER, &[]),
    ("zero_expert_num", NONE_OF_THEM, &[]),
    // What experts compute.
    ("swiglu_limit", &[Unlimited], &[GptOss]),
    ("swiglu_limits", NEVER, &[]),
    ("swiglu_alpha", NEVER, &[GptOss]),
    ("use_double_wide_mlp", OFF, &[]),
    ("hidden_activation", &[Text("silu"), Text("swish")], &[]),
    ("activation_function", &[Text("silu"), Text("swish")], &[Gpt2Moe]),
    // Layers that predict further tokens, which other families' would be confused with.
    ("num_nextn_predict_layers", NONE_OF_THEM, &[DeepseekV3]),
    ("num_mtp_layers", NONE_OF_THEM, &[DeepseekV3]),
    // How weights are stored.
    ("compression_config", NEVER, &[]),
    ("quantization", NEVER, &[]),
];

/// Fields that some families read, with the only value allowed in families whose behaviour is fixed.
const FIXED: &[(&str, bool, &[Family])] = &[
    ("use_qk_norm", true, QK_NORM),
    ("qk_norm", true, QK_NORM),
    ("qk_layernorm", true, QK_NORM),
    ("rope_interleave", true, &[DeepseekV2]),
    ("use_mla", true, DEEPSEEK),
    ("use_attention_sinks", true, &[GptOss]),
    // Weights of the chosen experts are what the softmax over all gave them.
    ("norm_topk_prob", false, &[DeepseekV2]),
    ("norm_topk_prob", true, &[Mixtral, GraniteMoe, GptOss]),
];

/// Refuses, by name, what a model of the family does not do.
pub(crate) fn refuse(fields: Fields<'_>, family: Family) -> Result<(), CheckpointError> {
    let name = family.name();
    for (field, neutral, read_by) in ROWS {
        if let Some(value) = fields.get(field)
            && !read_by.contains(&family)
            && !neutral.iter().any(|neutral| neutral.is(value))
        {
            let message = format!("{}: not supported by family {name}", cut(value));
            return Err(fields.unsupported(field, message));
        }
    }
    for (field, only, families) in FIXED {
        if let Some(value) = fields.get(field)
            && families.contains(&family)
            && value.as_bool() != Some(*only)
        {
            return Err(
                fields.unsupported(field, format!("{}: expected {only} in family {name}", cut(value)))
            );
        }
    }
    // longrope has factors of its own there.
    if family != Phimoe
        && let Some(rope) = RopeFacts::parameters(fields)?
    {
        for field in ["short_mscale", "long_mscale"] {
            rope.refuse(field, "only PhiMoE has it")?;
        }
    }
    // Those that have a window wherever one is named.
    if [Mixtral, Phimoe, GptOss].contains(&family)
        && fields.get("use_sliding_window").is_some_and(|value| value.as_bool() != Some(true))
        && fields.get("sliding_window").is_some()
    {
        let message = format!("it contradicts sliding_window, which models of family {name} always apply");
        return Err(fields.unsupported("use_sliding_window", message));
    }
    Ok(())
}
