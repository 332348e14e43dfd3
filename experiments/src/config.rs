//! The sizes of a model that are not in a checkpoint but in its published configuration.

use remoe_model::Inspection;

/// What a published configuration says about a model, as far as sizes depend on it. Counts are of
/// elements unless said otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    /// `model_type`.
    pub(crate) family: &'static str,
    /// `float32` or `bfloat16`.
    pub(crate) dtype: &'static str,
    /// Layers.
    pub(crate) layers: usize,
    /// The first layer with routed experts; those before it are dense.
    pub(crate) first_moe_layer: usize,
    /// A hidden state.
    pub(crate) hidden: usize,
    /// Rows of the embedding.
    pub(crate) vocabulary: usize,
    /// Positions that the model was made for.
    pub(crate) context: usize,
    /// Rows of a learned position embedding; 0: there is none.
    pub(crate) learned_positions: usize,
    /// Whether the head is the embedding.
    pub(crate) tied: bool,
    /// Whether norms and products have biases.
    pub(crate) biases: bool,
    /// Keys, values and queries.
    pub(crate) attention: Attention,
    /// Experts and dense layers.
    pub(crate) mlp: Mlp,
}

/// How a layer attends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Attention {
    /// Keys and values for groups of heads; one group per head is plain multi-head attention.
    Grouped {
        /// Query heads.
        heads: usize,
        /// Key-value heads.
        groups: usize,
        /// Width of a head.
        width: usize,
    },
    /// Keys and values from a latent vector (DeepSeek-V2, arXiv 2405.04434, without a query latent).
    Latent {
        /// Heads.
        heads: usize,
        /// `kv_lora_rank`.
        rank: usize,
        /// `qk_nope_head_dim`.
        plain: usize,
        /// `qk_rope_head_dim`.
        rotary: usize,
        /// `v_head_dim`.
        value: usize,
    },
}

/// What follows attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mlp {
    /// Matrices of one MLP: 3 with a gate, 2 without.
    pub(crate) matrices: usize,
    /// Width of a routed or shared expert.
    pub(crate) width: usize,
    /// Width of the MLP of a dense layer.
    pub(crate) dense_width: usize,
    /// Routed experts per layer.
    pub(crate) experts: usize,
    /// Routed experts per token.
    pub(crate) top_k: usize,
    /// Shared experts per layer.
    pub(crate) shared: usize,
}

impl Config {
    /// Elements of one MLP of `width`.
    fn mlp(&self, width: usize) -> usize {
        self.mlp.matrices * self.hidden * width + self.bias(width + self.hidden)
    }

    fn bias(&self, elements: usize) -> usize {
        if self.biases { elements } else { 0 }
    }

    fn norm(&self) -> usize {
        self.hidden + self.bias(self.hidden)
    }

    fn attention(&self) -> usize {
        let hidden = self.hidden;
        match self.attention {
            Attention::Grouped { heads, groups, width } => {
                let (queries, keys) = (heads * width, groups * width);
                hidden * (queries + 2 * keys) + queries * hidden + self.bias(queries + 2 * keys + hidden)
            }
            Attention::Latent { heads, rank, plain, rotary, value } => {
                let queries = hidden * heads * (plain + rotary);
                let latent = hidden * (rank + rotary) + rank;
                queries + latent + rank * heads * (plain + value) + heads * value * hidden
            }
        }
    }

    /// Cached elements per token and layer.
    fn cache(&self) -> usize {
        match self.attention {
            Attention::Grouped { groups, width, .. } => 2 * groups * width,
            Attention::Latent { rank, rotary, .. } => rank + rotary,
        }
    }

    /// Everything in a layer but routed experts.
    fn layer(&self, layer: usize) -> usize {
        let mlp = if layer < self.first_moe_layer {
            self.mlp(self.mlp.dense_width)
        } else {
            self.hidden * self.mlp.experts + self.mlp.shared * self.mlp(self.mlp.width)
        };
        2 * self.norm() + self.attention() + mlp
    }

    fn outside(&self) -> usize {
        let tables = if self.tied { 1 } else { 2 };
        (tables * self.vocabulary + self.learned_positions) * self.hidden + self.norm()
    }

    /// The facts that a checkpoint of this configuration would have. Its fingerprint is `name`: there
    /// are no weights.
    pub(crate) fn inspection(&self, name: &str) -> Inspection {
        let element = if self.dtype == "float32" { 4 } else { 2 };
        let bytes = |elements: usize| (elements * element) as u64;
        let layers: Vec<u64> = (0..self.layers).map(|layer| bytes(self.layer(layer))).collect();
        let moe_layers: Vec<usize> = (self.first_moe_layer..self.layers).collect();
        let expert_bytes = bytes(self.mlp(self.mlp.width));
        let outside_bytes = bytes(self.outside());
        let experts = (moe_layers.len() * self.mlp.experts) as u64 * expert_bytes;
        Inspection {
            fingerprint: name.to_owned(),
            family: self.family.to_owned(),
            dtype: self.dtype.to_owned(),
            layers: self.layers,
            experts: self.mlp.experts,
            top_k: self.mlp.top_k,
            shared_experts: self.mlp.shared,
            hidden_size: self.hidden,
            vocab_size: self.vocabulary,
            context_length: self.context,
            expert_bytes,
            total_bytes: outside_bytes + layers.iter().sum::<u64>() + experts,
            non_expert_layer_bytes: layers,
            outside_bytes,
            kv_bytes_per_token: bytes(self.layers * self.cache()),
            token_bytes: bytes(self.hidden),
            moe_layers,
        }
    }
}
