//! Tiny checkpoints in a temporary folder, with the names and shapes that transformers 5.17 writes.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use remoe_model::{Checkpoint, CheckpointError};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// One tensor: type, shape, bytes.
pub type Tensor = (Dtype, Vec<usize>, Vec<u8>);

/// A checkpoint that is not written yet.
#[derive(Clone)]
pub struct Material {
    pub config: Value,
    pub tensors: BTreeMap<String, Tensor>,
}

impl Material {
    pub fn set(&mut self, field: &str, value: Value) -> &mut Self {
        self.config[field] = value;
        self
    }

    pub fn unset(&mut self, field: &str) -> &mut Self {
        self.config.as_object_mut().unwrap().remove(field);
        self
    }

    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> &mut Self {
        self.typed(name, Dtype::F32, shape)
    }

    pub fn typed(&mut self, name: &str, dtype: Dtype, shape: &[usize]) -> &mut Self {
        let size = match dtype {
            Dtype::F32 => 4,
            Dtype::I64 | Dtype::F64 => 8,
            _ => 2,
        };
        let bytes = shape.iter().product::<usize>() * size;
        // Bytes that differ by tensor and position.
        let seed = name.bytes().fold(7_u32, |h, b| h.wrapping_mul(31).wrapping_add(u32::from(b)));
        let data = (0..bytes as u32)
            .map(|i| (seed.wrapping_add(i).wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        self.tensors.insert(name.to_owned(), (dtype, shape.to_vec(), data));
        self
    }

    /// Joins the experts of a layer as transformers keeps them in memory.
    pub fn fuse(&mut self, layer: usize, from: &str, to: &str, names: [&str; 3], experts: usize) {
        let prefix = format!("model.layers.{layer}.");
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        let mut shapes = (vec![], vec![]);
        for expert in 0..experts {
            let mut take = |name: &str| {
                let name = format!("{prefix}{from}.experts.{expert}.{name}.weight");
                self.tensors.remove(&name).unwrap()
            };
            let (gate, up, last) = (take(names[0]), take(names[1]), take(names[2]));
            shapes = (vec![experts, 2 * gate.1[0], gate.1[1]], vec![experts, last.1[0], last.1[1]]);
            gate_up.extend(gate.2);
            gate_up.extend(up.2);
            down.extend(last.2);
        }
        let name = format!("{prefix}{to}.experts.");
        self.tensors.insert(format!("{name}gate_up_proj"), (Dtype::F32, shapes.0, gate_up));
        self.tensors.insert(format!("{name}down_proj"), (Dtype::F32, shapes.1, down));
    }

    pub fn write(&self) -> Folder {
        self.write_shards(1)
    }

    /// Writes one file, or some files and an index.
    pub fn write_shards(&self, shards: usize) -> Folder {
        let folder = Folder::new();
        folder.put("config.json", self.config.to_string());
        if shards == 1 {
            folder.put_tensors("model.safetensors", &self.tensors);
            return folder;
        }
        let mut map = serde_json::Map::new();
        for shard in 0..shards {
            let file = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
            let part: BTreeMap<_, _> = self
                .tensors
                .iter()
                .enumerate()
                .filter(|(i, _)| i % shards == shard)
                .map(|(_, (name, tensor))| (name.clone(), tensor.clone()))
                .collect();
            for name in part.keys() {
                map.insert(name.clone(), json!(file));
            }
            folder.put_tensors(&file, &part);
        }
        folder.put("model.safetensors.index.json", json!({"weight_map": map}).to_string());
        folder
    }
}

/// A temporary folder.
pub struct Folder {
    directory: tempfile::TempDir,
}

impl Folder {
    pub fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn put(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.file(name), content).unwrap();
    }

    pub fn put_tensors(&self, name: &str, tensors: &BTreeMap<String, Tensor>) {
        let views = tensors.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        self.put(name, safetensors::serialize(views, None).unwrap());
    }

    pub fn open(&self) -> Checkpoint {
        Checkpoint::open(self.path()).unwrap()
    }

    pub fn error(&self) -> CheckpointError {
        Checkpoint::open(self.path()).unwrap_err()
    }
}

fn gqa(material: &mut Material, layer: usize, bias: bool) {
    let attention = format!("model.layers.{layer}.self_attn");
    for (name, rows) in [("q", 40), ("k", 8), ("v", 8)] {
        material.tensor(&format!("{attention}.{name}_proj.weight"), &[rows, 40]);
        if bias {
            material.tensor(&format!("{attention}.{name}_proj.bias"), &[rows]);
        }
    }
    material.tensor(&format!("{attention}.o_proj.weight"), &[40, 40]);
}

fn mlp(material: &mut Material, prefix: &str, [gate, up, down]: [&str; 3], width: usize) {
    material.tensor(&format!("{prefix}.{gate}.weight"), &[width, 40]);
    material.tensor(&format!("{prefix}.{up}.weight"), &[width, 40]);
    material.tensor(&format!("{prefix}.{down}.weight"), &[40, width]);
}

fn outside(material: &mut Material, layers: usize, head: bool) {
    material.tensor("model.embed_tokens.weight", &[59, 40]);
    material.tensor("model.norm.weight", &[40]);
    if head {
        material.tensor("lm_head.weight", &[59, 40]);
    }
    for layer in 0..layers {
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            material.tensor(&format!("model.layers.{layer}.{norm}.weight"), &[40]);
        }
    }
}

fn start(config: Value) -> Material {
    Material { config, tensors: BTreeMap::new() }
}

pub const USUAL: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
pub const MIXTRAL: [&str; 3] = ["w1", "w3", "w2"];

/// 5 heads, hidden 40, 3 layers, 5 experts of width 7, top 3, window 4.
pub fn mixtral() -> Material {
    let mut material = start(json!({
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "dtype": "float32", "eos_token_id": 2, "head_dim": null, "hidden_act": "silu",
        "hidden_size": 40, "initializer_range": 0.02, "intermediate_size": 7,
        "max_position_embeddings": 64, "model_type": "mixtral", "num_attention_heads": 5,
        "num_experts_per_tok": 3, "num_hidden_layers": 3, "num_key_value_heads": 1,
        "num_local_experts": 5, "output_router_logits": false, "pad_token_id": null,
        "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "sliding_window": 4,
        "tie_word_embeddings": false, "transformers_version": "5.17.0", "use_cache": true,
        "vocab_size": 59
    }));
    outside(&mut material, 3, true);
    for layer in 0..3 {
        gqa(&mut material, layer, false);
        let block = format!("model.layers.{layer}.block_sparse_moe");
        material.tensor(&format!("{block}.gate.weight"), &[5, 40]);
        for expert in 0..5 {
            mlp(&mut material, &format!("{block}.experts.{expert}"), MIXTRAL, 7);
        }
    }
    material
}

/// 5 heads, hidden 40, 3 layers, 4 experts of width 7, top 1, clipped.
pub fn olmoe() -> Material {
    let mut material = start(json!({
        "architectures": ["OlmoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": null, "clip_qkv": 1.5, "dtype": "float32", "eos_token_id": 50279,
        "hidden_act": "silu", "hidden_size": 40, "initializer_range": 0.02,
        "intermediate_size": 7, "max_position_embeddings": 64, "model_type": "olmoe",
        "norm_topk_prob": false, "num_attention_heads": 5, "num_experts": 4,
        "num_experts_per_tok": 1, "num_hidden_layers": 3, "num_key_value_heads": 1,
        "output_router_logits": false, "pad_token_id": 1, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "router_aux_loss_coef": 0.01, "tie_word_embeddings": false,
        "transformers_version": "5.17.0", "use_cache": true, "vocab_size": 59
    }));
    outside(&mut material, 3, true);
    for layer in 0..3 {
        gqa(&mut material, layer, false);
        let attention = format!("model.layers.{layer}.self_attn");
        material.tensor(&format!("{attention}.q_norm.weight"), &[40]);
        material.tensor(&format!("{attention}.k_norm.weight"), &[8]);
        let block = format!("model.layers.{layer}.mlp");
        material.tensor(&format!("{block}.gate.weight"), &[4, 40]);
        for expert in 0..4 {
            mlp(&mut material, &format!("{block}.experts.{expert}"), USUAL, 7);
        }
    }
    material
}

/// 5 heads, hidden 40, 3 layers of which layer 1 is dense, 4 experts of width 7, a shared one of 11,
/// tied.
pub fn qwen2_moe() -> Material {
    let mut material = start(json!({
        "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": null,
        "decoder_sparse_step": 1, "dtype": "float32", "eos_token_id": null, "hidden_act": "silu",
        "hidden_size": 40, "initializer_range": 0.02, "intermediate_size": 9,
        "layer_types": ["full_attention", "full_attention", "full_attention"],
        "max_position_embeddings": 64, "max_window_layers": 28, "mlp_only_layers": [1],
        "model_type": "qwen2_moe", "moe_intermediate_size": 7, "norm_topk_prob": false,
        "num_attention_heads": 5, "num_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 3, "num_key_value_heads": 1, "output_router_logits": false,
        "pad_token_id": null, "qkv_bias": true, "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 11, "sliding_window": 0,
        "tie_word_embeddings": true, "transformers_version": "5.17.0", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 59
    }));
    outside(&mut material, 3, false);
    for layer in 0..3 {
        gqa(&mut material, layer, true);
        let block = format!("model.layers.{layer}.mlp");
        if layer == 1 {
            mlp(&mut material, &block, USUAL, 9);
            continue;
        }
        material.tensor(&format!("{block}.gate.weight"), &[4, 40]);
        for expert in 0..4 {
            mlp(&mut material, &format!("{block}.experts.{expert}"), USUAL, 7);
        }
        mlp(&mut material, &format!("{block}.shared_expert"), USUAL, 11);
        material.tensor(&format!("{block}.shared_expert_gate.weight"), &[1, 40]);
    }
    material
}

/// 5 heads, hidden 40, 3 layers of which layer 0 is dense, 4 experts of width 7, two shared.
pub fn deepseek_v2() -> Material {
    let mut material = start(json!({
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "float32", "eos_token_id": 2,
        "first_k_dense_replace": 1, "head_dim": 4, "hidden_act": "silu", "hidden_size": 40,
        "initializer_range": 0.02, "intermediate_size": 9, "kv_lora_rank": 6,
        "max_position_embeddings": 64, "mlp_bias": false, "model_type": "deepseek_v2",
        "moe_intermediate_size": 7, "n_group": null, "n_routed_experts": 4,
        "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 5,
        "num_experts_per_tok": 2, "num_hidden_layers": 3, "num_key_value_heads": 5,
        "pad_token_id": null, "pretraining_tp": 1, "q_lora_rank": 10, "qk_head_dim": 10,
        "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "rms_norm_eps": 1e-06,
        "rope_parameters": {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 16, "rope_theta": 10000.0, "rope_type": "yarn",
            "type": "yarn"},
        "routed_scaling_factor": 1.0, "tie_word_embeddings": false, "topk_group": null,
        "topk_method": "greedy", "transformers_version": "5.17.0", "use_cache": true,
        "v_head_dim": 5, "vocab_size": 59
    }));
    outside(&mut material, 3, true);
    for layer in 0..3 {
        let attention = format!("model.layers.{layer}.self_attn");
        for (name, shape) in [
            ("q_a_proj", &[10, 40][..]),
            ("q_a_layernorm", &[10]),
            ("q_b_proj", &[50, 10]),
            ("kv_a_proj_with_mqa", &[10, 40]),
            ("kv_a_layernorm", &[6]),
            ("kv_b_proj", &[55, 6]),
            ("o_proj", &[40, 25]),
        ] {
            material.tensor(&format!("{attention}.{name}.weight"), shape);
        }
        let block = format!("model.layers.{layer}.mlp");
        if layer == 0 {
            mlp(&mut material, &block, USUAL, 9);
            continue;
        }
        material.tensor(&format!("{block}.gate.weight"), &[4, 40]);
        for expert in 0..4 {
            mlp(&mut material, &format!("{block}.experts.{expert}"), USUAL, 7);
        }
        mlp(&mut material, &format!("{block}.shared_experts"), USUAL, 14);
    }
    material
}

/// 5 heads, hidden 40, 3 layers of which layer 1 is dense, 4 experts of width 7.
pub fn qwen3_moe() -> Material {
    let mut material = start(json!({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": null, "decoder_sparse_step": 1, "dtype": "float32", "eos_token_id": null,
        "hidden_act": "silu", "hidden_size": 40, "initializer_range": 0.02, "intermediate_size": 9,
        "max_position_embeddings": 64, "mlp_only_layers": [1], "model_type": "qwen3_moe",
        "moe_intermediate_size": 7, "norm_topk_prob": true, "num_attention_heads": 5,
        "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3,
        "num_key_value_heads": 1, "output_router_logits": false, "pad_token_id": null,
        "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false,
        "transformers_version": "5.17.0", "use_cache": true, "use_sliding_window": false,
        "vocab_size": 59
    }));
    outside(&mut material, 3, true);
    for layer in 0..3 {
        gqa(&mut material, layer, false);
        for norm in ["q_norm", "k_norm"] {
            material.tensor(&format!("model.layers.{layer}.self_attn.{norm}.weight"), &[8]);
        }
        let block = format!("model.layers.{layer}.mlp");
        if layer == 1 {
            mlp(&mut material, &block, USUAL, 9);
            continue;
        }
        material.tensor(&format!("{block}.gate.weight"), &[4, 40]);
        for expert in 0..4 {
            mlp(&mut material, &format!("{block}.experts.{expert}"), USUAL, 7);
        }
    }
    material
}

/// 5 heads, hidden 40, 3 layers, 4 experts of width 7, biases, multipliers.
pub fn granitemoe() -> Material {
    let mut material = start(json!({
        "architectures": ["GraniteMoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attention_multiplier": 0.25, "bos_token_id": 1, "dtype": "float32",
        "embedding_multiplier": 12.0, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 40,
        "initializer_range": 0.02, "intermediate_size": 7, "logits_scaling": 6.0,
        "max_position_embeddings": 64, "model_type": "granitemoe", "num_attention_heads": 5,
        "num_experts_per_tok": 2, "num_hidden_layers": 3, "num_key_value_heads": 1,
        "num_local_experts": 4, "output_router_logits": false, "pad_token_id": null,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "router_aux_loss_coef": 0.001, "tie_word_embeddings": false,
        "transformers_version": "5.17.0", "use_cache": true, "vocab_size": 59
    }));
    outside(&mut material, 3, true);
    for layer in 0..3 {
        gqa(&mut material, layer, false);
        let block = format!("model.layers.{layer}.block_sparse_moe");
        material.tensor(&format!("{block}.router.layer.weight"), &[4, 40]);
        material.tensor(&format!("{block}.input_linear.weight"), &[4, 14, 40]);
        material.tensor(&format!("{block}.output_linear.weight"), &[4, 40, 7]);
    }
    material
}

/// As [`deepseek_v2`], with a corrected choice among 2 groups.
pub fn deepseek_v3() -> Material {
    let mut material = deepseek_v2();
    material
        .set("architectures", json!(["DeepseekV3ForCausalLM"]))
        .set("model_type", json!("deepseek_v3"))
        .set("n_group", json!(2))
        .set("topk_group", json!(1))
        .set("norm_topk_prob", json!(true))
        .set("num_nextn_predict_layers", json!(0))
        .set("rope_interleave", json!(true))
        .set("routed_scaling_factor", json!(2.5))
        .unset("topk_method")
        .unset("mlp_bias");
    for layer in 1..3 {
        material.tensor(&format!("model.layers.{layer}.mlp.gate.e_score_correction_bias"), &[4]);
    }
    material
}

/// As [`mixtral`], with top 2, biases on norms and head, longrope.
pub fn phimoe() -> Material {
    let mut material = mixtral();
    material
        .set("architectures", json!(["PhimoeForCausalLM"]))
        .set("model_type", json!("phimoe"))
        .set("attention_bias", json!(false))
        .set("input_jitter_noise", json!(0.0))
        .set("lm_head_bias", json!(true))
        .set("num_experts_per_tok", json!(2))
        .set("router_jitter_noise", json!(0.01))
        .unset("head_dim");
    material.tensor("lm_head.bias", &[59]).tensor("model.norm.bias", &[40]);
    for layer in 0..3 {
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            material.tensor(&format!("model.layers.{layer}.{norm}.bias"), &[40]);
        }
    }
    material
}

/// 5 heads, hidden 40, 3 layers, 4 experts of width 7 in turns, sinks, biases.
pub fn gpt_oss() -> Material {
    let mut material = start(json!({
        "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
        "bos_token_id": null, "dtype": "float32", "eos_token_id": null, "head_dim": 8,
        "hidden_act": "silu", "hidden_size": 40, "initializer_range": 0.02, "intermediate_size": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "max_position_embeddings": 64, "model_type": "gpt_oss", "num_attention_heads": 5,
        "num_experts_per_tok": 2, "num_hidden_layers": 3, "num_key_value_heads": 1,
        "num_local_experts": 4, "output_router_logits": false, "pad_token_id": null,
        "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 150_000.0, "rope_type": "default"},
        "router_aux_loss_coef": 0.001, "sliding_window": 4, "tie_word_embeddings": false,
        "transformers_version": "5.17.0", "use_cache": true, "vocab_size": 59
    }));
    outside(&mut material, 3, true);
    for layer in 0..3 {
        gqa(&mut material, layer, true);
        let attention = format!("model.layers.{layer}.self_attn");
        material.tensor(&format!("{attention}.o_proj.bias"), &[40]);
        material.tensor(&format!("{attention}.sinks"), &[5]);
        let block = format!("model.layers.{layer}.mlp");
        for (name, shape) in [
            ("router.weight", &[4, 40][..]),
            ("router.bias", &[4]),
            ("experts.gate_up_proj", &[4, 40, 14]),
            ("experts.gate_up_proj_bias", &[4, 14]),
            ("experts.down_proj", &[4, 7, 40]),
            ("experts.down_proj_bias", &[4, 40]),
        ] {
            material.tensor(&format!("{block}.{name}"), shape);
        }
    }
    material
}

/// 5 heads, hidden 40, 3 layers, 4 experts of width 7, all learned positions.
pub fn gpt2_moe() -> Material {
    let mut material = start(json!({
        "activation_function": "gelu_new", "architectures": ["Gpt2MoeForCausalLM"], "attn_pdrop": 0.1,
        "bos_token_id": 0, "dtype": "float32", "embd_pdrop": 0.1, "eos_token_id": 0,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2_moe", "n_embd": 40,
        "n_head": 5, "n_inner": 28, "n_layer": 3, "n_positions": 64, "num_experts_per_tok": 2,
        "num_local_experts": 4, "reorder_and_upcast_attn": false, "resid_pdrop": 0.1,
        "scale_attn_by_inverse_layer_idx": false, "scale_attn_weights": true, "use_cache": true, "vocab_size": 59
    }));
    outside(&mut material, 3, false);
    material.tensor("model.embed_positions.weight", &[64, 40]).tensor("model.norm.bias", &[40]);
    for layer in 0..3 {
        let layer = format!("model.layers.{layer}");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            material.tensor(&format!("{layer}.{norm}.bias"), &[40]);
        }
        for projection in ["q", "k", "v", "o"] {
            material.tensor(&format!("{layer}.self_attn.{projection}_proj.weight"), &[40, 40]);
            material.tensor(&format!("{layer}.self_attn.{projection}_proj.bias"), &[40]);
        }
        material.tensor(&format!("{layer}.mlp.router.weight"), &[4, 40]);
        material.tensor(&format!("{layer}.mlp.router.bias"), &[4]);
        material.tensor(&format!("{layer}.mlp.bias"), &[40]);
        for expert in 0..4 {
            let expert = format!("{layer}.mlp.experts.{expert}");
            material.tensor(&format!("{expert}.up_proj.weight"), &[7, 40]);
            material.tensor(&format!("{expert}.up_proj.bias"), &[7]);
            material.tensor(&format!("{expert}.down_proj.weight"), &[40, 7]);
        }
    }
    material
}

/// Every family whose fields have the usual names.
pub fn families() -> Vec<Material> {
    let (phimoe, gpt_oss) = (phimoe(), gpt_oss());
    let others = [mixtral(), olmoe(), qwen2_moe(), qwen3_moe(), granitemoe(), deepseek_v2(), deepseek_v3()];
    others.into_iter().chain([phimoe, gpt_oss]).collect()
}

pub fn all_families() -> Vec<Material> {
    families().into_iter().chain([gpt2_moe()]).collect()
}
