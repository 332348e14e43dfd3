//! Damaged and hostile folders, which must give an error with file and tensor and never a panic.

use crate::support;

use std::fs::OpenOptions;
use std::path::Path;

use proptest::prelude::*;
use remoe_model::{Checkpoint, CheckpointError, ModelConfig};
use safetensors::Dtype;
use serde_json::{Value, json};
use support::{Folder, Material, deepseek_v2, deepseek_v3, mixtral, olmoe};

/// Splits the file into its header and the data after it.
fn split(folder: &Folder) -> (Value, Vec<u8>) {
    let bytes = std::fs::read(folder.file("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + length]).unwrap(), bytes[8 + length..].to_vec())
}

fn join(folder: &Folder, header: &[u8], data: &[u8]) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend(data);
    folder.put("model.safetensors", bytes);
}

/// Changes the header and returns the error of opening the file.
fn with_header(change: impl FnOnce(&mut Value)) -> CheckpointError {
    let folder = olmoe().write();
    let (mut header, data) = split(&folder);
    change(&mut header);
    join(&folder, header.to_string().as_bytes(), &data);
    folder.error()
}

const NAME: &str = "model.layers.1.mlp.gate.weight";

#[test]
fn missing_files_are_named() {
    let folder = Folder::new();
    assert!(folder.error().path().ends_with("config.json"));
    folder.put("config.json", olmoe().config.to_string());
    assert!(folder.error().path().ends_with("model.safetensors"));
    let absent = Checkpoint::open(folder.file("nowhere")).unwrap_err();
    assert!(absent.path().ends_with("nowhere/config.json"));
}

#[test]
fn file_truncated_at_any_position_is_refused() {
    let folder = olmoe().write();
    let bytes = std::fs::read(folder.file("model.safetensors")).unwrap();
    for length in [0, 1, 7, 8, 9, 500, bytes.len() / 2, bytes.len() - 1] {
        folder.put("model.safetensors", &bytes[..length]);
        assert!(folder.error().path().ends_with("model.safetensors"), "{length}");
    }
    let mut longer = bytes;
    longer.push(0);
    folder.put("model.safetensors", longer);
    assert!(matches!(folder.error(), CheckpointError::Header { .. }));
}

#[test]
fn impossible_header_lengths_are_refused() {
    let folder = olmoe().write();
    for length in [u64::MAX, 1 << 40, 100_000_001, 1_000_000] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend([b' '; 100]);
        folder.put("model.safetensors", bytes);
        let error = folder.error();
        assert!(matches!(error, CheckpointError::Header { .. }), "{error}");
        assert!(error.to_string().contains("header length"));
    }
}

#[test]
fn malformed_headers_are_refused() {
    let folder = olmoe().write();
    let deep = format!("{{\"a\":{}", "[".repeat(1_000_000));
    let deep_metadata = format!("{{\"__metadata__\":{}", "{\"a\":".repeat(1_000_000));
    for header in ["", "[]", "{", "{\"a\": 1}", "\u{0}\u{1}", &deep, &deep_metadata] {
        join(&folder, header.as_bytes(), b"");
        assert!(matches!(folder.error(), CheckpointError::Header { .. }));
    }
    let tensor = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    join(&folder, format!(r#"{{"t":{tensor},"t":{tensor}}}"#).as_bytes(), b"x");
    assert_eq!(folder.error().field(), Some("t"));
}

#[test]
fn offsets() {
    let offsets =
        |begin: Value, end: Value| with_header(|header| header[NAME]["data_offsets"] = json!([begin, end]));
    for (begin, end) in [
        (json!(0), json!(640)),
        (json!(640), json!(0)),
        (json!(1_u64 << 40), json!((1_u64 << 40) + 640)),
        (json!(u64::MAX - 639), json!(u64::MAX)),
    ] {
        let error = offsets(begin.clone(), end.clone());
        // The error may name either of two overlapping tensors.
        assert!(matches!(error, CheckpointError::Tensor { .. }), "{begin} {end}: {error}");
    }
    let negative = offsets(json!(-1), json!(639));
    assert!(matches!(negative, CheckpointError::Header { .. }));
}

#[test]
fn wrong_shapes_and_types_are_refused() {
    let shape = |shape: Value| with_header(|header| header[NAME]["shape"] = shape);
    // First another shape with the same bytes, then sizes that differ or overflow.
    for wrong in [json!([40, 4]), json!([160]), json!([4, 41]), json!([u64::MAX, u64::MAX]), json!([])] {
        let error = shape(wrong.clone());
        assert_eq!(error.field(), Some(NAME), "{wrong}: {error}");
        assert!(error.path().ends_with("model.safetensors"));
    }
    let dtype = |dtype: &str| with_header(|header| header[NAME]["dtype"] = json!(dtype));
    for wrong in ["I32", "BF16", "XYZ", "U32"] {
        let error = dtype(wrong);
        assert_eq!(error.field(), Some(NAME), "{wrong}: {error}");
    }
    let mut typed = olmoe();
    typed.typed(NAME, Dtype::BF16, &[4, 40]);
    assert_eq!(typed.write().error().field(), Some(NAME));
    typed.typed(NAME, Dtype::I64, &[4, 40]);
    assert_eq!(typed.write().error().field(), Some(NAME));
}

#[test]
fn any_missing_tensor_is_named() {
    let material = mixtral();
    for name in material.tensors.keys() {
        let mut less = material.clone();
        less.tensors.remove(name);
        let error = less.write().error();
        // A block without a router is named by the first of its possible names.
        assert_eq!(error.field(), Some(name.as_str()), "{error}");
        assert!(matches!(error, CheckpointError::MissingTensor { .. }));
    }
}

#[test]
fn stored_buffers_that_are_recomputed_are_accepted() {
    let mut material = mixtral();
    material.typed("model.layers.0.self_attn.rotary_emb.inv_freq", Dtype::F32, &[4]);
    material.typed("model.layers.0.attn.masked_bias", Dtype::I64, &[3]);
    let checkpoint = material.write().open();
    assert_eq!(checkpoint.sizes(), mixtral().write().open().sizes());
    assert!(checkpoint.tensor("model.layers.0.attn.masked_bias").is_none());
    let ignored = checkpoint.inspect().unwrap().ignored.unwrap();
    assert_eq!((ignored.bytes, ignored.prediction_layers.len()), (4 * 4 + 3 * 8, 0));
    assert!(mixtral().write().open().inspect().unwrap().ignored.is_none());
}

/// Each of these tensors would change the results of its model.
#[test]
fn unused_tensors_are_refused_by_name() {
    let block = "model.layers.0.block_sparse_moe";
    let attention = "model.layers.0.self_attn";
    let of_mixtral = [
        format!("{attention}.q_proj.bias"),
        format!("{attention}.q_norm.weight"),
        format!("{attention}.sinks"),
        format!("{attention}.q_proj.weight_scale"),
        format!("{attention}.q_proj.input_scale"),
        format!("{attention}.bias"),
        format!("{block}.gate.bias"),
        format!("{block}.gate.e_score_correction_bias"),
        format!("{block}.experts.0.w1.bias"),
        format!("{block}.experts.5.w1.weight"),
        format!("{block}.experts.0.w1.lora_A.weight"),
        format!("{block}.shared_expert.gate_proj.weight"),
        "lm_head.bias".to_owned(),
        "model.norm.bias".to_owned(),
        "model.embed_positions.weight".to_owned(),
        "model.layers.0.pre_feedforward_layernorm.weight".to_owned(),
        "model.layers.0.mlp.gate_proj.weight".to_owned(),
        "model.layers.00.input_layernorm.weight".to_owned(),
        "vision_tower.patch.weight".to_owned(),
    ];
    for name in of_mixtral {
        let mut material = mixtral();
        material.tensor(&name, &[40]);
        for folder in [material.write(), material.write_shards(3)] {
            let error = folder.error();
            assert_eq!(error.field(), Some(&*name), "{error}");
            assert!(matches!(error, CheckpointError::Tensor { .. }), "{error}");
        }
    }
    let mut material = mixtral();
    material.tensor("lm_head.bias", &[59]).tensor("model.norm.bias", &[40]);
    let error = material.write().error();
    assert!(error.to_string().contains("lm_head.bias`") && error.to_string().contains("1 other)"), "{error}");
}

#[test]
fn wrong_shard_index_is_refused() {
    let material = olmoe();
    let change = |change: &dyn Fn(&mut Value, &Folder)| {
        let folder = material.write_shards(3);
        let path = folder.file("model.safetensors.index.json");
        let mut index = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut index, &folder);
        folder.put("model.safetensors.index.json", index.to_string());
        folder.error()
    };
    let error = change(&|index, _| index["weight_map"][NAME] = json!("model-00009-of-00009.safetensors"));
    assert!(matches!(error, CheckpointError::MissingFile { .. }), "{error}");
    assert!(error.path().ends_with("model-00009-of-00009.safetensors"), "{error}");
    for outside in [json!("../model.safetensors"), json!("/etc/passwd"), json!(7), json!("")] {
        let error = change(&|index, _| index["weight_map"][NAME] = outside.clone());
        assert_eq!(error.field(), Some(NAME), "{error}");
    }
    let error = change(&|index, _| index["weight_map"]["ghost"] = json!("model-00001-of-00003.safetensors"));
    assert_eq!(error.field(), Some("ghost"));
    let error = change(&|index, _| {
        index["weight_map"].as_object_mut().unwrap().remove(NAME);
    });
    assert_eq!(error.field(), Some(NAME));
    let error = change(&|index, _| *index = json!({}));
    assert_eq!(error.field(), Some("weight_map"));
    // A tensor that is in two shards.
    let error = change(&|_, folder| {
        std::fs::copy(
            folder.file("model-00001-of-00003.safetensors"),
            folder.file("model-00002-of-00003.safetensors"),
        )
        .unwrap();
    });
    assert!(error.to_string().contains("is also in"), "{error}");
    // A tensor that is in another shard than the index says.
    let error = change(&|index, _| {
        let now = index["weight_map"][NAME].clone();
        let other = index["weight_map"].as_object().unwrap().values().find(|v| **v != now).cloned();
        index["weight_map"][NAME] = other.unwrap();
    });
    assert_eq!(error.field(), Some(NAME));
}

#[test]
fn file_that_shrinks_is_an_error() {
    let folder = mixtral().write();
    let checkpoint = folder.open();
    let expert = checkpoint.expert(2, 4).unwrap();
    let path = folder.file("model.safetensors");
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(expert.down.weight.offset + 10).unwrap();
    let error = checkpoint.read(&expert.down.weight).unwrap_err();
    assert!(matches!(error, CheckpointError::ShortRead { .. }), "{error}");
    assert_eq!(error.path(), path);
    assert_eq!(error.field(), Some(&*expert.down.weight.name));
    file.set_len(0).unwrap();
    assert!(checkpoint.read(checkpoint.embedding()).is_err());
    assert!(checkpoint.fingerprint().is_err());
}

#[test]
fn ranges_outside_a_tensor_are_refused() {
    let checkpoint = mixtral().write().open();
    let norm = &checkpoint.final_norm().weight;
    for (range, length) in [(0..161, 161), (159..161, 2), (0..4, 5), (u64::MAX - 1..u64::MAX, 1)] {
        let error = checkpoint.read_into(norm, range, &mut vec![0; length]).unwrap_err();
        assert!(matches!(error, CheckpointError::Request { .. }));
    }
    checkpoint.read_into(norm, 160..160, &mut []).unwrap();
}

/// A config with huge shapes is refused because such tensors are missing, before memory is allocated for them.
#[test]
fn impossible_sizes_in_the_config_are_refused() {
    let mut material = mixtral();
    material.set("num_local_experts", json!(2_000_000_000));
    assert!(material.write().error().field().is_some());
    let mut material = mixtral();
    material.set("intermediate_size", json!(2_147_483_648_u64));
    assert!(material.write().error().field().is_some());
    let mut material = mixtral();
    material.set("head_dim", json!(2_147_483_646_u64));
    assert!(material.write().error().field().is_some());
}

/// A value that an error quotes may be as long as the file, but the error is not.
#[test]
fn errors_quote_long_values_abbreviated() {
    let long = "long é".repeat(10_000);
    let short = |error: CheckpointError| {
        assert!(error.to_string().len() < 1600, "{} bytes", error.to_string().len());
        assert!(error.field().is_none_or(|field| field.len() <= 200));
    };
    short(with_header(|header| header[NAME]["dtype"] = json!(long)));
    short(with_header(|header| header[NAME] = json!(long)));
    short(with_header(|header| header[NAME]["shape"] = json!(vec![1; 10_000])));
    short(with_header(|header| header[long.as_str()] = header[NAME].clone()));
    for field in ["model_type", "hidden_act", "dtype", "vocab_size", "layer_types"] {
        let mut material = olmoe();
        let value = if field == "layer_types" { json!([long]) } else { json!(long) };
        short(material.set(field, value).write().error());
    }
    let mut material = olmoe();
    short(material.set("rope_scaling", json!({"rope_type": long})).write().error());
}

/// Each id is compared with those before it, which would take long for such a list.
#[test]
fn list_of_a_million_tokens_is_refused() {
    let mut material = mixtral();
    let ids: Vec<u32> = (0..1_000_000).collect();
    material.set("vocab_size", json!(1_000_000)).set("eos_token_id", json!(ids));
    assert_eq!(material.write().error().field(), Some("eos_token_id"));
}

/// The factors are finite, but their product is not.
#[test]
fn scales_and_angles_that_overflow_are_refused() {
    let scaling = |mscale: f64, all: f64| {
        let text = json!({
            "model_type": "deepseek_v2", "num_experts_per_tok": 2,
            "rope_scaling": {"type": "yarn", "factor": 1e5, "mscale": mscale, "mscale_all_dim": all},
        });
        ModelConfig::from_json(Path::new("config.json"), text.to_string().as_bytes())
    };
    assert!(scaling(0.7, 0.7).is_ok());
    for (mscale, all) in [(1.0, 1e200), (1e308, 1e-300), (1e-300, 1e308)] {
        assert_eq!(scaling(mscale, all).unwrap_err().field(), Some("rope_parameters"), "{mscale} {all}");
    }
}

/// The numbers are finite in float64 but not in float32.
#[test]
fn numbers_beyond_float32_are_refused_by_name() {
    let refused = |material: &mut Material, field: &str, value: f64, named: &str| {
        let error = material.set(field, json!(value)).write().error();
        assert_eq!(error.field(), Some(named), "{field} {value}: {error}");
        assert!(error.path().ends_with("config.json"), "{error}");
    };
    for value in [1e300, 1.5, -1e-9] {
        refused(&mut mixtral(), "rms_norm_eps", value, "rms_norm_eps");
    }
    for value in [1e300, 1e-300] {
        let mut material = mixtral();
        material.set("rope_parameters", json!({"rope_theta": value}));
        assert_eq!(material.write().error().field(), Some("rope_parameters"), "rope_theta {value}");
    }
    refused(&mut olmoe(), "clip_qkv", 1e300, "clip_qkv");
    for value in [1e300, 0.0, -1.0] {
        refused(&mut deepseek_v2(), "routed_scaling_factor", value, "routed_scaling_factor");
    }
    deepseek_v2().set("routed_scaling_factor", json!(16.0)).set("rms_norm_eps", json!(0)).write().open();
}

/// Leaving out layers would silently give other results.
#[test]
fn tensors_of_layers_beyond_config_are_refused_by_name() {
    let mut material = mixtral();
    let layers = material.config["num_hidden_layers"].as_u64().unwrap();
    material.set("num_hidden_layers", json!(layers - 1));
    for folder in [material.write(), material.write_shards(3)] {
        let error = folder.error();
        assert!(error.field().is_some_and(|name| name.starts_with(&format!("model.layers.{}.", layers - 1))));
        assert!(error.to_string().contains(&format!("num_hidden_layers is {}", layers - 1)), "{error}");
    }
    // Such a layer is not taken for a prediction layer either.
    material.set("num_nextn_predict_layers", json!(1));
    assert_eq!(material.write().error().field(), Some("num_nextn_predict_layers"));
}

/// Builds a DeepSeek-V3 with a fourth layer, which its config declares a prediction layer.
fn with_prediction_layer() -> Material {
    let mut material = deepseek_v3();
    let third: Vec<_> = material
        .tensors
        .iter()
        .filter_map(|(name, tensor)| Some((name.strip_prefix("model.layers.2.")?.to_owned(), tensor.clone())))
        .collect();
    for (name, tensor) in third {
        material.tensors.insert(format!("model.layers.3.{name}"), tensor);
    }
    material.set("num_nextn_predict_layers", json!(1));
    material
}

#[test]
fn prediction_layers_are_ignored_and_named() {
    const PARTS: [&str; 3] = ["eh_proj.weight", "enorm.weight", "hnorm.weight"];
    let plain = deepseek_v3().write().open();
    let mut material = with_prediction_layer();
    for part in PARTS {
        material.tensor(&format!("model.layers.3.{part}"), &[40]);
    }
    for shared in ["embed_tokens.weight", "shared_head.head.weight", "shared_head.norm.weight"] {
        material.tensor(&format!("model.layers.3.{shared}"), &[40]);
    }
    let checkpoint = material.write().open();
    assert_eq!((checkpoint.config(), checkpoint.sizes()), (plain.config(), plain.sizes()));
    let seen = checkpoint.inspect().unwrap();
    let ignored = seen.ignored.unwrap();
    assert_eq!(ignored.prediction_layers, [3]);
    let stored: usize = material.tensors.values().map(|(_, _, data)| data.len()).sum();
    assert_eq!(seen.total_bytes + ignored.bytes, stored as u64);
    // A layer of the model must not be taken for a prediction layer.
    for part in PARTS {
        let mut less = material.clone();
        less.tensors.remove(&format!("model.layers.3.{part}"));
        let error = less.write().error();
        assert!(error.field().is_some_and(|name| name.starts_with("model.layers.3.")), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    let error = with_prediction_layer().write().error();
    assert!(error.field().is_some_and(|name| name.starts_with("model.layers.3.")), "{error}");
    // Declared prediction layers may be missing, as in checkpoints that transformers writes.
    let mut absent = deepseek_v3();
    absent.set("num_nextn_predict_layers", json!(1));
    assert!(absent.write().open().inspect().unwrap().ignored.is_none());
    for (field, value) in [("num_nextn_predict_layers", json!("one")), ("num_mtp_layers", json!(2))] {
        let mut wrong = material.clone();
        assert_eq!(wrong.set(field, value).write().error().field(), Some(field));
    }
}

/// A header of up to 100 MB could list a million empty tensors, more than any model has.
#[test]
fn header_of_a_million_tensors_is_refused_before_allocation() {
    let folder = mixtral().write();
    let entries: Vec<String> = (0..1_000_000)
        .map(|i| format!(r#""t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#))
        .collect();
    join(&folder, format!("{{{}}}", entries.join(",")).as_bytes(), &[]);
    let error = folder.error();
    assert!(matches!(error, CheckpointError::Header { .. }), "{error}");
    assert!(error.to_string().contains("262144 tensors"), "{error}");
}

/// Each header is within its bound, but not all headers together.
#[test]
fn size_of_all_headers_is_bounded() {
    let folder = mixtral().write();
    let mut map = serde_json::Map::new();
    for shard in 0..3 {
        let name = format!("model-{shard}.safetensors");
        let entries: Vec<String> = (0..100_000)
            .map(|i| format!(r#""s{shard}t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#))
            .collect();
        join(&folder, format!("{{{}}}", entries.join(",")).as_bytes(), &[]);
        std::fs::rename(folder.file("model.safetensors"), folder.file(&name)).unwrap();
        map.extend((0..100_000).map(|i| (format!("s{shard}t{i}"), json!(name))));
    }
    folder.put("model.safetensors.index.json", json!({"weight_map": map}).to_string());
    let error = folder.error();
    assert!(error.to_string().contains("300000 tensors"), "{error}");
    assert!(error.path().ends_with("model-2.safetensors"), "{error}");
}

/// The pipe has no writer, so reading it would never end.
#[test]
fn pipe_in_place_of_a_file_is_refused_at_once() {
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        let folder = mixtral().write();
        let path = folder.file(name);
        let _absent = std::fs::remove_file(&path);
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = folder.error();
        assert_eq!(error.path(), path);
        assert!(error.to_string().contains("is not a regular file"), "{error}");
        assert!(!error.is_transient());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// One byte in the first part of the file is changed.
    #[test]
    fn changed_byte_is_read_or_an_error(at in 0_usize..6000, value in any::<u8>()) {
        let folder = olmoe().write();
        let mut bytes = std::fs::read(folder.file("model.safetensors")).unwrap();
        bytes[at] = value;
        folder.put("model.safetensors", bytes);
        if let Ok(checkpoint) = Checkpoint::open(folder.path()) {
            prop_assert!(checkpoint.fingerprint().is_ok());
        }
    }
}
