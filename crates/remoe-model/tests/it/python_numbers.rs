//! `NaN`, `Infinity` and `-Infinity`, which Python writes into JSON.

use crate::support;

use std::path::Path;

use remoe_model::{AttentionFacts, CheckpointError, GenerationDefaults, ModelConfig, Outline};
use serde_json::{Value, json};
use support::{Material, mixtral, olmoe};

/// Reads the config with `field` set to the literal text `value`.
fn read(material: &Material, field: &str, value: &str) -> Result<ModelConfig, CheckpointError> {
    ModelConfig::from_json(Path::new("config.json"), written(material, field, value).as_bytes())
}

fn written(material: &Material, field: &str, value: &str) -> String {
    let mut material = material.clone();
    material.set(field, json!("HERE"));
    material.config.to_string().replace("\"HERE\"", value)
}

#[test]
fn infinite_limits_limit_nothing() {
    let mut plain = olmoe();
    plain.unset("clip_qkv");
    let clip = |config: &ModelConfig| match &config.layers[0].attention {
        AttentionFacts::Gqa(facts) => facts.clip,
        AttentionFacts::Mla(_) => panic!("no latent attention"),
    };
    assert_eq!(clip(&read(&plain, "clip_qkv", "3.5").unwrap()), Some(3.5));
    assert_eq!(clip(&read(&plain, "clip_qkv", "Infinity").unwrap()), None);
    for field in ["clip_qkv", "swiglu_limit"] {
        assert!(read(&mixtral(), field, "Infinity").is_ok(), "{field}");
        for limit in ["NaN", "-Infinity", "7.0"] {
            let error = read(&mixtral(), field, limit).unwrap_err();
            assert_eq!(error.field(), Some(field), "{error}");
            assert!(error.to_string().contains(limit), "{error}");
        }
    }
}

#[test]
fn fields_that_must_be_finite_are_named() {
    for field in ["rms_norm_eps", "rope_theta", "vocab_size", "tie_word_embeddings", "dtype", "eos_token_id"]
    {
        for value in ["NaN", "Infinity", "-Infinity"] {
            let mut material = mixtral();
            material.unset("rope_parameters");
            let error = read(&material, field, value).unwrap_err();
            assert_eq!(error.field(), Some(field), "{error}");
            assert!(error.to_string().contains(&format!("is {value}, expected ")), "{error}");
        }
    }
    let error = read(&mixtral(), "rope_scaling", "{\"rope_type\": \"linear\", \"factor\": NaN}").unwrap_err();
    assert_eq!(error.field(), Some("rope_scaling.factor"), "{error}");
}

#[test]
fn unread_fields_may_have_any_number() {
    let plain = read(&mixtral(), "note", "1").unwrap();
    for value in ["NaN", "[0.0, Infinity]", "{\"a\": [-Infinity, \"Infinity\"]}"] {
        assert_eq!(read(&mixtral(), "time_step_limit", value).unwrap(), plain, "{value}");
        let text = written(&mixtral(), "time_step_limit", value);
        assert!(Outline::from_json(Path::new("config.json"), text.as_bytes(), None).is_ok(), "{value}");
    }
    // A string with such a name is not a number.
    let named = read(&mixtral(), "model_type", "\"NaN\"").unwrap_err();
    assert!(matches!(&named, CheckpointError::Unsupported { .. }), "{named}");
    let damaged = read(&mixtral(), "note", "Infinity, oops").unwrap_err();
    assert!(matches!(&damaged, CheckpointError::Json { .. }), "{damaged}");
}

#[test]
fn generation_config_names_infinite_fields() {
    let config = read(&mixtral(), "note", "1").unwrap();
    let defaults = |text: &str| GenerationDefaults::from_json(Path::new("g.json"), text.as_bytes(), &config);
    assert!(
        defaults("{\"note\": NaN, \"top_k\": 5, \"do_sample\": true}")
            .is_ok_and(|read| read.top_k == Some(5))
    );
    for field in ["temperature", "top_p", "repetition_penalty", "top_k"] {
        let error = defaults(&format!("{{\"{field}\": Infinity}}")).unwrap_err();
        assert_eq!(error.field(), Some(field), "{error}");
    }
}

#[test]
fn checkpoints_with_python_numbers_open() {
    let folder = mixtral().write_shards(2);
    folder.put("config.json", written(&mixtral(), "time_step_limit", "[0.0, Infinity]"));
    folder.put("generation_config.json", "{\"note\": NaN}");
    let index = std::fs::read_to_string(folder.file("model.safetensors.index.json")).unwrap();
    let mut index: Value = serde_json::from_str(&index).unwrap();
    index["metadata"] = json!({"total_size": "HERE"});
    folder.put("model.safetensors.index.json", index.to_string().replace("\"HERE\"", "NaN"));
    assert_eq!(folder.open().config().layers.len(), read(&mixtral(), "note", "1").unwrap().layers.len());
}
