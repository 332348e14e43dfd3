//! `config.json` of a shape, as transformers writes it.

use super::shape::{Family, ModelShape};
use serde_json::{Map, Value, json};

/// The config of `shape`. No token ends a text, so that every answer has the length that is asked for.
pub(super) fn of(shape: &ModelShape) -> Value {
    let common = json!({
        "dtype": shape.dtype.name(),
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads(),
        "num_experts_per_tok": shape.top_k,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": false,
        "hidden_act": "silu",
        "bos_token_id": null,
        "eos_token_id": null,
    });
    let particular = match shape.family {
        Family::Olmoe => json!({
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "num_experts": shape.experts,
            "intermediate_size": shape.width,
            "norm_topk_prob": false,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
        }),
        Family::Mixtral => json!({
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": shape.experts,
            "intermediate_size": shape.width,
            "sliding_window": null,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
        }),
        Family::Qwen2Moe => json!({
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "num_experts": shape.experts,
            "moe_intermediate_size": shape.width,
            "shared_expert_intermediate_size": shape.shared_width(),
            "intermediate_size": shape.dense_width(),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "qkv_bias": true,
            "use_sliding_window": false,
            "norm_topk_prob": false,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
        }),
        Family::Qwen3Moe => json!({
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": shape.head_dim(),
            "num_experts": shape.experts,
            "moe_intermediate_size": shape.width,
            "intermediate_size": shape.dense_width(),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": false,
            "use_sliding_window": false,
            "norm_topk_prob": true,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
        }),
        Family::DeepseekV2 => json!({
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "n_routed_experts": shape.experts,
            "n_shared_experts": shape.shared_width() / shape.width,
            "moe_intermediate_size": shape.width,
            "intermediate_size": shape.dense_width(),
            "first_k_dense_replace": shape.dense_layers(),
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
            "q_lora_rank": shape.q_rank,
            "kv_lora_rank": shape.kv_rank(),
            "qk_nope_head_dim": shape.head_dim(),
            "qk_rope_head_dim": shape.rope_dim(),
            "v_head_dim": shape.head_dim(),
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
        }),
    };
    let objects = [particular, common].into_iter().filter_map(|value| match value {
        Value::Object(fields) => Some(fields),
        _ => None,
    });
    Value::Object(objects.flatten().collect::<Map<_, _>>())
}
