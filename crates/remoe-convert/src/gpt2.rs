//! Conversion of GPT-2 to the family `gpt2_moe`: each feed-forward network becomes experts with equal numbers of its
//! neurons, and a router.
//!
//! A selected expert has weight 1, and the bias of the down projection belongs to the layer. Therefore the sum over all
//! experts equals the network's output, whatever the router's weights. With a smaller top-k, a token skips the neurons of
//! the other experts.
//!
//! The router's logit of an expert is the mean pre-activation of its neurons, biases included. It is a linear function
//! of the hidden state, computed from the weights alone (MoEfication's "parameter center", arXiv 2110.01786,
//! section 3.3).

use crate::dense::{DenseModel, DenseSizes};
use crate::elements::{from_floats, select_rows, to_floats, transpose};
use crate::error::ConvertError;
use crate::split::{MatrixRows, cluster_neurons};
use crate::writer::{PlannedTensor, SafetensorsWriter};
use remoe_model::{Checkpoint, CheckpointError, ModelConfig, Store, StoredFile, TENSOR_LIMIT};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::Write;
use std::path::Path;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
/// Size limit of `config.json`, in bytes.
const CONFIG_BYTES_LIMIT: u64 = 1 << 20;
/// Files that are copied unchanged, if they exist.
const COPIED_FILES: [&str; 8] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];
/// Size of the copy buffer in bytes.
const BUFFER_BYTES: u64 = 1 << 20;

/// Options of splitting a layer's neurons into experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitOptions {
    /// Experts per layer. Must divide the number of its neurons.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
}

/// Summary of a converted checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConversionSummary {
    /// Layers, all of which have experts.
    pub layers: usize,
    /// Neurons per expert.
    pub expert_width: usize,
}

/// Converts the GPT-2 in `from` into the folder `to`, which must be empty or new.
///
/// Writes the config last, so that the folder of an interrupted conversion has none.
///
/// # Errors
/// `from` is not a supported GPT-2 (names the file and the field or tensor), the options do not fit the model, or `to`
/// cannot be written.
pub fn gpt2_moe(
    from: &dyn Store,
    to: &Path,
    options: SplitOptions,
) -> Result<ConversionSummary, ConvertError> {
    let mut config = read_config(from)?;
    let path = from.root().join(CONFIG);
    let parse = |config: &Map<String, Value>| {
        ModelConfig::from_json(&path, Value::Object(config.clone()).to_string().as_bytes())
    };
    // Parses the config as one expert per layer, whose width is that of the network.
    set_moe_fields(&mut config, SplitOptions { experts: 1, top_k: 1 });
    let dense = DenseModel::open(from, &parse(&config)?)?;
    options.check(dense.sizes.width)?;
    set_moe_fields(&mut config, options);
    config.insert("dtype".to_owned(), dense.dtype().name().into());
    config.remove("torch_dtype");
    let expert_width = dense.sizes.width / options.experts;
    // Checks the resulting config before anything is written.
    parse(&config)?;
    let plan = TensorPlan::new(dense.sizes, options.experts)?;

    create_empty_folder(to)?;
    let mut writer = SafetensorsWriter::create(to.join(WEIGHTS), dense.dtype(), plan.into_tensors())?;
    writer.write("model.embed_tokens.weight", &dense.read("wte.weight")?)?;
    writer.write("model.embed_positions.weight", &dense.read("wpe.weight")?)?;
    for layer in 0..dense.sizes.layers {
        convert_attention(&dense, layer, &mut writer)?;
        convert_experts(&dense, layer, options.experts, &mut writer)?;
    }
    writer.write("model.norm.weight", &dense.read("ln_f.weight")?)?;
    writer.write("model.norm.bias", &dense.read("ln_f.bias")?)?;
    if dense.sizes.has_head {
        writer.write("lm_head.weight", &dense.read("lm_head.weight")?)?;
    }
    writer.finish()?;
    for name in COPIED_FILES {
        let file =
            from.open(name).map_err(|source| CheckpointError::Io { path: from.root().join(name), source })?;
        if let Some(file) = file {
            copy_file(&*file, &from.root().join(name), &to.join(name))?;
        }
    }
    let path = to.join(CONFIG);
    let text = format!("{:#}\n", Value::Object(config));
    std::fs::write(&path, text).map_err(ConvertError::write(&path))?;
    Checkpoint::open(to)?;
    Ok(ConversionSummary { layers: dense.sizes.layers, expert_width })
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
    if file.size() > CONFIG_BYTES_LIMIT {
        return Err(json(format!("expected at most {CONFIG_BYTES_LIMIT} bytes, got {}", file.size())));
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

/// Changes a config to that of the family `gpt2_moe`.
fn set_moe_fields(config: &mut Map<String, Value>, options: SplitOptions) {
    config.insert("model_type".to_owned(), "gpt2_moe".into());
    config.insert("architectures".to_owned(), vec!["Gpt2MoeForCausalLM"].into());
    config.insert("num_local_experts".to_owned(), options.experts.into());
    config.insert("num_experts_per_tok".to_owned(), options.top_k.into());
}

/// Creates the output folder, and checks that it is empty.
fn create_empty_folder(to: &Path) -> Result<(), ConvertError> {
    std::fs::create_dir_all(to).map_err(ConvertError::write(to))?;
    let mut entries = std::fs::read_dir(to).map_err(ConvertError::write(to))?;
    if entries.next().is_some() {
        return Err(ConvertError::Occupied(to.to_owned()));
    }
    Ok(())
}

fn copy_file(file: &dyn StoredFile, from: &Path, to: &Path) -> Result<(), ConvertError> {
    let mut target = File::create_new(to).map_err(ConvertError::write(to))?;
    let mut buffer = Vec::new();
    for offset in (0..file.size()).step_by(BUFFER_BYTES as usize) {
        buffer.resize(BUFFER_BYTES.min(file.size() - offset) as usize, 0);
        file.read_exact_at(&mut buffer, offset)
            .map_err(|source| CheckpointError::Io { path: from.to_owned(), source })?;
        target.write_all(&buffer).map_err(ConvertError::write(to))?;
    }
    Ok(())
}

/// Tensors of the converted checkpoint, in the order in which they are written.
struct TensorPlan(Vec<PlannedTensor>);

impl TensorPlan {
    /// Plans the tensors of a model.
    ///
    /// # Errors
    /// A checkpoint may not have so many tensors.
    fn new(sizes: DenseSizes, experts: usize) -> Result<Self, ConvertError> {
        let too_many = || {
            let message = format!(
                "is {experts}: {} layers of this many exceed the limit of {TENSOR_LIMIT} tensors per checkpoint",
                sizes.layers
            );
            ConvertError::Option { name: "experts", message }
        };
        // Checked before the tensors are listed, because the list may be too long for memory.
        if sizes.layers.saturating_mul(experts) > TENSOR_LIMIT {
            return Err(too_many());
        }
        let DenseSizes { vocabulary, positions, hidden, layers, width, has_head } = sizes;
        let mut plan = Self(Vec::new());
        plan.add("model.embed_tokens.weight", &[vocabulary, hidden]);
        plan.add("model.embed_positions.weight", &[positions, hidden]);
        for layer in 0..layers {
            let layer = format!("model.layers.{layer}");
            plan.add_linear(&format!("{layer}.input_layernorm"), &[hidden]);
            for projection in ["q", "k", "v", "o"] {
                plan.add_linear(&format!("{layer}.self_attn.{projection}_proj"), &[hidden, hidden]);
            }
            plan.add_linear(&format!("{layer}.post_attention_layernorm"), &[hidden]);
            plan.add_linear(&format!("{layer}.mlp.router"), &[experts, hidden]);
            plan.add(&format!("{layer}.mlp.bias"), &[hidden]);
            for expert in 0..experts {
                let expert = format!("{layer}.mlp.experts.{expert}");
                plan.add_linear(&format!("{expert}.up_proj"), &[width / experts, hidden]);
                plan.add(&format!("{expert}.down_proj.weight"), &[hidden, width / experts]);
            }
        }
        plan.add_linear("model.norm", &[hidden]);
        if has_head {
            plan.add("lm_head.weight", &[vocabulary, hidden]);
        }
        if plan.0.len() > TENSOR_LIMIT {
            return Err(too_many());
        }
        Ok(plan)
    }

    fn add(&mut self, name: &str, shape: &[usize]) {
        self.0.push(PlannedTensor { name: name.to_owned(), shape: shape.to_vec() });
    }

    /// Adds a weight and its bias.
    fn add_linear(&mut self, name: &str, shape: &[usize]) {
        self.add(&format!("{name}.weight"), shape);
        self.add(&format!("{name}.bias"), &shape[..1]);
    }

    fn into_tensors(self) -> Vec<PlannedTensor> {
        self.0
    }
}

/// Writes a layer's norms and attention. The columns of `c_attn` are queries, then keys, then values.
fn convert_attention(
    dense: &DenseModel,
    layer: usize,
    writer: &mut SafetensorsWriter,
) -> Result<(), ConvertError> {
    let read = |name: &str| dense.read(&format!("h.{layer}.{name}"));
    let prefix = format!("model.layers.{layer}");
    let (hidden, element_bytes) = (dense.sizes.hidden, dense.dtype().bytes() as usize);
    writer.write(&format!("{prefix}.input_layernorm.weight"), &read("ln_1.weight")?)?;
    writer.write(&format!("{prefix}.input_layernorm.bias"), &read("ln_1.bias")?)?;
    let weight = transpose(&read("attn.c_attn.weight")?, 3 * hidden, element_bytes);
    let bias = read("attn.c_attn.bias")?;
    let parts =
        weight.chunks_exact(hidden * hidden * element_bytes).zip(bias.chunks_exact(hidden * element_bytes));
    for (projection, (weight, bias)) in ["q", "k", "v"].into_iter().zip(parts) {
        writer.write(&format!("{prefix}.self_attn.{projection}_proj.weight"), weight)?;
        writer.write(&format!("{prefix}.self_attn.{projection}_proj.bias"), bias)?;
    }
    let weight = transpose(&read("attn.c_proj.weight")?, hidden, element_bytes);
    writer.write(&format!("{prefix}.self_attn.o_proj.weight"), &weight)?;
    writer.write(&format!("{prefix}.self_attn.o_proj.bias"), &read("attn.c_proj.bias")?)?;
    writer.write(&format!("{prefix}.post_attention_layernorm.weight"), &read("ln_2.weight")?)?;
    writer.write(&format!("{prefix}.post_attention_layernorm.bias"), &read("ln_2.bias")?)?;
    Ok(())
}

/// Writes a layer's router and experts.
fn convert_experts(
    dense: &DenseModel,
    layer: usize,
    experts: usize,
    writer: &mut SafetensorsWriter,
) -> Result<(), ConvertError> {
    let read = |name: &str| dense.read(&format!("h.{layer}.mlp.{name}"));
    let prefix = format!("model.layers.{layer}.mlp");
    let dtype = dense.dtype();
    let (hidden, width, element_bytes) = (dense.sizes.hidden, dense.sizes.width, dtype.bytes() as usize);
    // After transposing, each matrix has one row per neuron.
    let up = transpose(&read("c_fc.weight")?, width, element_bytes);
    let (up_bias, down) = (read("c_fc.bias")?, read("c_proj.weight")?);
    let neurons = to_floats(dtype, &up);
    let clusters = cluster_neurons(MatrixRows { elements: &neurons, columns: hidden }, experts);
    let biases = to_floats(dtype, &up_bias);
    let mean = |members: &[usize], column: usize, columns: usize, matrix: &[f32]| {
        let elements = members.iter().filter_map(|member| matrix.get(member * columns + column));
        (elements.map(|x| f64::from(*x)).sum::<f64>() / members.len() as f64) as f32
    };
    let weight: Vec<f32> = clusters
        .iter()
        .flat_map(|members| (0..hidden).map(|column| mean(members, column, hidden, &neurons)))
        .collect();
    let bias: Vec<f32> = clusters.iter().map(|members| mean(members, 0, 1, &biases)).collect();
    writer.write(&format!("{prefix}.router.weight"), &from_floats(dtype, &weight))?;
    writer.write(&format!("{prefix}.router.bias"), &from_floats(dtype, &bias))?;
    writer.write(&format!("{prefix}.bias"), &read("c_proj.bias")?)?;
    for (expert, members) in clusters.iter().enumerate() {
        let prefix = format!("{prefix}.experts.{expert}");
        writer
            .write(&format!("{prefix}.up_proj.weight"), &select_rows(&up, hidden * element_bytes, members))?;
        writer.write(&format!("{prefix}.up_proj.bias"), &select_rows(&up_bias, element_bytes, members))?;
        let down = transpose(&select_rows(&down, hidden * element_bytes, members), hidden, element_bytes);
        writer.write(&format!("{prefix}.down_proj.weight"), &down)?;
    }
    Ok(())
}
