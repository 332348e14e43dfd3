//! Checkpoints: byte ranges, layouts of experts, shards, sizes, fingerprints.

use crate::support;

use remoe_model::{AttentionTensors, Checkpoint, CheckpointError, Inspection, QueryTensors, StoredDtype};
use safetensors::Dtype;
use serde_json::json;
use support::{MIXTRAL, Material, USUAL, all_families, deepseek_v2, families, mixtral, olmoe, qwen2_moe};

#[test]
fn every_family_opens_and_reads_its_bytes() {
    for material in all_families() {
        for shards in [1, 3] {
            let checkpoint = material.write_shards(shards).open();
            assert_eq!(checkpoint.files().len(), shards);
            for (name, (_, shape, data)) in &material.tensors {
                let tensor = checkpoint.tensor(name).unwrap();
                assert_eq!(&tensor.shape, shape);
                assert_eq!(&checkpoint.read(&tensor).unwrap(), data);
                let mut part = [0; 3];
                checkpoint.read_into(&tensor, 5..8, &mut part).unwrap();
                assert_eq!(part, data[5..8]);
            }
        }
    }
}

#[test]
fn parts_of_a_layer_are_found_by_name() {
    let checkpoint = qwen2_moe().write().open();
    assert_eq!(&*checkpoint.router(0).unwrap().unwrap().linear.weight.name, "model.layers.0.mlp.gate.weight");
    assert!(checkpoint.router(1).unwrap().is_none());
    assert_eq!(checkpoint.dense(1).unwrap().unwrap().gate.as_ref().unwrap().weight.shape, [9, 40]);
    assert!(checkpoint.dense(0).unwrap().is_none());
    let shared = checkpoint.shared(2).unwrap().unwrap();
    assert_eq!(shared.gate.as_ref().unwrap().shape, [1, 40]);
    assert_eq!(shared.mlp.down.weight.shape, [40, 11]);
    let AttentionTensors::Gqa(attention) = checkpoint.attention(1).unwrap() else {
        panic!("latent");
    };
    assert_eq!(attention.k.bias.as_ref().unwrap().shape, [8]);
    assert!(attention.o.bias.is_none());
    assert_eq!(
        &*checkpoint.norms(2).unwrap().mlp.weight.name,
        "model.layers.2.post_attention_layernorm.weight"
    );
    assert!(matches!(checkpoint.expert(1, 0), Err(CheckpointError::Request { .. })));
    assert!(matches!(checkpoint.expert(0, 4), Err(CheckpointError::Request { .. })));
    assert!(matches!(checkpoint.norms(3), Err(CheckpointError::Request { .. })));

    let checkpoint = olmoe().write().open();
    let AttentionTensors::Gqa(attention) = checkpoint.attention(0).unwrap() else {
        panic!("latent");
    };
    assert_eq!(attention.q_norm.as_ref().unwrap().shape, [40]);
    assert_eq!(attention.k_norm.as_ref().unwrap().shape, [8]);

    let checkpoint = deepseek_v2().write().open();
    let AttentionTensors::Mla(attention) = checkpoint.attention(0).unwrap() else {
        panic!("not latent");
    };
    assert_eq!(attention.kv_b.shape, [55, 6]);
    assert!(matches!(attention.query, QueryTensors::Latent { .. }));
    let mut direct = deepseek_v2();
    direct.set("q_lora_rank", json!(null));
    for layer in 0..3 {
        for latent in ["q_a_proj", "q_a_layernorm", "q_b_proj"] {
            direct.tensors.remove(&format!("model.layers.{layer}.self_attn.{latent}.weight"));
        }
        direct.tensor(&format!("model.layers.{layer}.self_attn.q_proj.weight"), &[50, 40]);
    }
    let checkpoint = direct.write().open();
    let AttentionTensors::Mla(attention) = checkpoint.attention(0).unwrap() else {
        panic!("not latent");
    };
    assert!(matches!(attention.query, QueryTensors::Direct(_)));
}

/// Renames Granite's tensors as transformers names them in memory.
fn as_in_memory(material: &Material) -> Material {
    let mut renamed = material.clone();
    renamed.tensors = std::mem::take(&mut renamed.tensors)
        .into_iter()
        .map(|(name, tensor)| {
            let name = name
                .replace("input_linear.weight", "experts.gate_up_proj")
                .replace("output_linear.weight", "experts.down_proj")
                .replace("router.layer.weight", "router.weight");
            (name, tensor)
        })
        .collect();
    renamed
}

fn fused(material: &Material) -> Vec<Material> {
    let family = material.config["model_type"].as_str().unwrap();
    match family {
        "granitemoe" => return vec![as_in_memory(material)],
        // Experts of this family have a single layout.
        "gpt_oss" => return Vec::new(),
        _ => {}
    }
    let (from, names, experts, layers, blocks): (_, _, _, &[usize], &[&str]) = match family {
        "mixtral" => ("block_sparse_moe", MIXTRAL, 5, &[0, 1, 2], &["block_sparse_moe", "mlp"]),
        "phimoe" => ("block_sparse_moe", MIXTRAL, 5, &[0, 1, 2], &["block_sparse_moe"]),
        "olmoe" => ("mlp", USUAL, 4, &[0, 1, 2], &["mlp"]),
        "qwen2_moe" | "qwen3_moe" => ("mlp", USUAL, 4, &[0, 2], &["mlp"]),
        _ => ("mlp", USUAL, 4, &[1, 2], &["mlp"]),
    };
    let fuse = |block: &&str| {
        let mut fused = material.clone();
        for layer in layers {
            fused.fuse(*layer, from, block, names, experts);
            let router = |block: &str| format!("model.layers.{layer}.{block}.gate.weight");
            let tensor = fused.tensors.remove(&router(from)).unwrap();
            fused.tensors.insert(router(block), tensor);
        }
        fused
    };
    blocks.iter().map(fuse).collect()
}

#[test]
fn fused_experts_read_the_same_bytes() {
    for material in families() {
        let separate = material.write().open();
        for fused in fused(&material) {
            let joined = fused.write().open();
            assert_eq!(joined.sizes(), separate.sizes());
            for layer in separate.config().moe_layers() {
                for expert in 0..separate.config().any_moe().unwrap().experts {
                    let a = separate.expert(layer, expert).unwrap();
                    let b = joined.expert(layer, expert).unwrap();
                    assert_eq!(a.tensors().count(), b.tensors().count());
                    for (a, b) in a.tensors().zip(b.tensors()) {
                        assert_eq!(a.shape, b.shape);
                        assert_eq!(separate.read(a).unwrap(), joined.read(b).unwrap());
                    }
                }
            }
        }
    }
}

#[test]
fn sizes_sum_to_those_of_the_tensors() {
    for material in all_families() {
        let checkpoint = material.write().open();
        let sizes = checkpoint.sizes();
        let stored: usize = material.tensors.values().map(|(_, _, data)| data.len()).sum();
        assert_eq!(sizes.total_bytes, stored as u64);
        let seen = checkpoint.inspect().unwrap();
        let layers = seen.moe_layers.len() * seen.experts;
        assert_eq!(
            sizes.total_bytes,
            sizes.outside_bytes
                + sizes.non_expert_layer_bytes.iter().sum::<u64>()
                + layers as u64 * sizes.expert_bytes
        );
        let (matrices, biases) = match seen.family.as_str() {
            "gpt_oss" => (3, 2 * 7 + 40),
            "gpt2_moe" => (2, 7),
            _ => (3, 0),
        };
        assert_eq!(sizes.expert_bytes, (matrices * 40 * 7 + biases) * 4);
        assert_eq!(sizes.token_bytes, 160);
        let latent = seen.family.starts_with("deepseek");
        let elements = match (latent, seen.family.as_str()) {
            (true, _) => 10,
            (false, "gpt2_moe") => 2 * 40,
            (false, _) => 2 * 8,
        };
        assert_eq!(sizes.kv_bytes_per_token, 3 * elements * 4);
        let json = serde_json::to_value(&seen).unwrap();
        assert_eq!(json["family"], material.config["model_type"]);
        assert_eq!(json["dtype"], "float32");
        assert_eq!(serde_json::from_value::<Inspection>(json).unwrap(), seen);
    }
}

/// Covers the models that transformers wrote and those of the demo; only two of them must be refused.
#[test]
fn every_reference_model_opens() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let fixtures = std::fs::read_dir(root.join("tests/fixtures")).unwrap().map(|entry| entry.unwrap().path());
    let mut opened = 0;
    for folder in fixtures.chain([root.join("demo/model")]) {
        if !folder.join("config.json").exists() {
            continue;
        }
        match (folder.file_name().and_then(|name| name.to_str()).unwrap(), Checkpoint::open(&folder)) {
            ("dsv2-bias", Err(error)) => assert_eq!(error.field(), Some("mlp_bias"), "{error}"),
            ("mixtral-gelu", Err(error)) => assert_eq!(error.field(), Some("hidden_act"), "{error}"),
            (name, Err(error)) => panic!("{name}: {error}"),
            (name, Ok(checkpoint)) => {
                assert!(checkpoint.inspect().unwrap().ignored.is_none(), "{name}");
                opened += 1;
            }
        }
    }
    assert!(opened > 30, "{opened}");
}

/// The config lacks a field whose tensors are in the files.
#[test]
fn biases_that_the_config_lacks_are_refused() {
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    for (name, field, stray) in [
        ("phimoe-longrope", "attention_bias", "model.layers.0.self_attn.k_proj.bias"),
        ("phimoe-longrope", "lm_head_bias", "lm_head.bias"),
        ("olmoe-clip", "attention_bias", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3moe-window", "attention_bias", "model.layers.0.self_attn.k_proj.bias"),
        ("granitemoe-fused", "attention_bias", "model.layers.0.self_attn.k_proj.bias"),
    ] {
        let folder = support::Folder::new();
        let source = fixtures.join(name);
        let mut config: serde_json::Value =
            serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
        config.as_object_mut().unwrap().remove(field).unwrap();
        folder.put("config.json", config.to_string());
        folder.put("model.safetensors", std::fs::read(source.join("model.safetensors")).unwrap());
        let error = folder.error();
        assert_eq!(error.field(), Some(stray), "{name} {field}: {error}");
    }
    let mut shared = deepseek_v2();
    shared.set("n_shared_experts", json!(0));
    let error = shared.write().error();
    assert!(error.field().is_some_and(|name| name.contains("shared_experts")), "{error}");
}

/// A model with longrope is served up to the context of its training.
#[test]
fn inspection_states_the_served_positions() {
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let seen = Checkpoint::open(fixtures.join("phimoe-longrope")).unwrap().inspect().unwrap();
    assert_eq!((seen.context_length, seen.served_context, seen.served_context()), (128, Some(64), 64));
    let seen = mixtral().write().open().inspect().unwrap();
    assert_eq!((seen.served_context, seen.served_context()), (None, 64));
    assert!(serde_json::to_value(&seen).unwrap().get("served_context").is_none());
}

#[test]
fn tied_weights_count_once() {
    let material = qwen2_moe();
    let checkpoint = material.write().open();
    assert!(checkpoint.head_is_embedding());
    let mut twice = material.clone();
    let embedding = twice.tensors["model.embed_tokens.weight"].clone();
    twice.tensors.insert("lm_head.weight".to_owned(), embedding.clone());
    let duplicated = twice.write().open();
    assert!(!duplicated.head_is_embedding());
    assert_eq!(duplicated.sizes(), checkpoint.sizes());
    let mut only_head = material.clone();
    only_head.tensors.remove("model.embed_tokens.weight");
    only_head.tensors.insert("lm_head.weight".to_owned(), embedding);
    let swapped = only_head.write().open();
    assert!(swapped.head_is_embedding());
    assert_eq!(&*swapped.embedding().name, "lm_head.weight");
    let mut untied = material;
    untied.set("tie_word_embeddings", json!(false));
    assert_eq!(untied.write().error().field(), Some("lm_head.weight"));
}

#[test]
fn config_without_dtype_uses_that_of_the_tensors() {
    let mut material = mixtral();
    material.unset("dtype");
    let names: Vec<_> = material.tensors.iter().map(|(n, (_, s, _))| (n.clone(), s.clone())).collect();
    for (name, shape) in names {
        material.typed(&name, Dtype::BF16, &shape);
    }
    let checkpoint = material.write().open();
    assert_eq!(checkpoint.config().dtype, StoredDtype::Bf16);
    assert_eq!(checkpoint.inspect().unwrap().dtype, "bfloat16");
    // The stated and the stored dtype differ.
    material.set("dtype", json!("float32"));
    assert!(matches!(material.write().error(), CheckpointError::Tensor { .. }));
}

#[test]
fn fingerprint_depends_on_weights_and_facts() {
    let material = mixtral();
    let first = material.write().open().fingerprint().unwrap();
    assert_eq!(first, material.write().open().fingerprint().unwrap());
    assert_eq!(first.to_string().len(), 64);
    let mut note = material.clone();
    note.set("transformers_version", json!("4.0.0"));
    assert_eq!(first, note.write().open().fingerprint().unwrap());
    let mut facts = material.clone();
    facts.set("sliding_window", json!(5));
    assert_ne!(first, facts.write().open().fingerprint().unwrap());
    for name in material.tensors.keys() {
        let mut weights = material.clone();
        weights.tensors.get_mut(name).unwrap().2[1] ^= 1;
        assert_ne!(first, weights.write().open().fingerprint().unwrap(), "{name}");
    }
}

/// Stored profiles, predictors, records and plans become useless if a fingerprint changes.
#[test]
fn fingerprints_equal_the_recorded_ones() {
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    for (name, known) in [
        ("gptoss-basic", "d9d4e351df48776f161a21c64d013d5c620bc9b24002c85721ac0e03ae53d2ad"),
        ("mixtral-basic", "4b5a3075ad3813776518fe6b2fa7ababbbd173314d6b9dd29d763eecf1fe44fd"),
        ("dsv3-yarn", "ed913ba8ae49badf584723397cc98e58c578975ff781fd46f85212af8d53f427"),
    ] {
        let fingerprint = Checkpoint::open(fixtures.join(name)).unwrap().fingerprint().unwrap();
        assert_eq!(fingerprint.to_string(), known, "{name}");
    }
}

/// The file is larger than the sample, which therefore takes the first bytes of each tensor.
#[test]
fn fingerprint_of_a_large_file_covers_every_tensor() {
    let mut material = mixtral();
    material.set("vocab_size", json!(6000));
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        material.tensor(name, &[6000, 40]);
    }
    let first = material.write().open().fingerprint().unwrap();
    for name in material.tensors.keys() {
        let mut weights = material.clone();
        weights.tensors.get_mut(name).unwrap().2[1] ^= 1;
        assert_ne!(first, weights.write().open().fingerprint().unwrap(), "{name}");
    }
}

#[test]
fn generation_defaults_are_read_from_their_file() {
    let folder = mixtral().write();
    let defaults = folder.open().generation().clone();
    assert_eq!((defaults.temperature, &defaults.eos_token_ids[..]), (0.0, &[2][..]));
    folder.put(
        "generation_config.json",
        json!({"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "eos_token_id": [2, 5, 99999], "max_new_tokens": 7, "repetition_penalty": 1.1}).to_string(),
    );
    let defaults = folder.open().generation().clone();
    assert_eq!((defaults.temperature, defaults.top_p, defaults.top_k), (0.6, Some(0.9), Some(50)));
    assert_eq!(defaults.eos_token_ids, [2, 5]);
    assert_eq!((defaults.max_new_tokens, defaults.repetition_penalty), (Some(7), Some(1.1)));
    folder.put("generation_config.json", json!({"temperature": 0.6, "top_p": 0.9}).to_string());
    let defaults = folder.open().generation().clone();
    assert_eq!((defaults.temperature, defaults.top_p), (0.0, None));
    folder.put("generation_config.json", json!({"top_p": 1.5}).to_string());
    let error = folder.error();
    assert_eq!(error.field(), Some("top_p"));
    assert!(error.path().ends_with("generation_config.json"));
}
