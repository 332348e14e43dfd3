//! Sizes from a configuration alone, compared with checkpoints and with published counts.

use crate::support;

use remoe_model::kv_pages::{CachedLayer, PAGE_POSITIONS, PREFILL_ROWS, PageNeeds, WindowedLayers};
use remoe_model::{
    Checkpoint, CheckpointError, Folder, Inspection, KvCacheDtype, ModelConfig, Outline, Weights,
};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

fn published(name: &str) -> Outline {
    Outline::open_in(&Folder::new(fixtures().join("published").join(name)), None).unwrap()
}

#[test]
fn published_models_have_their_published_parameter_counts() {
    // In billions: of all weights, and active for a token. DeepSeek-V3 (arXiv 2412.19437) counts 671 and 37,
    // the Mixtral-8x22B announcement 141 and 39, the gpt-oss model card 116.83 and 5.13, Qwen3 235 and 22.
    for (name, all, active) in [
        ("deepseek-v3", 671.0, 37.0),
        ("mixtral-8x22b", 141.0, 39.0),
        ("gpt-oss-120b", 116.83, 5.13),
        ("qwen3-235b-a22b", 235.0, 22.0),
    ] {
        let outline = published(name);
        let (counted, used) = (outline.parameters() as f64 / 1e9, outline.active_parameters() as f64 / 1e9);
        assert!((counted / all - 1.0).abs() < 0.004, "{name}: {counted}");
        assert!((used / active - 1.0).abs() < 0.025, "{name}: {used}");
    }
}

#[test]
fn parameters_of_mixtral_equal_those_of_its_checkpoint() {
    // `total_size` of model.safetensors.index.json of mistralai/Mixtral-8x22B-v0.1 is twice this.
    assert_eq!(published("mixtral-8x22b").parameters(), 140_620_634_112);
    assert_eq!(published("mixtral-8x22b").inspection("").total_bytes, 281_241_268_224);
}

/// Half of the layers of gpt-oss keep a window, a prefill, and the positions up to the next page.
#[test]
fn windowed_layers_take_the_pages_that_the_engine_counts() {
    let facts = published("gpt-oss-120b").inspection("");
    assert_eq!(facts.kv_windowed, Some(WindowedLayers { layers: 18, window: 128 }));
    // Keys and values of 8 heads of 64.
    let page_bytes = 2 * 8 * 64 * 2 * PAGE_POSITIONS;
    let layers = [Some(128), None].repeat(18).into_iter().map(|window| CachedLayer { page_bytes, window });
    let (needs, _) = PageNeeds::of(&layers.collect::<Vec<_>>());
    let kv = facts.resident_kv("bfloat16");
    assert_eq!(kv.all_bytes_per_token(), facts.kv_bytes_per_token);
    for (positions, share) in [(2048, 1.0), (4096, 0.77), (131_072, 0.51)] {
        // A page holds layers of one kind.
        let pages = needs.pages(positions, PREFILL_ROWS) * 18 * page_bytes;
        assert_eq!(kv.of(positions as u64), pages as u64);
        let whole = facts.kv_bytes_per_token as f64 * positions as f64;
        assert!(pages as f64 / whole <= share, "{positions}: {}", pages as f64 / whole);
    }
    let int8 = Inspection { kv_cache_dtype: Some(KvCacheDtype::Int8), ..facts.clone() };
    let share = int8.resident_kv("bfloat16").of(4096) as f64 / kv.of(4096) as f64;
    assert_eq!(share, 66.0 / 128.0, "a scale of two bytes for a head");
    assert_eq!(published("qwen3-235b-a22b").inspection("").kv_windowed, None);
}

#[test]
fn quantised_forms_take_their_stored_bytes() {
    let deepseek = published("deepseek-v3");
    assert_eq!(deepseek.weights, Weights::Fp8 { block: Some(128 * 128) });
    let facts = deepseek.inspection("");
    // Three matrices of 7168 x 2048 in a byte an element, and their scales.
    let matrices = 3 * 7168 * 2048;
    assert_eq!(facts.expert_bytes, matrices + 4 * matrices / (128 * 128));
    assert_eq!(
        (facts.moe_layers.len(), facts.experts, facts.top_k, facts.dtype.as_str()),
        (58, 256, 8, "fp8")
    );
    // A latent of 512 and 64 rotary elements, two bytes each.
    assert_eq!(facts.kv_bytes_per_token, 61 * (512 + 64) * 2);
    // Its repository has 688.6 GB, 14.1 of them in a layer that predicts further tokens.
    assert!((facts.total_bytes as f64 / 674.5e9 - 1.0).abs() < 0.005, "{}", facts.total_bytes);
    assert_eq!(facts.resident_bytes(facts.total_bytes, "fp8"), facts.total_bytes);

    let gpt_oss = published("gpt-oss-120b").inspection("");
    let (matrices, biases) = (3 * 2880 * 2880, 3 * 2880);
    assert_eq!(gpt_oss.expert_bytes, matrices * 17 / 32 + 2 * biases);
    // Its checkpoint has 60.8 GiB (model card).
    let gibibytes = gpt_oss.total_bytes as f64 / f64::from(1 << 30);
    assert!((gibibytes / 60.8 - 1.0).abs() < 0.005, "{gibibytes}");

    let wide = Outline::open_in(&Folder::new(fixtures().join("published/gpt-oss-120b")), Some("bfloat16"));
    let wide = wide.unwrap();
    assert_eq!((wide.weights, wide.inspection("").total_bytes), (Weights::Plain, 2 * wide.parameters()));
}

#[test]
fn outline_equals_that_of_its_checkpoint() {
    let mut compared = 0;
    for entry in std::fs::read_dir(fixtures()).unwrap() {
        let folder = entry.unwrap().path();
        let Ok(checkpoint) = Checkpoint::open(&folder) else { continue };
        let inspection = checkpoint.inspect().unwrap();
        // `short_forms.rs` compares the quantised ones, which an outline counts as stored.
        if inspection.stored_as.is_some() {
            continue;
        }
        let outline = Outline::open_in(&Folder::new(&folder), None).unwrap();
        let outline = Outline { dtype: inspection.dtype.clone(), ..outline };
        let expected = Inspection { fingerprint: "none".to_owned(), ..inspection };
        assert_eq!(outline.inspection("none"), expected, "{}", folder.display());
        compared += 1;
    }
    assert!(compared >= 15, "{compared}");
}

#[test]
fn configs_without_a_known_size_are_refused_by_field() {
    let read = |text: &str, dtype: Option<&str>| {
        Outline::from_json(Path::new("config.json"), text.as_bytes(), dtype)
    };
    let valid = std::fs::read_to_string(fixtures().join("published/qwen3-235b-a22b/config.json")).unwrap();
    assert!(read(&valid, None).is_ok());
    for (from, to, field) in [
        ("\"qwen3_moe\"", "\"llama\"", "model_type"),
        ("\"num_experts\": 128", "\"num_experts\": 0", "num_experts"),
        ("\"num_experts\": 128", "\"num_experts\": 4", "num_experts_per_tok"),
        ("\"num_experts\": 128", "\"num_experts\": \"many\"", "num_experts"),
        ("\"num_hidden_layers\": 94", "\"num_hidden_layers\": 1000000", "num_hidden_layers"),
        ("\"hidden_size\": 4096", "\"hidden_size\": 2000000000", "hidden_size"),
        ("\"decoder_sparse_step\": 1", "\"decoder_sparse_step\": 1000", "num_hidden_layers"),
    ] {
        let error = read(&valid.replace(from, to), None).unwrap_err();
        assert_eq!(error.field(), Some(field), "{to}: {error}");
    }
    let gptq = valid.replacen('{', "{\"quantization_config\": {\"quant_method\": \"gptq\", \"bits\": 4},", 1);
    let error = read(&gptq, None).unwrap_err();
    assert!(matches!(&error, CheckpointError::Unsupported { .. }), "{error}");
    assert_eq!(error.field(), Some("quantization_config.quant_method"));
    // Counted in a dtype that was named, it does not matter how it is stored.
    assert_eq!(read(&gptq, Some("bfloat16")).unwrap().parameters(), read(&valid, None).unwrap().parameters());
}

/// Returns `hf_quant_config.json` as ModelOpt writes it.
fn quantised(algorithm: &Value) -> String {
    json!({
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"],
        },
    })
    .to_string()
}

#[test]
fn modelopt_checkpoints_are_refused_by_name() {
    let published =
        std::fs::read_to_string(fixtures().join("published/qwen3-235b-a22b/config.json")).unwrap();
    let alone = support::Folder::new();
    alone.put("config.json", &published);
    let stored = support::mixtral().write();
    let open = |folder: &support::Folder, dtype| Outline::open_in(&Folder::new(folder.path()), dtype);
    for algorithm in ["NVFP4", "FP8", "W4A8_AWQ", "MIXED_PRECISION"] {
        for folder in [&alone, &stored] {
            folder.put("hf_quant_config.json", quantised(&json!(algorithm)));
            for error in [open(folder, None).unwrap_err(), folder.error()] {
                assert!(matches!(&error, CheckpointError::Unsupported { .. }), "{error}");
                assert_eq!(error.field(), Some("quantization.quant_algo"));
                let text = error.to_string();
                assert!(text.contains(algorithm) && text.contains("use a float32, bfloat16"), "{text}");
            }
            // Counted in a dtype that was named, it does not matter how it is stored.
            assert!(open(folder, Some("bfloat16")).is_ok());
        }
    }
    // A file that only describes the KV cache.
    stored.put("hf_quant_config.json", quantised(&json!(null)));
    assert_eq!(stored.open().config().layers.len(), 3);
    for (text, field) in
        [("{}", "quantization"), ("{\"quantization\": {\"quant_algo\": 4}}", "quantization.quant_algo")]
    {
        stored.put("hf_quant_config.json", text);
        assert_eq!(stored.error().field(), Some(field));
    }
    let quantisation = json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
    let inside = published.replacen('{', &format!("{{\"quantization_config\": {quantisation},"), 1);
    let error = Outline::from_json(Path::new("config.json"), inside.as_bytes(), None).unwrap_err();
    assert_eq!(error.field(), Some("quantization_config.quant_method"));
    let mut material = support::mixtral();
    material.set("quantization_config", quantisation);
    let error = material.write().error();
    assert_eq!(error.field(), Some("quantization_config.quant_method"));
    assert!(error.to_string().contains("`modelopt` (NVFP4)"), "{error}");
}

/// Fields of the config of moonshotai/Kimi-K2-Instruct. Its model card counts 1 trillion parameters, 32 billion of them active.
#[test]
fn kimi_k2_has_the_outline_of_deepseek_v3() {
    let text = r#"{
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "attention_bias": false, "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585, "ep_size": 1,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 131072, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
        "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
        },
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"
        },
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": true,
        "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "v_head_dim": 128, "vocab_size": 163840
    }"#;
    let outline = Outline::from_json(Path::new("config.json"), text.as_bytes(), None).unwrap();
    assert_eq!((outline.family.as_str(), outline.context), ("deepseek_v3", 131_072));
    assert_eq!(outline.weights, Weights::Fp8 { block: Some(128 * 128) });
    let (all, active) = (outline.parameters() as f64 / 1e9, outline.active_parameters() as f64 / 1e9);
    assert!((1020.0..1030.0).contains(&all) && (31.0..33.5).contains(&active), "{all} {active}");
    assert!(ModelConfig::from_json(Path::new("config.json"), text.as_bytes()).is_ok());
}
