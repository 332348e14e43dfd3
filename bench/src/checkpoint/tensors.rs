//! The tensors of a shape, in the order in which they are stored.

use super::shape::{Family, ModelShape};

/// Content of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Fill {
    /// Random numbers around 0 with this standard deviation.
    Random(f32),
    /// One number everywhere.
    Constant(f32),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct TensorSpec {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) fill: Fill,
}

impl TensorSpec {
    pub(super) fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// All tensors of `shape`.
pub(super) fn of(shape: &ModelShape) -> Vec<TensorSpec> {
    let mut list = TensorList { tensors: Vec::new(), prefix: String::new() };
    // Rows of unit size: what the first norm sees is the token alone.
    list.push("model.embed_tokens.weight", vec![shape.vocab, shape.hidden], Fill::Random(1.0));
    for layer in 0..shape.layers {
        list.prefix = format!("model.layers.{layer}.");
        list.norm("input_layernorm", shape.hidden);
        list.norm("post_attention_layernorm", shape.hidden);
        match shape.family {
            Family::DeepseekV2 => latent_attention(&mut list, shape),
            Family::Olmoe | Family::Mixtral | Family::Qwen2Moe | Family::Qwen3Moe => {
                attention(&mut list, shape)
            }
        }
        if shape.family == Family::DeepseekV2 && layer < shape.dense_layers() {
            list.feed_forward("mlp", USUAL, shape.hidden, shape.dense_width());
        } else {
            experts(&mut list, shape);
        }
    }
    list.prefix.clear();
    list.norm("model.norm", shape.hidden);
    list.linear("lm_head", shape.vocab, shape.hidden);
    list.tensors
}

/// Names of gate, up and down.
type Names = [&'static str; 3];

const USUAL: Names = ["gate_proj", "up_proj", "down_proj"];

fn attention(list: &mut TensorList, shape: &ModelShape) {
    let (q, kv) = (shape.heads * shape.head_dim(), shape.kv_heads() * shape.head_dim());
    for (name, rows) in [("q_proj", q), ("k_proj", kv), ("v_proj", kv)] {
        list.linear(&format!("self_attn.{name}"), rows, shape.hidden);
        if shape.family == Family::Qwen2Moe {
            list.push(&format!("self_attn.{name}.bias"), vec![rows], Fill::Random(0.02));
        }
    }
    list.linear("self_attn.o_proj", shape.hidden, q);
    if shape.family == Family::Olmoe {
        list.norm("self_attn.q_norm", q);
        list.norm("self_attn.k_norm", kv);
    }
    if shape.family == Family::Qwen3Moe {
        list.norm("self_attn.q_norm", shape.head_dim());
        list.norm("self_attn.k_norm", shape.head_dim());
    }
}

fn latent_attention(list: &mut TensorList, shape: &ModelShape) {
    let (head, rope, rank) = (shape.head_dim(), shape.rope_dim(), shape.kv_rank());
    let queries = shape.heads * (head + rope);
    match shape.q_rank {
        None => list.linear("self_attn.q_proj", queries, shape.hidden),
        Some(q_rank) => {
            list.linear("self_attn.q_a_proj", q_rank, shape.hidden);
            list.norm("self_attn.q_a_layernorm", q_rank);
            list.linear("self_attn.q_b_proj", queries, q_rank);
        }
    }
    list.linear("self_attn.kv_a_proj_with_mqa", rank + rope, shape.hidden);
    list.norm("self_attn.kv_a_layernorm", rank);
    list.linear("self_attn.kv_b_proj", shape.heads * 2 * head, rank);
    list.linear("self_attn.o_proj", shape.hidden, shape.heads * head);
}

fn experts(list: &mut TensorList, shape: &ModelShape) {
    let (block, names, shared) = match shape.family {
        Family::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"], None),
        Family::Olmoe | Family::Qwen3Moe => ("mlp", USUAL, None),
        Family::Qwen2Moe => ("mlp", USUAL, Some("shared_expert")),
        Family::DeepseekV2 => ("mlp", USUAL, Some("shared_experts")),
    };
    list.linear(&format!("{block}.gate"), shape.experts, shape.hidden);
    for expert in 0..shape.experts {
        list.feed_forward(&format!("{block}.experts.{expert}"), names, shape.hidden, shape.width);
    }
    if let Some(shared) = shared.filter(|_| shape.shared_width() > 0) {
        list.feed_forward(&format!("{block}.{shared}"), USUAL, shape.hidden, shape.shared_width());
        if shape.family == Family::Qwen2Moe {
            list.linear(&format!("{block}.shared_expert_gate"), 1, shape.hidden);
        }
    }
}

struct TensorList {
    tensors: Vec<TensorSpec>,
    /// Prefix of the names of the current layer's tensors.
    prefix: String,
}

impl TensorList {
    fn push(&mut self, name: &str, shape: Vec<usize>, fill: Fill) {
        self.tensors.push(TensorSpec { name: format!("{}{name}", self.prefix), shape, fill });
    }

    fn norm(&mut self, name: &str, width: usize) {
        self.push(&format!("{name}.weight"), vec![width], Fill::Constant(1.0));
    }

    /// A matrix that keeps the size of what it is multiplied with.
    fn linear(&mut self, name: &str, rows: usize, columns: usize) {
        let deviation = (columns as f32).sqrt().recip();
        self.push(&format!("{name}.weight"), vec![rows, columns], Fill::Random(deviation));
    }

    fn feed_forward(&mut self, prefix: &str, [gate, up, down]: Names, hidden: usize, width: usize) {
        self.linear(&format!("{prefix}.{gate}"), width, hidden);
        self.linear(&format!("{prefix}.{up}"), width, hidden);
        self.linear(&format!("{prefix}.{down}"), hidden, width);
    }
}
