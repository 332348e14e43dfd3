//! Tests of the GPT-2 conversion: every weight is converted exactly once, and unsupported models are refused.

use remoe_convert::{ConvertError, SplitOptions, gpt2_moe};
use remoe_model::{Checkpoint, CheckpointError, Folder, Linear, TensorFiles, TensorRef};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Sizes of the fixture.
const HIDDEN: usize = 32;
const WIDTH: usize = 64;
const LAYERS: usize = 3;

fn fixture_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/dense/gpt2")
}

fn convert(from: &Path, experts: usize, top_k: usize) -> (TempDir, PathBuf) {
    let scratch = tempfile::tempdir().unwrap();
    let to = scratch.path().join("to");
    let converted = gpt2_moe(&Folder::new(from), &to, SplitOptions { experts, top_k }).unwrap();
    assert_eq!((converted.layers, converted.expert_width), (LAYERS, WIDTH / experts));
    (scratch, to)
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&four| f32::from_le_bytes(four)).collect()
}

/// Transposes a matrix.
fn transposed(matrix: &[f32], columns: usize) -> Vec<f32> {
    let rows = matrix.len() / columns;
    (0..columns).flat_map(|column| (0..rows).map(move |row| matrix[row * columns + column])).collect()
}

/// Returns each neuron's input weights, bias and output weights as sortable bits.
fn neurons(up: &[f32], biases: &[f32], down: &[f32]) -> Vec<Vec<u32>> {
    let parts = up.chunks(HIDDEN).zip(biases).zip(down.chunks(HIDDEN));
    parts
        .map(|((up, bias), down)| up.iter().chain([bias]).chain(down).map(|x| x.to_bits()).collect())
        .collect()
}

#[test]
fn conversion_keeps_every_weight() {
    let files = TensorFiles::open_in(&Folder::new(fixture_folder())).unwrap();
    let read_source =
        |name: &str| floats(&files.read(&files.tensor(&format!("transformer.{name}")).unwrap()).unwrap());
    for experts in [1, 4, 8, 64] {
        let (_scratch, to) = convert(&fixture_folder(), experts, 1);
        let checkpoint = Checkpoint::open(&to).unwrap();
        let read = |tensor: &TensorRef| floats(&checkpoint.read(tensor).unwrap());
        let linear = |linear: &Linear| (read(&linear.weight), read(linear.bias.as_ref().unwrap()));
        let norm =
            |name: &str| (read_source(&format!("{name}.weight")), read_source(&format!("{name}.bias")));
        assert_eq!(read(checkpoint.embedding()), read_source("wte.weight"));
        assert_eq!(read(checkpoint.positions().unwrap()), read_source("wpe.weight"));
        assert!(checkpoint.head_is_embedding());
        assert_eq!(linear(checkpoint.final_norm()), norm("ln_f"));
        for layer in 0..LAYERS {
            let norms = checkpoint.norms(layer).unwrap();
            assert_eq!(linear(&norms.attention), norm(&format!("h.{layer}.ln_1")));
            assert_eq!(linear(&norms.mlp), norm(&format!("h.{layer}.ln_2")));
            let remoe_model::AttentionTensors::Gqa(attention) = checkpoint.attention(layer).unwrap() else {
                unreachable!("GPT-2 has plain attention")
            };
            let projections = [&attention.q, &attention.k, &attention.v].map(linear);
            let (weights, biases): (Vec<_>, Vec<_>) = projections.into_iter().unzip();
            assert_eq!(
                weights.concat(),
                transposed(&read_source(&format!("h.{layer}.attn.c_attn.weight")), 3 * HIDDEN)
            );
            assert_eq!(biases.concat(), read_source(&format!("h.{layer}.attn.c_attn.bias")));
            let output = read_source(&format!("h.{layer}.attn.c_proj.weight"));
            let expected = (transposed(&output, HIDDEN), read_source(&format!("h.{layer}.attn.c_proj.bias")));
            assert_eq!(linear(&attention.o), expected);

            let bias = checkpoint.experts_bias(layer).unwrap().unwrap();
            assert_eq!(read(bias), read_source(&format!("h.{layer}.mlp.c_proj.bias")));
            let router = linear(&checkpoint.router(layer).unwrap().unwrap().linear);
            let mut found = Vec::new();
            for expert in 0..experts {
                let tensors = checkpoint.expert(layer, expert).unwrap();
                assert!(tensors.gate.is_none() && tensors.down.bias.is_none());
                let ((up, biases), down) = (linear(&tensors.up), read(&tensors.down.weight));
                found.extend(neurons(&up, &biases, &transposed(&down, WIDTH / experts)));
                // The router's rows are the means of the experts' neurons.
                let count = (WIDTH / experts) as f64;
                let close = |mean: f64, found: f32| assert!((mean / count - f64::from(found)).abs() < 1e-6);
                for column in 0..HIDDEN {
                    let column_sum: f64 = up.chunks(HIDDEN).map(|row| f64::from(row[column])).sum();
                    close(column_sum, router.0[expert * HIDDEN + column]);
                }
                close(biases.iter().map(|x| f64::from(*x)).sum(), router.1[expert]);
            }
            let up = transposed(&read_source(&format!("h.{layer}.mlp.c_fc.weight")), WIDTH);
            let biases = read_source(&format!("h.{layer}.mlp.c_fc.bias"));
            let mut expected = neurons(&up, &biases, &read_source(&format!("h.{layer}.mlp.c_proj.weight")));
            found.sort_unstable();
            expected.sort_unstable();
            assert_eq!(found, expected, "layer {layer}, {experts} experts");
        }
    }
}

#[test]
fn conversion_is_deterministic() {
    let (_one, first) = convert(&fixture_folder(), 8, 2);
    let (_two, second) = convert(&fixture_folder(), 8, 2);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&first).unwrap() {
        let name = entry.unwrap().file_name();
        assert_eq!(std::fs::read(first.join(&name)).unwrap(), std::fs::read(second.join(&name)).unwrap());
        names.push(name.into_string().unwrap());
    }
    names.sort();
    assert_eq!(names, ["config.json", "generation_config.json", "model.safetensors"]);
    let config: Value = serde_json::from_slice(&std::fs::read(first.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["model_type"], &config["num_local_experts"]), (&json!("gpt2_moe"), &json!(8)));
    assert_eq!((&config["num_experts_per_tok"], &config["n_embd"]), (&json!(2), &json!(HIDDEN)));
}

/// GPT-2 checkpoint in memory, which tests change before writing it.
struct EditableCheckpoint {
    config: Value,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl EditableCheckpoint {
    fn new() -> Self {
        let read = |name: &str| std::fs::read(fixture_folder().join(name)).unwrap();
        let bytes = read("model.safetensors");
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |(name, view): (String, TensorView<'_>)| {
            (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        };
        let tensors = tensors.tensors().into_iter().map(tensor).collect();
        Self { config: serde_json::from_slice(&read("config.json")).unwrap(), tensors }
    }

    fn write(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        let views = self.tensors.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        let path = folder.path().join("model.safetensors");
        safetensors::serialize_to_file(views, None, &path).unwrap();
        folder
    }

    fn expect_refusal(&self) -> CheckpointError {
        let (from, scratch) = (self.write(), tempfile::tempdir().unwrap());
        let to = scratch.path().join("to");
        let options = SplitOptions { experts: 8, top_k: 2 };
        match gpt2_moe(&Folder::new(from.path()), &to, options).unwrap_err() {
            ConvertError::Checkpoint(error) => {
                assert!(error.path().starts_with(from.path()) && !to.exists(), "{error}");
                error
            }
            other => unreachable!("{other}"),
        }
    }
}

/// Older checkpoints have no prefix, but masks in every layer. This one is in half precision.
#[test]
fn older_checkpoint_layout_is_converted() {
    let mut source = EditableCheckpoint::new();
    for (name, (_, shape, data)) in std::mem::take(&mut source.tensors) {
        let halves = floats(&data).into_iter().flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect();
        let name = name.strip_prefix("transformer.").unwrap().to_owned();
        source.tensors.insert(name, (Dtype::BF16, shape, halves));
    }
    for layer in 0..LAYERS {
        source.tensors.insert(format!("h.{layer}.attn.bias"), (Dtype::F32, vec![1, 1, 2, 2], vec![0; 16]));
        source.tensors.insert(format!("h.{layer}.attn.masked_bias"), (Dtype::F32, vec![], vec![0; 4]));
    }
    let from = source.write();
    std::fs::write(from.path().join("tokenizer.json"), "{}").unwrap();
    let (_scratch, to) = convert(from.path(), 4, 2);
    assert_eq!(std::fs::read(to.join("tokenizer.json")).unwrap(), b"{}");
    let checkpoint = Checkpoint::open(&to).unwrap();
    assert_eq!(checkpoint.config().dtype, remoe_model::StoredDtype::Bf16);
    assert_eq!(checkpoint.read(checkpoint.embedding()).unwrap(), source.tensors["wte.weight"].2);
}

#[test]
fn unsupported_model_is_refused_by_field() {
    for (field, value) in [
        ("model_type", json!("llama")),
        ("activation_function", json!("gelu")),
        ("add_cross_attention", json!(true)),
        ("reorder_and_upcast_attn", json!(true)),
        ("scale_attn_by_inverse_layer_idx", json!(true)),
        ("scale_attn_weights", json!(false)),
        ("n_head", json!(5)),
    ] {
        let mut source = EditableCheckpoint::new();
        source.config[field] = value;
        assert_eq!(source.expect_refusal().field(), Some(field));
    }
    let name = "transformer.h.1.mlp.c_fc.bias";
    let mut missing = EditableCheckpoint::new();
    missing.tensors.remove(name);
    assert!(
        matches!(missing.expect_refusal(), CheckpointError::MissingTensor { tensor, .. } if tensor == name)
    );
    let mut short = EditableCheckpoint::new();
    short.tensors.insert(name.to_owned(), (Dtype::F32, vec![WIDTH - 1], vec![0; 4 * (WIDTH - 1)]));
    assert_eq!(short.expect_refusal().field(), Some(name));
    let mut other = EditableCheckpoint::new();
    other.tensors.insert(name.to_owned(), (Dtype::F16, vec![WIDTH], vec![0; 2 * WIDTH]));
    assert_eq!(other.expect_refusal().field(), Some(name));
    let mut further = EditableCheckpoint::new();
    further.tensors.insert("score.weight".to_owned(), (Dtype::F32, vec![1], vec![0; 4]));
    assert_eq!(further.expect_refusal().field(), Some("score.weight"));
    let mut layers = EditableCheckpoint::new();
    layers.config["n_layer"] = json!(2);
    assert!(layers.expect_refusal().field().unwrap().starts_with("transformer.h.2."));
}

#[test]
fn invalid_options_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let to = scratch.path().join("to");
    for (experts, top_k, name) in
        [(3, 2, "experts"), (0, 1, "experts"), (128, 2, "experts"), (8, 9, "top-k"), (8, 0, "top-k")]
    {
        let error =
            gpt2_moe(&Folder::new(fixture_folder()), &to, SplitOptions { experts, top_k }).unwrap_err();
        assert!(matches!(error, ConvertError::Option { name: found, .. } if found == name), "{error}");
        assert!(!to.exists());
    }
    // One expert per neuron: more tensors than a checkpoint may have.
    let width = 1 << 15;
    let mut wide = EditableCheckpoint::new();
    wide.config["n_inner"] = json!(width);
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("c_fc.weight", vec![HIDDEN, width]),
            ("c_fc.bias", vec![width]),
            ("c_proj.weight", vec![width, HIDDEN]),
        ] {
            let zeros = vec![0; 4 * shape.iter().product::<usize>()];
            wide.tensors.insert(format!("transformer.h.{layer}.mlp.{name}"), (Dtype::F32, shape, zeros));
        }
    }
    let from = wide.write();
    let error =
        gpt2_moe(&Folder::new(from.path()), &to, SplitOptions { experts: width, top_k: 1 }).unwrap_err();
    assert!(matches!(&error, ConvertError::Option { name: "experts", .. }), "{error}");
    assert!(error.to_string().contains("tensors") && !to.exists(), "{error}");
    std::fs::create_dir(&to).unwrap();
    std::fs::write(to.join("mine"), "").unwrap();
    let error =
        gpt2_moe(&Folder::new(fixture_folder()), &to, SplitOptions { experts: 8, top_k: 2 }).unwrap_err();
    assert!(matches!(error, ConvertError::Occupied(_)), "{error}");
    assert_eq!(std::fs::read_dir(&to).unwrap().count(), 1);
}
