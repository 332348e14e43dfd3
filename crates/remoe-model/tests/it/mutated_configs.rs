//! Configs of every family with a changed field. Each is refused by the name of a field, gives the same facts as before,
//! or changes only the facts that the field is about.

use crate::support;

use std::path::Path;

use remoe_model::{
    Activation, AttentionFacts, CheckpointError, GqaFacts, GroupFacts, MlaFacts, MlpFacts, ModelConfig,
    MoeFacts, RopeFacts, RopeLayout, RopeScaling, Score, StoredDtype,
};
use serde_json::{Value, json};
use support::{
    Material, all_families, deepseek_v2, deepseek_v3, gpt_oss, gpt2_moe, granitemoe, mixtral, olmoe, phimoe,
    qwen2_moe, qwen3_moe,
};

/// Outcome of a changed config.
enum ConfigOutcome {
    /// Error that names this field.
    Refused(&'static str),
    /// Facts of the unchanged config.
    Same,
    /// Facts of the unchanged config with this change.
    Facts(fn(&mut ModelConfig)),
}

use ConfigOutcome::{Facts, Refused, Same};

/// Material, changed fields with their values, and the expected outcome.
type Row = (fn() -> Material, Value, ConfigOutcome);

fn parse(material: &Material) -> Result<ModelConfig, CheckpointError> {
    ModelConfig::from_json(Path::new("config.json"), material.config.to_string().as_bytes())
}

fn gqa(config: &mut ModelConfig, change: impl Fn(&mut GqaFacts)) {
    for layer in &mut config.layers {
        let AttentionFacts::Gqa(facts) = &mut layer.attention else { panic!("latent attention") };
        change(facts);
    }
}

fn mla(config: &mut ModelConfig, change: impl Fn(&mut MlaFacts)) {
    for layer in &mut config.layers {
        let AttentionFacts::Mla(facts) = &mut layer.attention else { panic!("no latent attention") };
        change(facts);
    }
}

fn moe(config: &mut ModelConfig, change: impl Fn(&mut MoeFacts)) {
    for layer in &mut config.layers {
        if let MlpFacts::Moe(facts) = &mut layer.mlp {
            change(facts);
        }
    }
}

fn rope(config: &mut ModelConfig) -> &mut RopeFacts {
    config.rope.as_mut().unwrap()
}

fn check(rows: Vec<Row>) {
    for (family, fields, then) in rows {
        let mut material = family();
        let name = material.config["model_type"].as_str().unwrap().to_owned();
        let mut expected = parse(&material).unwrap();
        for (field, value) in fields.as_object().unwrap() {
            // The newer name of this field, which the materials use.
            if field == "rope_scaling" && fields.get("rope_parameters").is_none() {
                material.unset("rope_parameters");
            }
            material.set(field, value.clone());
        }
        match (parse(&material), then) {
            (Err(error), Refused(field)) => {
                assert_eq!(error.field(), Some(field), "{name} {fields}: {error}");
            }
            (Ok(found), Same) => assert_eq!(found, expected, "{name} {fields}"),
            (Ok(found), Facts(change)) => {
                let before = expected.clone();
                change(&mut expected);
                if expected.rope != before.rope {
                    // Other frequencies give another context length, which `rope.rs` tests.
                    expected.context_length = found.context_length;
                }
                assert_eq!(found, expected, "{name} {fields}");
                assert_ne!(found, before, "{name} {fields}: nothing is changed");
            }
            (Err(error), _) => panic!("{name} {fields}: {error}"),
            (Ok(_), Refused(field)) => panic!("{name} {fields}: {field} is not refused"),
        }
    }
}

#[test]
fn fields_that_a_family_reads_change_its_facts() {
    check(vec![
        (mixtral, json!({"rms_norm_eps": 0.25}), Facts(|c| c.norm_eps = 0.25)),
        (mixtral, json!({"tie_word_embeddings": true}), Facts(|c| c.tie_embeddings = true)),
        (mixtral, json!({"hidden_act": "relu"}), Facts(|c| c.activation = Activation::Relu)),
        (mixtral, json!({"hidden_act": "gelu_pytorch_tanh"}), Facts(|c| c.activation = Activation::GeluTanh)),
        (mixtral, json!({"sliding_window": null}), Facts(|c| gqa(c, |a| a.window = None))),
        (
            mixtral,
            json!({"sliding_window": 9, "use_sliding_window": true}),
            Facts(|c| {
                gqa(c, |a| a.window = Some(9));
            }),
        ),
        (
            mixtral,
            json!({"head_dim": 6}),
            Facts(|c| {
                gqa(c, |a| (a.head_dim, a.softmax_scale) = (6, 6.0_f64.powf(-0.5)));
                rope(c).dim = 6;
            }),
        ),
        (mixtral, json!({"num_key_value_heads": 5}), Facts(|c| gqa(c, |a| a.kv_heads = 5))),
        (mixtral, json!({"num_experts_per_tok": 1}), Facts(|c| moe(c, |m| m.top_k = 1))),
        (mixtral, json!({"num_local_experts": 4}), Facts(|c| moe(c, |m| m.experts = 4))),
        (mixtral, json!({"intermediate_size": 8}), Facts(|c| moe(c, |m| m.expert_width = 8))),
        (mixtral, json!({"num_hidden_layers": 2}), Facts(|c| c.layers.truncate(2))),
        (mixtral, json!({"vocab_size": 60}), Facts(|c| c.vocab_size = 60)),
        (
            mixtral,
            json!({"max_position_embeddings": 32}),
            Facts(|c| (c.context_length, c.stated_positions) = (32, 32)),
        ),
        (mixtral, json!({"dtype": "bfloat16"}), Facts(|c| c.dtype = StoredDtype::Bf16)),
        (mixtral, json!({"eos_token_id": [2, 5]}), Facts(|c| c.eos_ids = vec![2, 5])),
        (mixtral, json!({"rope_parameters": {"rope_theta": 100.0}}), Facts(|c| rope(c).theta = 100.0)),
        (
            mixtral,
            json!({"rope_scaling": null, "rope_parameters": null, "rope_theta": 1e4}),
            Facts(|c| {
                rope(c).theta = 1e4;
            }),
        ),
        (
            mixtral,
            json!({"rope_scaling": {"type": "linear", "factor": 3.0}}),
            Facts(|c| {
                rope(c).scaling = RopeScaling::Linear { factor: 3.0 };
            }),
        ),
        (
            mixtral,
            json!({"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}),
            Facts(|c| {
                rope(c).scaling = RopeScaling::Dynamic { factor: 3.0 };
            }),
        ),
        (
            mixtral,
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 1.0, "beta_fast": 4, "truncate": false,
            "attention_factor": 1.3, "original_max_position_embeddings": 8}}),
            Facts(|c| {
                rope(c).scaling = RopeScaling::Yarn {
                    factor: 1.0,
                    beta_fast: 4.0,
                    beta_slow: 1.0,
                    original: 8,
                    truncate: false,
                };
                rope(c).attention_factor = 1.3;
            }),
        ),
        (qwen2_moe, json!({"norm_topk_prob": true}), Facts(|c| moe(c, |m| m.routing.normalise = true))),
        (qwen2_moe, json!({"qkv_bias": false}), Facts(|c| gqa(c, |a| a.qkv_bias = false))),
        (qwen2_moe, json!({"mlp_only_layers": []}), Facts(|c| c.layers[1].mlp = c.layers[0].mlp.clone())),
        (
            qwen2_moe,
            json!({"mlp_only_layers": [], "decoder_sparse_step": 2}),
            Facts(|c| {
                let (sparse, dense) = (c.layers[0].mlp.clone(), c.layers[1].mlp.clone());
                (c.layers[0].mlp, c.layers[1].mlp, c.layers[2].mlp) = (dense.clone(), sparse, dense);
            }),
        ),
        (
            qwen2_moe,
            json!({"shared_expert_intermediate_size": 12}),
            Facts(|c| {
                moe(c, |m| m.shared.as_mut().unwrap().width = 12);
            }),
        ),
        (
            qwen2_moe,
            json!({"layer_types": null, "use_sliding_window": true, "sliding_window": 3,
            "max_window_layers": 1}),
            Facts(|c| {
                let AttentionFacts::Gqa(facts) = &mut c.layers[0].attention else { panic!() };
                facts.window = Some(3);
            }),
        ),
        (qwen3_moe, json!({"norm_topk_prob": false}), Facts(|c| moe(c, |m| m.routing.normalise = false))),
        (
            qwen3_moe,
            json!({"attention_bias": true}),
            Facts(|c| {
                gqa(c, |a| (a.qkv_bias, a.o_bias) = (true, true));
            }),
        ),
        (
            qwen3_moe,
            json!({"use_sliding_window": true, "sliding_window": 3}),
            Facts(|c| {
                gqa(c, |a| a.window = Some(3));
            }),
        ),
        (
            qwen3_moe,
            json!({"intermediate_size": 10}),
            Facts(|c| {
                c.layers[1].mlp = MlpFacts::Dense { width: 10 };
            }),
        ),
        (olmoe, json!({"clip_qkv": null}), Facts(|c| gqa(c, |a| a.clip = None))),
        (
            olmoe,
            json!({"attention_bias": true}),
            Facts(|c| gqa(c, |a| (a.qkv_bias, a.o_bias) = (true, true))),
        ),
        (olmoe, json!({"norm_topk_prob": true}), Facts(|c| moe(c, |m| m.routing.normalise = true))),
        (
            deepseek_v2,
            json!({"first_k_dense_replace": 2}),
            Facts(|c| {
                c.layers[1].mlp = c.layers[0].mlp.clone();
            }),
        ),
        (deepseek_v2, json!({"routed_scaling_factor": 3.0}), Facts(|c| moe(c, |m| m.routing.scale = 3.0))),
        (deepseek_v2, json!({"n_shared_experts": 0}), Facts(|c| moe(c, |m| m.shared = None))),
        (deepseek_v2, json!({"q_lora_rank": null}), Facts(|c| mla(c, |a| a.q_rank = None))),
        (deepseek_v2, json!({"v_head_dim": 6}), Facts(|c| mla(c, |a| a.value_dim = 6))),
        (
            deepseek_v2,
            json!({"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}),
            Facts(|c| {
                moe(c, |m| m.routing.groups = Some(GroupFacts { groups: 2, chosen: 1, best: 1 }));
            }),
        ),
        (deepseek_v3, json!({"rope_interleave": false}), Facts(|c| rope(c).layout = RopeLayout::Halves)),
        (deepseek_v3, json!({"norm_topk_prob": false}), Facts(|c| moe(c, |m| m.routing.normalise = false))),
        (deepseek_v3, json!({"routed_scaling_factor": 1.0}), Facts(|c| moe(c, |m| m.routing.scale = 1.0))),
        (granitemoe, json!({"embedding_multiplier": 5.0}), Facts(|c| c.multipliers.embedding = 5.0)),
        (granitemoe, json!({"residual_multiplier": 0.5}), Facts(|c| c.multipliers.residual = 0.5)),
        (granitemoe, json!({"logits_scaling": 2.0}), Facts(|c| c.multipliers.logits_divisor = 2.0)),
        (granitemoe, json!({"attention_multiplier": 0.5}), Facts(|c| gqa(c, |a| a.softmax_scale = 0.5))),
        (phimoe, json!({"lm_head_bias": false}), Facts(|c| c.head_bias = false)),
        (
            phimoe,
            json!({"router_jitter_noise": 0.4}),
            Facts(|c| {
                moe(c, |m| m.routing.score = Score::SparseMixer { jitter: 0.4 });
            }),
        ),
        (
            gpt_oss,
            json!({"sliding_window": 7}),
            Facts(|c| {
                gqa(c, |a| a.window = a.window.map(|_| 7));
            }),
        ),
        (
            gpt_oss,
            json!({"attention_bias": false}),
            Facts(|c| {
                gqa(c, |a| (a.qkv_bias, a.o_bias) = (false, false));
            }),
        ),
        (gpt2_moe, json!({"num_experts_per_tok": 3}), Facts(|c| moe(c, |m| m.top_k = 3))),
        (gpt2_moe, json!({"tie_word_embeddings": false}), Facts(|c| c.tie_embeddings = false)),
        (gpt2_moe, json!({"layer_norm_epsilon": 0.25}), Facts(|c| c.norm_eps = 0.25)),
    ]);
}

#[test]
fn alternative_field_names_give_the_same_facts() {
    check(vec![
        (mixtral, json!({"num_experts": 4}), Refused("num_experts")),
        (mixtral, json!({"num_experts": 5}), Same),
        (mixtral, json!({"n_routed_experts": 4}), Refused("n_routed_experts")),
        (qwen2_moe, json!({"num_local_experts": 8}), Refused("num_local_experts")),
        (qwen3_moe, json!({"num_local_experts": 8}), Refused("num_local_experts")),
        (olmoe, json!({"num_local_experts": 8}), Refused("num_local_experts")),
        (deepseek_v2, json!({"num_experts": 8}), Refused("num_experts")),
        (deepseek_v3, json!({"num_local_experts": 8}), Refused("num_local_experts")),
        (gpt_oss, json!({"experts_per_token": 3}), Refused("experts_per_token")),
        (gpt_oss, json!({"experts_per_token": 2}), Same),
        (deepseek_v2, json!({"moe_topk": 1}), Refused("moe_topk")),
        (mixtral, json!({"torch_dtype": "bfloat16"}), Refused("torch_dtype")),
        (mixtral, json!({"torch_dtype": "float32"}), Same),
        (mixtral, json!({"norm_eps": 0.25}), Refused("norm_eps")),
        (mixtral, json!({"norm_eps": 0.00001}), Same),
        (gpt2_moe, json!({"layer_norm_eps": 0.25}), Refused("layer_norm_eps")),
        (
            mixtral,
            json!({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 4.0}}),
            Refused("rope_scaling.type"),
        ),
        (
            mixtral,
            json!({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4}}),
            Facts(|c| {
                rope(c).scaling = RopeScaling::Linear { factor: 4.0 };
            }),
        ),
        (
            mixtral,
            json!({"rope_scaling": {"type": "linear", "factor": 4.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
            Refused("rope_parameters.rope_type"),
        ),
        (
            mixtral,
            json!({"rope_scaling": {"type": "linear", "factor": 4.0},
            "rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
            Refused("rope_parameters.factor"),
        ),
        (
            mixtral,
            json!({"rope_scaling": {"type": "linear", "factor": 4.0},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5.0}}),
            Refused("rope_parameters.rope_theta"),
        ),
        (
            mixtral,
            json!({"rope_scaling": {"type": "linear", "factor": 4.0},
            "rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 1e6}}),
            Facts(|c| {
                rope(c).scaling = RopeScaling::Linear { factor: 4.0 };
            }),
        ),
        (deepseek_v3, json!({"num_nextn_predict_layers": 1, "num_mtp_layers": 1}), Same),
    ]);
}

#[test]
fn keys_of_rope_parameters_are_known_or_refused() {
    let yarn = |key: &str, value: Value| {
        let mut scaling = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8});
        scaling[key] = value;
        json!({"rope_scaling": scaling})
    };
    let longrope = json!({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 1, 1, 1],
        "long_factor": [1, 1, 1, 1], "original_max_position_embeddings": 16, "long_mscale": 1.5}});
    check(vec![
        (mixtral, yarn("attn_factor", json!(1.3)), Refused("rope_scaling.attn_factor")),
        (mixtral, yarn("extrapolation_factor", json!(2.0)), Refused("rope_scaling.extrapolation_factor")),
        (mixtral, yarn("apply_yarn_scaling", json!(false)), Refused("rope_scaling.apply_yarn_scaling")),
        (gpt_oss, yarn("llama_4_scaling_beta", json!(0.1)), Refused("rope_scaling.llama_4_scaling_beta")),
        (olmoe, yarn("low_freq_factor", json!(1.0)), Refused("rope_scaling.low_freq_factor")),
        (
            qwen3_moe,
            json!({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 100.0}}),
            Refused("rope_scaling.alpha"),
        ),
        (
            qwen2_moe,
            json!({"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 2.0}}),
            Refused("rope_scaling.attention_factor"),
        ),
        (
            qwen2_moe,
            json!({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}),
            Refused("rope_scaling.mrope_section"),
        ),
        (
            granitemoe,
            json!({"rope_parameters": {"rope_type": "default", "factor": 4.0}}),
            Refused("rope_parameters.factor"),
        ),
        (mixtral, longrope, Refused("rope_scaling.long_mscale")),
        (
            mixtral,
            json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "factor": null}}),
            Same,
        ),
    ]);
}

#[test]
fn unsupported_features_are_refused_by_name() {
    let refused = |family: fn() -> Material, field: &'static str, value: Value| -> Row {
        (family, json!({field: value}), Refused(field))
    };
    check(vec![
        refused(deepseek_v2, "norm_topk_prob", json!(true)),
        refused(deepseek_v2, "scoring_func", json!("sigmoid")),
        refused(deepseek_v2, "moe_layer_freq", json!(2)),
        refused(deepseek_v2, "mlp_bias", json!(true)),
        refused(deepseek_v2, "num_nextn_predict_layers", json!(1)),
        refused(deepseek_v3, "moe_layer_freq", json!(2)),
        refused(deepseek_v3, "moe_layer_freq", json!([0, 1, 1])),
        refused(deepseek_v3, "index_topk", json!(8)),
        refused(deepseek_v2, "rope_interleave", json!(false)),
        refused(deepseek_v3, "use_mla", json!(false)),
        refused(mixtral, "rope_interleave", json!(true)),
        refused(mixtral, "attn_scale", json!(0.3)),
        refused(olmoe, "scale_attn_weights", json!(false)),
        refused(gpt_oss, "use_attention_sinks", json!(false)),
        refused(deepseek_v3, "layer_types", json!(["full_attention"])),
        refused(mixtral, "num_nextn_predict_layers", json!(1)),
        refused(mixtral, "num_mtp_layers", json!(1)),
        refused(qwen3_moe, "num_mtp_layers", json!(1)),
        refused(gpt_oss, "num_nextn_predict_layers", json!(1)),
        refused(mixtral, "use_sliding_window", json!(false)),
        refused(mixtral, "layer_types", json!(["sliding_attention", "sliding_attention"])),
        refused(mixtral, "layer_types", json!([])),
        refused(mixtral, "norm_topk_prob", json!(false)),
        refused(mixtral, "attention_bias", json!(true)),
        refused(mixtral, "qkv_bias", json!(true)),
        refused(mixtral, "mlp_bias", json!(true)),
        refused(mixtral, "router_bias", json!(true)),
        refused(mixtral, "lm_head_bias", json!(true)),
        refused(mixtral, "attn_logit_softcapping", json!(30.0)),
        refused(mixtral, "final_logit_softcapping", json!(30.0)),
        refused(mixtral, "query_pre_attn_scalar", json!(64)),
        refused(mixtral, "use_qk_norm", json!(true)),
        refused(mixtral, "norm_type", json!("layernorm")),
        refused(mixtral, "sandwich_norm", json!(true)),
        refused(mixtral, "position_embedding_type", json!("alibi")),
        refused(mixtral, "no_rope_layers", json!([0, 1, 0])),
        refused(mixtral, "clip_qkv", json!(8.0)),
        refused(mixtral, "swiglu_limit", json!(7.0)),
        refused(mixtral, "embedding_multiplier", json!(12.0)),
        refused(mixtral, "attention_multiplier", json!(0.25)),
        refused(mixtral, "residual_multiplier", json!(0.5)),
        refused(mixtral, "logits_scaling", json!(2.0)),
        refused(mixtral, "first_k_dense_replace", json!(1)),
        refused(mixtral, "scoring_func", json!("sigmoid")),
        refused(mixtral, "routed_scaling_factor", json!(2.5)),
        refused(mixtral, "num_shared_experts", json!(1)),
        refused(mixtral, "decoder_sparse_step", json!(2)),
        refused(mixtral, "compression_config", json!({"quant_method": "compressed-tensors"})),
        refused(mixtral, "quantization", json!({"bits": 4, "group_size": 64})),
        refused(qwen3_moe, "dual_chunk_attention_config", json!({"chunk_size": 262_144})),
        refused(qwen3_moe, "use_qk_norm", json!(false)),
        refused(qwen3_moe, "shared_expert_intermediate_size", json!(11)),
        refused(qwen3_moe, "qkv_bias", json!(true)),
        refused(qwen3_moe, "n_shared_experts", json!(1)),
        refused(qwen3_moe, "layer_types", json!(["full_attention", "full_attention"])),
        refused(olmoe, "qk_norm", json!(false)),
        refused(olmoe, "n_shared_experts", json!(2)),
        refused(qwen2_moe, "num_shared_experts", json!(2)),
        refused(granitemoe, "position_embedding_type", json!("nope")),
        refused(granitemoe, "router_bias", json!(true)),
        refused(phimoe, "mlp_bias", json!(true)),
        (phimoe, json!({"sliding_window": 4, "use_sliding_window": false}), Refused("use_sliding_window")),
        refused(gpt_oss, "hidden_act", json!("relu")),
        refused(gpt_oss, "swiglu_alpha", json!(1.5)),
        refused(gpt_oss, "swiglu_limit", json!(5.0)),
        refused(gpt_oss, "index_topk", json!(8)),
        refused(gpt2_moe, "clip_qkv", json!(8.0)),
        refused(gpt2_moe, "scoring_func", json!("sigmoid")),
    ]);
}

/// Published configs contain these fields although their family ignores them.
#[test]
fn values_that_request_nothing_are_accepted() {
    for mut material in all_families() {
        let plain = parse(&material).unwrap();
        for (field, value) in [
            ("attn_logit_softcapping", Value::Null),
            ("compression_config", Value::Null),
            ("dual_chunk_attention_config", Value::Null),
            ("sandwich_norm", json!(false)),
            ("mlp_bias", json!(false)),
            ("moe_layer_freq", json!(1)),
            ("num_shared_experts", json!(0)),
            ("logit_scale", json!(1)),
            ("no_rope_layers", json!([])),
            ("num_mtp_layers", json!(0)),
            ("num_nextn_predict_layers", json!(0)),
            ("router_aux_loss_coef", json!(0.9)),
            ("pretraining_tp", json!(1)),
            ("ep_size", json!(1)),
            ("seq_aux", json!(true)),
            ("auto_map", json!({"AutoConfig": "configuration.Config"})),
        ] {
            material.set(field, value);
            assert_eq!(parse(&material).unwrap(), plain, "{} {field}", material.config["model_type"]);
        }
    }
    check(vec![
        (
            qwen3_moe,
            json!({"use_qk_norm": true, "qkv_bias": false, "shared_expert_intermediate_size": 0,
            "max_window_layers": 48, "sliding_window": null, "use_sliding_window": false}),
            Same,
        ),
        (
            deepseek_v2,
            json!({"scoring_func": "softmax", "norm_topk_prob": false, "moe_layer_freq": 1,
            "aux_loss_alpha": 0.001, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}),
            Same,
        ),
        (
            deepseek_v3,
            json!({"num_nextn_predict_layers": 1, "scoring_func": "sigmoid",
            "topk_method": "noaux_tc"}),
            Same,
        ),
        (
            gpt_oss,
            json!({"experts_per_token": 2, "initial_context_length": 4096, "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702, "router_aux_loss_coef": 0.9}),
            Same,
        ),
        (phimoe, json!({"input_jitter_noise": 0.01, "hidden_dropout": 0.0}), Same),
        (granitemoe, json!({"router_jitter_noise": 0.0}), Same),
        (olmoe, json!({"use_qk_norm": true}), Same),
    ]);
}
