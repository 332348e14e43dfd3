//! GPT-2 to the family `gpt2_moe`: each feed-forward network becomes experts of as many of its neurons each, and a
//! router.
//!
//! A chosen expert counts with weight 1, and the bias of the down projection is the layer's own. So the sum over all
//! experts is the network itself whatever the router says, and with fewer of them a token goes without the neurons of
//! the others.
//!
//! The router's logit of an expert is the mean of what its neurons get before their activation, biases included: a
//! linear function of the hidden state, made of the weights alone (MoEfication's "parameter center", arXiv 2110.01786,
//! section 3.3).

use crate::dense::{Dense, DenseSizes};
use crate::elements::{chosen, floats, rounded, transposed};
use crate::error::ConvertError;
use crate::split::{MatrixRows, split};
use crate::writer::{PlannedTensor, Writer};
use remoe_model::{Checkpoint, CheckpointError, ModelConfig, Store, StoredFile, TENSOR_LIMIT};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::Write;
use std::path::Path;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
/// Longest `config.json` that is read.
const CONFIG_LIMIT: u64 = 1 << 20;
/// Files that are copied unchanged, if they exist.
const BESIDE: [&str; 8] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];
/// Bytes of such a file that are copied at a time.
const COPIED: u64 = 1 << 20;

/// How networks are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitOptions {
    /// Experts of a layer; they divide its neurons.
    pub experts: usize,
    /// Experts that a token uses.
    pub top_k: usize,
}

/// Summary of a written checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Converted {
    /// Layers, each of which has experts now.
    pub layers: usize,
    /// Neurons of an expert.
    pub expert_width: usize,
}

/// Converts the GPT-2 in `from` into the folder `to`, which is made, or is empty.
///
/// The config is written last: a folder without one is what an interrupted conversion left.
///
/// # Errors
/// `from` is no GPT-2 that can be served, by file and field or tensor; the options do not fit it; `to` cannot be
/// written.
pub fn gpt2_moe(from: &dyn Store, to: &Path, options: SplitOptions) -> Result<Converted, ConvertError> {
    let mut config = read_config(from)?;
    let path = from.root().join(CONFIG);
    let parse = |config: &Map<String, Value>| {
        ModelConfig::from_json(&path, Value::Object(config.clone()).to_string().as_bytes())
    };
    // With one expert a layer, whose width is that of the network.
    as_moe(&mut config, SplitOptions { experts: 1, top_k: 1 });
    let dense = Dense::open(from, &parse(&config)?)?;
    options.check(dense.sizes.width)?;
    as_moe(&mut config, options);
    config.insert("dtype".to_owned(), dense.dtype().name().into());
    config.remove("torch_dtype");
    let expert_width = dense.sizes.width / options.experts;
    // Before anything is written.
    parse(&config)?;
    let names = Names::of(dense.sizes, options.experts)?;

    make_folder(to)?;
    let mut writer = Writer::create(to.join(WEIGHTS), dense.dtype(), names.planned())?;
    writer.tensor("model.embed_tokens.weight", &dense.read("wte.weight")?)?;
    writer.tensor("model.embed_positions.weight", &dense.read("wpe.weight")?)?;
    for layer in 0..dense.sizes.layers {
        attention(&dense, layer, &mut writer)?;
        experts(&dense, layer, options.experts, &mut writer)?;
    }
    writer.tensor("model.norm.weight", &dense.read("ln_f.weight")?)?;
    writer.tensor("model.norm.bias", &dense.read("ln_f.bias")?)?;
    if dense.sizes.head {
        writer.tensor("lm_head.weight", &dense.read("lm_head.weight")?)?;
    }
    writer.finish()?;
    for name in BESIDE {
        let file =
            from.open(name).map_err(|source| CheckpointError::Io { path: from.root().join(name), source })?;
        if let Some(file) = file {
            copy(&*file, &from.root().join(name), &to.join(name))?;
        }
    }
    let path = to.join(CONFIG);
    let text = format!("{:#}\n", Value::Object(config));
    std::fs::write(&path, text).map_err(ConvertError::write(&path))?;
    Checkpoint::open(to)?;
    Ok(Converted { layers: dense.sizes.layers, expert_width })
}

impl SplitOptions {
    fn check(self, width: usize) -> Result<(), ConvertError> {
        let Self { experts, top_k } = self;
        if experts == 0 || !width.is_multiple_of(experts) {
            let message = format!("is {experts}, expected a divisor of the {width} neurons of a layer");
            return Err(ConvertError::Option { name: "experts", message });
        }
        if top_k == 0 || top_k > experts {
            let message = format!("is {top_k}, expected 1 to the {experts} experts of a layer");
            return Err(ConvertError::Option { name: "top-k", message });
        }
        Ok(())
    }
}

fn read_config(from: &dyn Store) -> Result<Map<String, Value>, CheckpointError> {
    let path = from.root().join(CONFIG);
    let io = |source| CheckpointError::Io { path: path.clone(), source };
    let json = |message: String| CheckpointError::Json { path: path.clone(), field: None, message };
    let Some(file) = from.open(CONFIG).map_err(io)? else {
        let message = "expected a model folder with config.json and safetensors files".to_owned();
        return Err(CheckpointError::MissingFile { path, message });
    };
    if file.size() > CONFIG_LIMIT {
        return Err(json(format!("expected at most {CONFIG_LIMIT} bytes, got {}", file.size())));
    }
    let mut text = vec![0; file.size() as usize];
    file.read_exact_at(&mut text, 0).map_err(io)?;
    let config: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|error| json(format!("{error}, expected an object")))?;
    match config.get("model_type").and_then(Value::as_str) {
        Some("gpt2") => Ok(config),
        other => Err(CheckpointError::Unsupported {
            path,
            field: "model_type".to_owned(),
            message: format!("expected model type gpt2, got `{}`", other.unwrap_or("none")),
        }),
    }
}

fn as_moe(config: &mut Map<String, Value>, options: SplitOptions) {
    config.insert("model_type".to_owned(), "gpt2_moe".into());
    config.insert("architectures".to_owned(), vec!["Gpt2MoeForCausalLM"].into());
    config.insert("num_local_experts".to_owned(), options.experts.into());
    config.insert("num_experts_per_tok".to_owned(), options.top_k.into());
}

/// The folder, empty.
fn make_folder(to: &Path) -> Result<(), ConvertError> {
    std::fs::create_dir_all(to).map_err(ConvertError::write(to))?;
    let mut entries = std::fs::read_dir(to).map_err(ConvertError::write(to))?;
    if entries.next().is_some() {
        return Err(ConvertError::Occupied(to.to_owned()));
    }
    Ok(())
}

fn copy(file: &dyn StoredFile, from: &Path, to: &Path) -> Result<(), ConvertError> {
    let mut target = File::create_new(to).map_err(ConvertError::write(to))?;
    let mut buffer = Vec::new();
    for at in (0..file.size()).step_by(COPIED as usize) {
        buffer.resize(COPIED.min(file.size() - at) as usize, 0);
        file.read_exact_at(&mut buffer, at)
            .map_err(|source| CheckpointError::Io { path: from.to_owned(), source })?;
        target.write_all(&buffer).map_err(ConvertError::write(to))?;
    }
    Ok(())
}

/// Tensors of the converted checkpoint, in the order in which they are written.
struct Names(Vec<PlannedTensor>);

impl Names {
    /// # Errors
    /// They are more than a checkpoint may have.
    fn of(sizes: DenseSizes, experts: usize) -> Result<Self, ConvertError> {
        let too_many = || {
            let message = format!(
                "is {experts}: {} layers of this many exceed the limit of {TENSOR_LIMIT} tensors per checkpoint",
                sizes.layers
            );
            ConvertError::Option { name: "experts", message }
        };
        // Before they are listed: every expert has some.
        if sizes.layers.saturating_mul(experts) > TENSOR_LIMIT {
            return Err(too_many());
        }
        let DenseSizes { vocabulary, positions, hidden, layers, width, head } = sizes;
        let mut names = Self(Vec::new());
        names.add("model.embed_tokens.weight", &[vocabulary, hidden]);
        names.add("model.embed_positions.weight", &[positions, hidden]);
        for layer in 0..layers {
            let layer = format!("model.layers.{layer}");
            names.linear(&format!("{layer}.input_layernorm"), &[hidden]);
            for projection in ["q", "k", "v", "o"] {
                names.linear(&format!("{layer}.self_attn.{projection}_proj"), &[hidden, hidden]);
            }
            names.linear(&format!("{layer}.post_attention_layernorm"), &[hidden]);
            names.linear(&format!("{layer}.mlp.router"), &[experts, hidden]);
            names.add(&format!("{layer}.mlp.bias"), &[hidden]);
            for expert in 0..experts {
                let expert = format!("{layer}.mlp.experts.{expert}");
                names.linear(&format!("{expert}.up_proj"), &[width / experts, hidden]);
                names.add(&format!("{expert}.down_proj.weight"), &[hidden, width / experts]);
            }
        }
        names.linear("model.norm", &[hidden]);
        if head {
            names.add("lm_head.weight", &[vocabulary, hidden]);
        }
        if names.0.len() > TENSOR_LIMIT {
            return Err(too_many());
        }
        Ok(names)
    }

    fn add(&mut self, name: &str, shape: &[usize]) {
        self.0.push(PlannedTensor { name: name.to_owned(), shape: shape.to_vec() });
    }

    fn linear(&mut self, name: &str, shape: &[usize]) {
        self.add(&format!("{name}.weight"), shape);
        self.add(&format!("{name}.bias"), &shape[..1]);
    }

    fn planned(self) -> Vec<PlannedTensor> {
        self.0
    }
}

/// The norms and the attention of a layer: `c_attn` is queries, keys and values side by side.
fn attention(dense: &Dense, layer: usize, writer: &mut Writer) -> Result<(), ConvertError> {
    let read = |name: &str| dense.read(&format!("h.{layer}.{name}"));
    let to = format!("model.layers.{layer}");
    let (hidden, size) = (dense.sizes.hidden, dense.dtype().bytes() as usize);
    writer.tensor(&format!("{to}.input_layernorm.weight"), &read("ln_1.weight")?)?;
    writer.tensor(&format!("{to}.input_layernorm.bias"), &read("ln_1.bias")?)?;
    let weight = transposed(&read("attn.c_attn.weight")?, 3 * hidden, size);
    let bias = read("attn.c_attn.bias")?;
    let parts = weight.chunks_exact(hidden * hidden * size).zip(bias.chunks_exact(hidden * size));
    for (projection, (weight, bias)) in ["q", "k", "v"].into_iter().zip(parts) {
        writer.tensor(&format!("{to}.self_attn.{projection}_proj.weight"), weight)?;
        writer.tensor(&format!("{to}.self_attn.{projection}_proj.bias"), bias)?;
    }
    let weight = transposed(&read("attn.c_proj.weight")?, hidden, size);
    writer.tensor(&format!("{to}.self_attn.o_proj.weight"), &weight)?;
    writer.tensor(&format!("{to}.self_attn.o_proj.bias"), &read("attn.c_proj.bias")?)?;
    writer.tensor(&format!("{to}.post_attention_layernorm.weight"), &read("ln_2.weight")?)?;
    writer.tensor(&format!("{to}.post_attention_layernorm.bias"), &read("ln_2.bias")?)?;
    Ok(())
}

/// The router and the experts of a layer.
fn experts(dense: &Dense, layer: usize, experts: usize, writer: &mut Writer) -> Result<(), ConvertError> {
    let read = |name: &str| dense.read(&format!("h.{layer}.mlp.{name}"));
    let to = format!("model.layers.{layer}.mlp");
    let dtype = dense.dtype();
    let (hidden, width, size) = (dense.sizes.hidden, dense.sizes.width, dtype.bytes() as usize);
    // A row for each neuron in all of them.
    let up = transposed(&read("c_fc.weight")?, width, size);
    let (up_bias, down) = (read("c_fc.bias")?, read("c_proj.weight")?);
    let neurons = floats(dtype, &up);
    let clusters = split(MatrixRows { elements: &neurons, columns: hidden }, experts);
    let biases = floats(dtype, &up_bias);
    let mean = |members: &[usize], column: usize, columns: usize, of: &[f32]| {
        let elements = members.iter().filter_map(|member| of.get(member * columns + column));
        (elements.map(|x| f64::from(*x)).sum::<f64>() / members.len() as f64) as f32
    };
    let weight: Vec<f32> = clusters
        .iter()
        .flat_map(|members| (0..hidden).map(|column| mean(members, column, hidden, &neurons)))
        .collect();
    let bias: Vec<f32> = clusters.iter().map(|members| mean(members, 0, 1, &biases)).collect();
    writer.tensor(&format!("{to}.router.weight"), &rounded(dtype, &weight))?;
    writer.tensor(&format!("{to}.router.bias"), &rounded(dtype, &bias))?;
    writer.tensor(&format!("{to}.bias"), &read("c_proj.bias")?)?;
    for (expert, members) in clusters.iter().enumerate() {
        let to = format!("{to}.experts.{expert}");
        writer.tensor(&format!("{to}.up_proj.weight"), &chosen(&up, hidden * size, members))?;
        writer.tensor(&format!("{to}.up_proj.bias"), &chosen(&up_bias, size, members))?;
        let down = transposed(&chosen(&down, hidden * size, members), hidden, size);
        writer.tensor(&format!("{to}.down_proj.weight"), &down)?;
    }
    Ok(())
}
