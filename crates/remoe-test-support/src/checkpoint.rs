//! Generated checkpoints of any size.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use tempfile::TempDir;

/// Sizes of a generated Mixtral model in float32.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Number of layers, all with experts.
    pub layers: usize,
    /// Hidden size, a multiple of 8.
    pub hidden: usize,
    /// Intermediate size of an expert.
    pub width: usize,
    /// Number of experts per layer.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Size of the vocabulary.
    pub vocabulary: usize,
    /// Context length, in tokens.
    pub context: usize,
}

const HEADS: usize = 4;

/// Writes a model of these sizes to a temporary folder.
#[must_use]
pub fn generate(sizes: Sizes) -> TempDir {
    let folder = tempfile::tempdir().expect("there is a temporary folder");
    generate_in(folder.path(), sizes);
    folder
}

/// Writes a model of these sizes into `folder`.
pub fn generate_in(folder: &Path, sizes: Sizes) {
    let config = json!({
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "float32",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.width,
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.context,
        "tie_word_embeddings": true,
        "eos_token_id": null,
        "bos_token_id": null,
    });
    let tensors = tensors(sizes).into_iter().map(|(name, shape)| {
        let scale = (*shape.last().unwrap_or(&1) as f32).sqrt().recip();
        let (base, scale) = if name.contains("norm") { (1.0, 0.0) } else { (0.0, scale) };
        TensorRule { name, shape, base, scale }
    });
    write(folder, &config, &tensors.collect::<Vec<_>>());
}

/// Writes a model of any family to a temporary folder. Its weights follow a rule (`tests/fixtures/large.py`).
#[must_use]
pub fn by_rule(config: &Value, tensors: &[TensorRule]) -> TempDir {
    let folder = tempfile::tempdir().expect("there is a temporary folder");
    write(folder.path(), config, tensors);
    folder
}

fn write(folder: &Path, config: &Value, tensors: &[TensorRule]) {
    std::fs::write(folder.join("config.json"), config.to_string()).expect("the config is written");
    write_tensors(folder, tensors);
}

/// Float32 tensor with the rule of its elements: the next random number from -1 to 1, times `scale`, plus `base`.
/// Serialised as an array of the four fields.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct TensorRule {
    /// Name of the tensor.
    pub name: String,
    /// Dimensions of the tensor.
    pub shape: Vec<usize>,
    /// Mean of the elements.
    pub base: f32,
    /// Largest deviation from the mean.
    pub scale: f32,
}

fn tensors(sizes: Sizes) -> Vec<(String, Vec<usize>)> {
    let Sizes { hidden, width, experts, vocabulary, .. } = sizes;
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocabulary, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    for id in 0..sizes.layers {
        let mut layer = |name: &str, shape| tensors.push((format!("model.layers.{id}.{name}.weight"), shape));
        layer("input_layernorm", vec![hidden]);
        layer("post_attention_layernorm", vec![hidden]);
        for projection in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            layer(&format!("self_attn.{projection}"), vec![hidden, hidden]);
        }
        layer("block_sparse_moe.gate", vec![experts, hidden]);
        for expert in 0..experts {
            layer(&format!("block_sparse_moe.experts.{expert}.w1"), vec![width, hidden]);
            layer(&format!("block_sparse_moe.experts.{expert}.w2"), vec![hidden, width]);
            layer(&format!("block_sparse_moe.experts.{expert}.w3"), vec![width, hidden]);
        }
    }
    tensors
}

/// Writes the safetensors file: the length of the header, the header as JSON, the data.
fn write_tensors(folder: &Path, tensors: &[TensorRule]) {
    let file = File::create(folder.join("model.safetensors")).expect("the weights can be written");
    let mut out = BufWriter::new(file);
    let mut header = Map::new();
    let mut offset = 0;
    for TensorRule { name, shape, .. } in tensors {
        let end = offset + shape.iter().product::<usize>() * 4;
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [offset, end]});
        header.insert(name.clone(), entry);
        offset = end;
    }
    let header = Value::Object(header).to_string();
    let mut write = |bytes: &[u8]| out.write_all(bytes).expect("the weights are written");
    write(&(header.len() as u64).to_le_bytes());
    write(header.as_bytes());
    let mut state = 1_u64;
    for TensorRule { shape, base, scale, .. } in tensors {
        for _ in 0..shape.iter().product::<usize>() {
            // Linear congruential generator by Knuth. Only the upper bits are used, which are random enough.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let uniform = (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0;
            write(&(uniform * scale + base).to_le_bytes());
        }
    }
    out.flush().expect("the weights are written");
}
