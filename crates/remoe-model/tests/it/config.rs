//! `config.json` of every family: fields that are read, fields that are refused, and the names in errors.

use crate::support;

use std::path::Path;

use remoe_model::{
    Activation, AttentionFacts, CheckpointError, ExpertBiases, GqaFacts, GroupFacts, MlpFacts, ModelConfig,
    Multipliers, NormKind, QkNorm, RopeFacts, RopeLayout, Score, StoredDtype,
};
use serde_json::{Value, json};
use support::{
    Material, all_families, deepseek_v2, deepseek_v3, families, gpt_oss, gpt2_moe, granitemoe, mixtral,
    olmoe, phimoe, qwen2_moe, qwen3_moe,
};

fn parse(material: &Material) -> Result<ModelConfig, CheckpointError> {
    ModelConfig::from_json(Path::new("config.json"), material.config.to_string().as_bytes())
}

fn rope(config: &ModelConfig) -> &RopeFacts {
    config.rope.as_ref().unwrap()
}

fn gqa(config: &ModelConfig, layer: usize) -> &GqaFacts {
    match &config.layers[layer].attention {
        AttentionFacts::Gqa(facts) => facts,
        AttentionFacts::Mla(_) => panic!("layer {layer} has latent attention"),
    }
}

#[test]
fn current_mixtral_config_is_read() {
    let config = parse(&mixtral()).unwrap();
    assert_eq!(config.family.name(), "mixtral");
    assert_eq!(config.moe_layers(), [0, 1, 2]);
    let facts = gqa(&config, 0);
    assert_eq!((facts.heads, facts.kv_heads, facts.head_dim), (5, 1, 8));
    assert_eq!(facts.window, Some(4));
    let moe = config.any_moe().unwrap();
    assert_eq!((moe.experts, moe.top_k, moe.expert_width), (5, 3, 7));
    assert!(moe.routing.normalise && !moe.routing.weights_in_compute_dtype);
    assert_eq!(rope(&config).theta, 1e6);
    assert_eq!(rope(&config).layout, RopeLayout::Halves);
    assert_eq!((config.bos_id, &config.eos_ids[..]), (Some(1), &[2][..]));
    assert_eq!(config.context_length, 64);
}

#[test]
fn current_olmoe_config_is_read() {
    let config = parse(&olmoe()).unwrap();
    let facts = gqa(&config, 2);
    assert!(facts.qk_norm == Some(QkNorm::Row) && !facts.qkv_bias && !facts.o_bias);
    assert_eq!(facts.clip, Some(1.5));
    let moe = config.any_moe().unwrap();
    assert!(!moe.routing.normalise && moe.routing.weights_in_compute_dtype);
    // 50279 is outside the vocabulary of 59 tokens.
    assert!(config.eos_ids.is_empty());
}

#[test]
fn current_qwen2_moe_config_is_read() {
    let config = parse(&qwen2_moe()).unwrap();
    assert_eq!(config.moe_layers(), [0, 2]);
    assert_eq!(config.layers[1].mlp, MlpFacts::Dense { width: 9 });
    assert!(config.tie_embeddings);
    let facts = gqa(&config, 0);
    assert!(facts.qkv_bias && !facts.o_bias);
    assert_eq!(facts.window, None);
    let shared = config.any_moe().unwrap().shared.clone().unwrap();
    assert_eq!((shared.count, shared.width, shared.gated), (1, 11, true));
}

#[test]
fn current_deepseek_v2_config_is_read() {
    let config = parse(&deepseek_v2()).unwrap();
    assert_eq!(config.moe_layers(), [1, 2]);
    let AttentionFacts::Mla(facts) = &config.layers[0].attention else {
        panic!("no latent attention");
    };
    assert_eq!((facts.q_rank, facts.kv_rank), (Some(10), 6));
    assert_eq!((facts.nope_dim, facts.rope_dim, facts.value_dim), (6, 4, 5));
    assert_eq!(facts.latent_norm_eps, 1e-6);
    assert_eq!(config.layers[0].attention.cache_elements(), 10);
    assert_eq!(rope(&config).layout, RopeLayout::Interleaved);
    // mscale equals mscale_all_dim: cosine and sine are not scaled, the scores are.
    assert_eq!(rope(&config).attention_factor, 1.0);
    let moe = config.any_moe().unwrap();
    assert!(moe.routing.logits_in_float32 && !moe.routing.weights_in_compute_dtype);
    let shared = moe.shared.clone().unwrap();
    assert_eq!((shared.count, shared.width, shared.gated), (2, 14, false));
}

#[test]
fn current_qwen3_moe_config_is_read() {
    let mut material = qwen3_moe();
    let config = parse(&material).unwrap();
    assert_eq!(config.moe_layers(), [0, 2]);
    assert_eq!(gqa(&config, 0).qk_norm, Some(QkNorm::Head));
    assert!(config.any_moe().unwrap().routing.normalise);
    material.set("use_sliding_window", json!(true)).set("sliding_window", json!(5));
    let config = parse(&material).unwrap();
    assert!((0..3).all(|layer| gqa(&config, layer).window == Some(5)));
}

#[test]
fn current_granitemoe_config_is_read() {
    let config = parse(&granitemoe()).unwrap();
    assert_eq!(config.layers[0].attention.softmax_scale(), 0.25);
    let multipliers = Multipliers { embedding: 12.0, residual: 0.22, logits_divisor: 6.0 };
    assert_eq!(config.multipliers, multipliers);
    assert_eq!(config.any_moe().unwrap().routing.score, Score::SoftmaxOfChosen);
}

/// For more positions than those of the training, the rotation equals that of a config whose short factors are replaced by the
/// long ones.
#[test]
fn longrope_beyond_its_training_uses_the_long_factors() {
    let mut material = phimoe();
    material.set(
        "rope_parameters",
        json!({"rope_type": "longrope", "short_factor": [1, 2, 3, 4], "long_factor": [5, 6, 7, 8],
            "short_mscale": 1.25, "long_mscale": 1.5, "original_max_position_embeddings": 32}),
    );
    let folder = material.write();
    let opened = |positions| {
        let mut checkpoint = folder.open();
        checkpoint.set_positions(positions).map(|()| checkpoint)
    };
    let short = opened(32).unwrap();
    assert_eq!((short.config().served_context(), rope(short.config()).attention_factor), (32, 1.25));
    let fewer = opened(20).unwrap();
    assert_eq!((fewer.config().served_context(), rope(fewer.config()).attention_factor), (20, 1.25));
    let beyond = opened(48).unwrap();
    let seen = beyond.inspect().unwrap();
    assert_eq!((seen.context_length, seen.served_context()), (48, 48));
    material.set(
        "rope_parameters",
        json!({"rope_type": "longrope", "short_factor": [5, 6, 7, 8], "long_factor": [5, 6, 7, 8],
            "short_mscale": 1.5, "long_mscale": 1.5, "original_max_position_embeddings": 64}),
    );
    let by_config = parse(&material).unwrap();
    let of = |config: &ModelConfig| (rope(config).attention_factor, rope(config).inverse_frequencies());
    assert_eq!(of(beyond.config()), of(&by_config));
    assert_ne!(of(short.config()).1, of(&by_config).1);
    for positions in [0, 65] {
        let error = opened(positions).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("`max_position_embeddings`") && error.contains("of 1 to 64"), "{error}");
    }

    // In other families the factor of cosines and sines does not depend on the length of the text.
    let mut material = mixtral();
    let long = json!({"rope_type": "longrope", "short_factor": [1, 2, 3, 4], "long_factor": [5, 6, 7, 8],
        "original_max_position_embeddings": 32});
    material.set("rope_parameters", long);
    let mut checkpoint = material.write().open();
    let factor = rope(checkpoint.config()).attention_factor;
    checkpoint.set_positions(64).unwrap();
    assert_eq!(
        (rope(checkpoint.config()).attention_factor, checkpoint.config().served_context()),
        (factor, 64)
    );
    assert!(factor > 1.0);
    // Models with other rotations serve at most their own context.
    let mut checkpoint = phimoe().write().open();
    checkpoint.set_positions(7).unwrap();
    assert_eq!(checkpoint.inspect().unwrap().served_context(), 7);
}

#[test]
fn current_phimoe_config_is_read() {
    let mut material = phimoe();
    let config = parse(&material).unwrap();
    assert_eq!((config.norm, config.head_bias), (NormKind::Layer, true));
    assert_eq!(config.any_moe().unwrap().routing.score, Score::SparseMixer { jitter: 0.01 });
    assert_eq!(config.served_context(), 64);
    material.set(
        "rope_parameters",
        json!({"rope_type": "longrope", "short_factor": [1, 2, 3, 4], "long_factor": [5, 6, 7, 8],
            "short_mscale": 1.25, "long_mscale": 1.5, "original_max_position_embeddings": 32}),
    );
    let config = parse(&material).unwrap();
    assert_eq!((rope(&config).attention_factor, rope(&config).theta), (1.25, 1e6));
    assert_eq!((config.context_length, config.served_context()), (64, 32));
    assert_eq!(rope(&config).inverse_frequencies()[0], 1.0);
}

#[test]
fn current_gpt_oss_config_is_read() {
    let mut material = gpt_oss();
    let config = parse(&material).unwrap();
    let windows = |config: &ModelConfig| (0..3).map(|layer| gqa(config, layer).window).collect::<Vec<_>>();
    assert_eq!(windows(&config), [Some(4), None, Some(4)]);
    assert!(
        gqa(&config, 0).sinks
            && gqa(&config, 0).o_bias
            && config.any_moe().unwrap().biases == ExpertBiases::All
    );
    assert_eq!((config.activation, config.norm), (Activation::ClampedSwiglu, NormKind::RmsInFloat32));
    material.unset("layer_types").unset("sliding_window").set("swiglu_limit", json!(7.0));
    assert_eq!(windows(&parse(&material).unwrap()), [Some(128), None, Some(128)]);
}

#[test]
fn current_deepseek_v3_config_is_read() {
    let mut material = deepseek_v3();
    let config = parse(&material).unwrap();
    let routing = &config.any_moe().unwrap().routing;
    assert_eq!(routing.groups, Some(GroupFacts { groups: 2, chosen: 1, best: 2 }));
    assert_eq!((routing.score, routing.scale), (Score::Sigmoid, 2.5));
    assert!(routing.corrected && routing.normalise && !rope(&config).in_float32);
    assert_eq!(rope(&config).layout, RopeLayout::Interleaved);
    material.set("rope_interleave", json!(false));
    assert_eq!(rope(&parse(&material).unwrap()).layout, RopeLayout::Halves);
}

#[test]
fn group_limited_routing_is_read() {
    let mut material = deepseek_v2();
    material
        .set("topk_method", json!("group_limited_greedy"))
        .set("n_group", json!(2))
        .set("topk_group", json!(1))
        .set("routed_scaling_factor", json!(16.0));
    let config = parse(&material).unwrap();
    let routing = &config.any_moe().unwrap().routing;
    assert_eq!(routing.groups, Some(GroupFacts { groups: 2, chosen: 1, best: 1 }));
    assert_eq!(routing.scale, 16.0);
}

#[test]
fn gpt2_moe_reads_the_fields_of_gpt2() {
    let mut material = gpt2_moe();
    let config = parse(&material).unwrap();
    let moe = config.any_moe().unwrap();
    assert_eq!((moe.experts, moe.top_k, moe.expert_width), (4, 2, 7));
    assert!(!moe.gated && moe.output_bias && moe.biases == ExpertBiases::Inner);
    assert_eq!((moe.routing.score, moe.routing.bias), (Score::Unweighted, true));
    assert_eq!((config.activation, config.norm), (Activation::GeluTanh, NormKind::Layer));
    assert!(config.rope.is_none() && config.tie_embeddings && gqa(&config, 0).qkv_bias);
    assert_eq!((config.served_context(), gqa(&config, 0).kv_heads), (64, 5));
    // Missing fields have the defaults of `GPT2Config`.
    let text = json!({"model_type": "gpt2_moe"}).to_string();
    let small = ModelConfig::from_json(Path::new("c"), text.as_bytes()).unwrap();
    assert_eq!((small.vocab_size, small.hidden_size, small.layers.len()), (50_257, 768, 12));
    assert_eq!((small.context_length, small.any_moe().unwrap().expert_width), (1024, 4 * 768 / 8));
    assert_eq!((small.eos_ids.as_slice(), small.norm_eps), (&[50_256][..], 1e-5));
    material.set("activation_function", json!("gelu_pytorch_tanh")).set("n_inner", Value::Null);
    assert_eq!(parse(&material).unwrap().any_moe().unwrap().expert_width, 40);
    for (field, value) in [
        ("activation_function", json!("gelu")),
        ("activation_function", json!("relu")),
        ("scale_attn_weights", json!(false)),
        ("scale_attn_by_inverse_layer_idx", json!(true)),
        ("reorder_and_upcast_attn", json!(true)),
        ("add_cross_attention", json!(true)),
        ("n_head", json!(7)),
        ("num_attention_heads", json!(5)),
        ("n_embd", json!(0)),
        ("n_layer", json!(5000)),
        ("layer_norm_epsilon", json!(2)),
        ("num_local_experts", json!(3)),
        ("num_experts_per_tok", json!(5)),
    ] {
        let mut broken = gpt2_moe();
        broken.set(field, value.clone());
        assert_eq!(parse(&broken).unwrap_err().field(), Some(field), "{field} {value}");
    }
}

#[test]
fn older_config_style_gives_the_same_facts() {
    for mut material in families() {
        // gpt-oss has other defaults for missing rope parameters.
        if material.config["model_type"] == "gpt_oss" {
            continue;
        }
        let new = parse(&material).unwrap();
        let mut rope = material.config["rope_parameters"].clone();
        let theta = rope.as_object_mut().unwrap().remove("rope_theta").unwrap();
        let kind = rope.as_object_mut().unwrap().remove("rope_type").unwrap();
        let scaling = if kind == "default" { Value::Null } else { rope };
        material
            .unset("rope_parameters")
            .unset("dtype")
            .set("rope_theta", theta)
            .set("rope_scaling", scaling)
            .set("torch_dtype", json!("float32"));
        assert_eq!(parse(&material).unwrap(), new);
    }
}

#[test]
fn missing_fields_have_the_defaults_of_transformers() {
    for (family, vocab, hidden, layers, heads, context) in [
        ("mixtral", 32000, 4096, 32, 32, 131_072),
        ("olmoe", 50304, 2048, 16, 16, 4096),
        ("qwen2_moe", 151_936, 2048, 24, 16, 32768),
    ] {
        let text = json!({"model_type": family}).to_string();
        let config = ModelConfig::from_json(Path::new("c"), text.as_bytes()).unwrap();
        assert_eq!(
            (config.vocab_size, config.hidden_size, config.layers.len(), config.context_length),
            (vocab, hidden, layers, context)
        );
        assert_eq!(config.layers[0].attention.heads(), heads);
        assert_eq!(config.dtype, StoredDtype::F32);
        assert_eq!(config.activation, Activation::Silu);
    }
    let text = json!({"model_type": "deepseek_v2", "num_experts_per_tok": 6}).to_string();
    let config = ModelConfig::from_json(Path::new("c"), text.as_bytes()).unwrap();
    assert_eq!(config.any_moe().unwrap().shared.as_ref().unwrap().width, 2 * 1407);
}

#[test]
fn windows_of_qwen2_moe_follow_max_window_layers() {
    let mut material = qwen2_moe();
    material
        .set("use_sliding_window", json!(true))
        .set("sliding_window", json!(3))
        .set("max_window_layers", json!(2))
        .unset("layer_types");
    let windows = |material: &Material| {
        let config = parse(material).unwrap();
        (0..3).map(|layer| gqa(&config, layer).window).collect::<Vec<_>>()
    };
    // Layers with an even id below max_window_layers.
    assert_eq!(windows(&material), [Some(3), None, None]);
    material.set("layer_types", json!(["full_attention", "sliding_attention", "sliding_attention"]));
    assert_eq!(windows(&material), [None, Some(3), Some(3)]);
}

#[test]
fn null_key_value_heads_mean_one_per_head() {
    for mut material in families() {
        material.set("num_key_value_heads", Value::Null);
        let config = parse(&material).unwrap();
        if let AttentionFacts::Gqa(facts) = &config.layers[0].attention {
            assert_eq!(facts.kv_heads, 5);
        }
    }
}

/// Each row has a field, its value, and the name that the error must contain.
#[test]
fn unsupported_fields_are_refused_by_name() {
    let everywhere = [
        ("model_type", json!("llama"), "model_type"),
        ("model_type", json!(7), "model_type"),
        ("quantization_config", json!({"bits": 4}), "quantization_config.quant_method"),
        ("quantization_config", json!({}), "quantization_config"),
        (
            "quantization_config",
            json!({"quant_method": "gptq", "bits": 4}),
            "quantization_config.quant_method",
        ),
        ("hidden_act", json!("gelu"), "hidden_act"),
        ("hidden_act", json!("gelu_new"), "hidden_act"),
        ("dtype", json!("float64"), "dtype"),
        ("dtype", json!("int8"), "dtype"),
        ("vocab_size", json!(0), "vocab_size"),
        ("vocab_size", json!(-1), "vocab_size"),
        ("vocab_size", json!(59.5), "vocab_size"),
        ("vocab_size", Value::Null, "vocab_size"),
        ("vocab_size", json!(1_u64 << 40), "vocab_size"),
        ("hidden_size", json!("40"), "hidden_size"),
        ("hidden_size", json!(41), "num_attention_heads"),
        ("num_hidden_layers", json!(0), "num_hidden_layers"),
        ("num_hidden_layers", json!(1_000_000), "num_hidden_layers"),
        ("num_attention_heads", json!([5]), "num_attention_heads"),
        ("num_key_value_heads", json!(2), "num_key_value_heads"),
        ("num_key_value_heads", json!(0), "num_key_value_heads"),
        ("num_experts_per_tok", json!(6), "num_experts_per_tok"),
        ("num_experts_per_tok", json!(0), "num_experts_per_tok"),
        ("max_position_embeddings", json!(0), "max_position_embeddings"),
        ("rms_norm_eps", json!("NaN"), "rms_norm_eps"),
        ("rms_norm_eps", json!(-1e-6), "rms_norm_eps"),
        ("tie_word_embeddings", json!(1), "tie_word_embeddings"),
        ("eos_token_id", json!("</s>"), "eos_token_id"),
        ("per_layer_config", json!({"0": {}}), "per_layer_config"),
        ("attention_chunk_size", json!(8), "attention_chunk_size"),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor"),
        ("rope_scaling", json!({"rope_type": "dynamic"}), "rope_scaling.factor"),
        ("rope_scaling", json!({"type": "longrope"}), "rope_scaling.short_factor"),
        ("rope_scaling", json!({"rope_type": "proportional"}), "rope_scaling.rope_type"),
        ("rope_scaling", json!({"rope_type": "linear"}), "rope_scaling.factor"),
        ("rope_scaling", json!({"rope_type": "linear", "factor": 0}), "rope_scaling.factor"),
        ("rope_scaling", json!({"rope_type": "yarn"}), "rope_scaling.factor"),
        (
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
            "rope_scaling.high_freq_factor",
        ),
        ("rope_scaling", json!({"rope_theta": -5.0}), "rope_scaling.rope_theta"),
        ("rope_scaling", json!({"partial_rotary_factor": 0.25}), "rope_scaling.partial_rotary_factor"),
        ("rope_scaling", json!({"full_attention": {"rope_type": "default"}}), "rope_scaling.full_attention"),
        ("rope_scaling", json!("yarn"), "rope_scaling"),
    ];
    for material in families() {
        let family = material.config["model_type"].clone();
        for (field, value, named) in &everywhere {
            // The heads of these families do not depend on the hidden size.
            let own_heads = family == "deepseek_v3" || family == "gpt_oss";
            if own_heads && *field == "hidden_size" && *value == 41 {
                continue;
            }
            let mut broken = material.clone();
            if *field == "rope_scaling" {
                broken.unset("rope_parameters");
            }
            broken.set(field, value.clone());
            let error = parse(&broken).unwrap_err();
            assert_eq!(error.field(), Some(*named), "{family} {field} {value}: {error}");
            assert_eq!(error.path(), Path::new("config.json"));
            assert!(error.to_string().contains("config.json"));
        }
    }
    let particular = [
        (mixtral(), "sliding_window", json!(0), "sliding_window"),
        (
            mixtral(),
            "layer_types",
            json!(["full_attention", "full_attention", "full_attention"]),
            "layer_types",
        ),
        (mixtral(), "head_dim", json!(7), "head_dim"),
        (mixtral(), "num_local_experts", json!(0), "num_local_experts"),
        (mixtral(), "intermediate_size", json!(0), "intermediate_size"),
        (olmoe(), "sliding_window", json!(4), "sliding_window"),
        (olmoe(), "clip_qkv", json!(-1.0), "clip_qkv"),
        (olmoe(), "head_dim", json!(16), "head_dim"),
        (olmoe(), "norm_topk_prob", json!("yes"), "norm_topk_prob"),
        (olmoe(), "attention_bias", Value::Null, "attention_bias"),
        (qwen2_moe(), "layer_types", json!(["full_attention"]), "layer_types"),
        (
            qwen2_moe(),
            "layer_types",
            json!(["sliding_attention", "sliding_attention", "sliding_attention"]),
            "layer_types",
        ),
        (
            qwen2_moe(),
            "layer_types",
            json!(["linear_attention", "linear_attention", "linear_attention"]),
            "layer_types",
        ),
        (qwen2_moe(), "decoder_sparse_step", json!(0), "decoder_sparse_step"),
        (qwen2_moe(), "decoder_sparse_step", json!(9), "num_hidden_layers"),
        (qwen2_moe(), "mlp_only_layers", json!(["1"]), "mlp_only_layers"),
        (qwen2_moe(), "shared_expert_intermediate_size", json!(0), "shared_expert_intermediate_size"),
        (qwen2_moe(), "num_experts", json!(0), "num_experts"),
        (deepseek_v2(), "mlp_bias", json!(true), "mlp_bias"),
        (deepseek_v2(), "topk_method", json!("noaux_tc"), "topk_method"),
        (deepseek_v2(), "topk_method", Value::Null, "topk_method"),
        (deepseek_v2(), "topk_method", json!("group_limited_greedy"), "n_group"),
        (deepseek_v2(), "qk_rope_head_dim", json!(3), "qk_rope_head_dim"),
        (deepseek_v2(), "num_experts_per_tok", Value::Null, "num_experts_per_tok"),
        (deepseek_v2(), "num_key_value_heads", json!(1), "num_key_value_heads"),
        (deepseek_v2(), "sliding_window", json!(4), "sliding_window"),
        (deepseek_v2(), "n_shared_experts", Value::Null, "n_shared_experts"),
        (qwen3_moe(), "layer_types", json!(["sliding_attention"]), "layer_types"),
        (qwen3_moe(), "use_sliding_window", json!("yes"), "use_sliding_window"),
        (qwen3_moe(), "attention_bias", json!("no"), "attention_bias"),
        (granitemoe(), "sliding_window", json!(4), "sliding_window"),
        (granitemoe(), "attention_multiplier", Value::Null, "attention_multiplier"),
        (granitemoe(), "attention_multiplier", json!(-0.5), "attention_multiplier"),
        (granitemoe(), "logits_scaling", json!(0), "logits_scaling"),
        (granitemoe(), "residual_multiplier", json!(1e60), "residual_multiplier"),
        (phimoe(), "num_experts_per_tok", json!(1), "num_experts_per_tok"),
        (phimoe(), "router_jitter_noise", json!(-0.5), "router_jitter_noise"),
        (phimoe(), "rope_scaling", json!({"rope_type": "linear", "factor": 2.0}), "rope_parameters"),
        (
            phimoe(),
            "rope_scaling",
            json!({"rope_type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1, 1, 1, 1]}),
            "rope_scaling.long_mscale",
        ),
        (
            phimoe(),
            "rope_scaling",
            json!({"type": "longrope", "short_factor": [1]}),
            "rope_scaling.short_factor",
        ),
        (gpt_oss(), "swiglu_limit", json!(5.0), "swiglu_limit"),
        (gpt_oss(), "sliding_window", Value::Null, "sliding_window"),
        (gpt_oss(), "layer_types", json!(["full_attention"]), "layer_types"),
        (gpt_oss(), "rope_parameters", Value::Null, "rope_parameters"),
        (deepseek_v3(), "scoring_func", json!("softmax"), "scoring_func"),
        (deepseek_v3(), "topk_method", json!("greedy"), "topk_method"),
        (deepseek_v3(), "n_group", Value::Null, "n_group"),
        (deepseek_v3(), "n_group", json!(4), "n_group"),
        (deepseek_v3(), "n_group", json!(3), "n_group"),
        (deepseek_v3(), "topk_group", json!(3), "topk_group"),
        (deepseek_v3(), "num_experts_per_tok", json!(3), "num_experts_per_tok"),
        (deepseek_v3(), "head_dim", json!(8), "head_dim"),
        (deepseek_v3(), "routed_scaling_factor", json!(0), "routed_scaling_factor"),
    ];
    for (mut material, field, value, named) in particular {
        if field == "rope_scaling" {
            material.unset("rope_parameters");
        }
        material.set(field, value.clone());
        let error = parse(&material).unwrap_err();
        assert_eq!(error.field(), Some(named), "{field} {value}: {error}");
    }
}

#[test]
fn fields_without_effect_on_results_are_ignored() {
    for mut material in all_families() {
        let plain = parse(&material).unwrap();
        material
            .set("attention_dropout", json!(0.5))
            .set("use_cache", json!(false))
            .set("some_new_field", json!({"a": [1]}))
            .set("hidden_act", json!("swish"))
            .set("partial_rotary_factor", json!(1.0));
        assert_eq!(parse(&material).unwrap(), plain);
    }
}

#[test]
fn malformed_configs_are_refused() {
    for text in ["", "[]", "{", "nul", "{\"model_type\": NaN}", "\u{0}"] {
        let error = ModelConfig::from_json(Path::new("c.json"), text.as_bytes()).unwrap_err();
        assert_eq!(error.path(), Path::new("c.json"), "{text}");
    }
    for value in ["NaN", "-Infinity", "1e999"] {
        let text = format!("{{\n  \"model_type\": \"mixtral\",\n  \"rms_norm_eps\": {value}\n}}");
        let error = ModelConfig::from_json(Path::new("c.json"), text.as_bytes()).unwrap_err();
        assert_eq!(error.field(), Some("rms_norm_eps"), "{error}");
    }
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(ModelConfig::from_json(Path::new("c"), deep.as_bytes()).is_err());
}
