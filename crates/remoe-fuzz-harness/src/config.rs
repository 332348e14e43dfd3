//! Target: `config.json` of every family, and `generation_config.json`.
//!
//! Input: the two files, separated by a zero byte.

use crate::{check_error, fixtures, memory, sections};
use remoe_model::{AttentionFacts, GenerationDefaults, MlpFacts, ModelConfig};
use std::path::Path;

/// Memory limit per byte of JSON: `0,` becomes a value of 32 bytes in a list that doubles, `{"":{}}` an object with a
/// hash table.
const BYTES_PER_INPUT_BYTE: usize = 256;
/// Fixed part of the memory limit: 4096 layers, and the rotary frequencies of the widest head.
const BASE_BYTES: usize = 4 << 20;

pub fn run(data: &[u8]) {
    let ([config, generation], _) = sections::split(data);
    memory::with_limit(BASE_BYTES + BYTES_PER_INPUT_BYTE * data.len(), || {
        match ModelConfig::from_json(Path::new("config.json"), config) {
            Err(error) => check_error(&error.to_string()),
            Ok(config) => {
                check_config(&config);
                let path = Path::new("generation_config.json");
                match GenerationDefaults::from_json(path, generation, &config) {
                    Err(error) => check_error(&error.to_string()),
                    Ok(defaults) => check_defaults(&defaults, &config),
                }
            }
        }
    });
}

/// Asserts the properties of a config that all computing code relies on.
pub(crate) fn check_config(config: &ModelConfig) {
    let at_least_one = [config.vocab_size, config.hidden_size, config.context_length, config.layers.len()];
    assert!(at_least_one.iter().all(|size| *size > 0));
    assert!(config.norm_eps.is_finite() && config.norm_eps >= 0.0);
    assert!(config.eos_ids.iter().chain(&config.bos_id).all(|id| (*id as usize) < config.vocab_size));

    let moe_layers = config.moe_layers();
    assert!(!moe_layers.is_empty() && moe_layers.is_sorted());
    let first = config.any_moe().expect("there is one");
    let mut kv_bytes_per_token = 0_u64;
    for (id, layer) in config.layers.iter().enumerate() {
        assert!(layer.attention.heads() > 0);
        let scale = layer.attention.softmax_scale();
        assert!(scale.is_finite() && scale > 0.0, "softmax scale {scale}");
        let rotary_dim = match &layer.attention {
            AttentionFacts::Gqa(facts) => {
                assert!(facts.heads.is_multiple_of(facts.kv_heads) && facts.head_dim > 0);
                assert!(
                    facts.window != Some(0) && facts.clip.is_none_or(|clip| clip.is_finite() && clip >= 0.0)
                );
                facts.heads.checked_mul(facts.head_dim).expect("rows of a projection are countable");
                facts.head_dim
            }
            AttentionFacts::Mla(facts) => {
                let head = facts.nope_dim.checked_add(facts.rope_dim.max(facts.value_dim)).expect("a head");
                facts.heads.checked_mul(head).expect("rows of a projection are countable");
                assert!(facts.kv_rank > 0 && facts.value_dim > 0 && facts.q_rank != Some(0));
                facts.rope_dim
            }
        };
        if let Some(rope) = &config.rope {
            assert_eq!(rotary_dim, rope.dim, "layer {id} rotates what the frequencies are for");
        }
        let elements = layer.attention.cache_elements() as u64;
        kv_bytes_per_token = elements
            .checked_mul(config.dtype.bytes())
            .and_then(|b| b.checked_add(kv_bytes_per_token))
            .expect("a token");
        match &layer.mlp {
            MlpFacts::Dense { width } => assert!(*width > 0),
            MlpFacts::Moe(moe) => {
                assert!(moe.top_k > 0 && moe.top_k <= moe.experts && moe.expert_width > 0);
                assert_eq!(
                    (moe.experts, moe.top_k, moe.expert_width),
                    (first.experts, first.top_k, first.expert_width)
                );
                assert!(moe.routing.scale.is_finite());
                if let Some(groups) = moe.routing.groups {
                    assert!(moe.experts.is_multiple_of(groups.groups) && groups.chosen <= groups.groups);
                    assert!(moe.top_k <= groups.chosen * (moe.experts / groups.groups));
                }
                assert!(moe.shared.as_ref().is_none_or(|shared| shared.width > 0 && shared.count > 0));
            }
        }
    }
    if let Some(rope) = &config.rope {
        let frequencies = rope.inverse_frequencies();
        assert!(rope.dim.is_multiple_of(2));
        assert_eq!(frequencies.len(), rope.dim / 2);
        assert!(frequencies.iter().all(|frequency| frequency.is_finite()));
        assert!(rope.attention_factor.is_finite());
    }
}

pub(crate) fn check_defaults(defaults: &GenerationDefaults, config: &ModelConfig) {
    assert!(defaults.temperature.is_finite() && defaults.temperature >= 0.0);
    assert!(defaults.top_p.is_none_or(|top_p| top_p > 0.0 && top_p <= 1.0));
    assert!(defaults.min_p.is_none_or(|min_p| (0.0..=1.0).contains(&min_p)));
    assert!(defaults.top_k != Some(0) && defaults.max_new_tokens != Some(0));
    assert!(defaults.repetition_penalty.is_none_or(|penalty| penalty > 0.0 && penalty.is_finite()));
    assert!(defaults.eos_token_ids.iter().all(|id| (*id as usize) < config.vocab_size));
}

pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for folder in fixtures::checkpoints() {
        let config = fixtures::read(folder.join("config.json"));
        let generation = fixtures::read(folder.join("generation_config.json"));
        // Compact JSON, because short inputs are fuzzed faster.
        let compact: serde_json::Value = serde_json::from_slice(&config).expect("a fixture is right");
        seeds.push(sections::join(&[compact.to_string().as_bytes(), &generation]));
    }
    let generation = br#"{"do_sample":true,"temperature":0.7,"top_p":0.9,"top_k":20,"min_p":0.1,"repetition_penalty":1.1,"max_new_tokens":9,"eos_token_id":[1,2]}"#;
    let yarn = r#""rope_scaling":{"rope_type":"yarn","factor":40,"mscale":0.7,"mscale_all_dim":0.7,"beta_fast":32,"beta_slow":1,"original_max_position_embeddings":4096,"truncate":false}"#;
    let config = format!(r#"{{"model_type":"deepseek_v2","num_experts_per_tok":2,{yarn}}}"#);
    seeds.push(sections::join(&[config.as_bytes(), generation]));
    for family in ["mixtral", "qwen2_moe", "olmoe", "deepseek_v2"] {
        let config = format!(r#"{{"model_type":"{family}","num_experts_per_tok":2}}"#);
        seeds.push(sections::join(&[config.as_bytes(), generation]));
    }
    let long_text = fixtures::long_text();
    for field in [
        "model_type",
        "hidden_act",
        "dtype",
        "vocab_size",
        "layer_types",
        "rope_type",
        "topk_method",
        "mlp_only_layers",
    ] {
        let family = if field == "topk_method" { "deepseek_v2" } else { "qwen2_moe" };
        let mut config = serde_json::json!({"model_type": family, "num_experts_per_tok": 2});
        match field {
            "rope_type" => {
                config["rope_scaling"] = serde_json::json!({"rope_type": long_text, long_text.as_str(): 1})
            }
            "layer_types" => config[field] = vec![long_text.as_str(); 24].into(),
            "mlp_only_layers" => config[field] = vec![long_text.as_str()].into(),
            _ => config[field] = long_text.as_str().into(),
        }
        seeds.push(sections::join(&[config.to_string().as_bytes(), generation]));
    }
    let fields = format!(r#"{{"temperature":"{long_text}"}}"#);
    seeds.push(sections::join(&[br#"{"model_type":"mixtral"}"#, fields.as_bytes()]));
    seeds
}
