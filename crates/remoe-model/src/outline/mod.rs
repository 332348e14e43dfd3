//! Sizes of a model, computed from its configuration alone, without weights.
//!
//! An [`Outline`] counts the elements of a model's parts and knows how they are stored. So memory needs are known before
//! anything is downloaded, even for families that the engine does not run. [`Outline::open_in`] reads an outline from a
//! `config.json`; an outline of a model without a published config can be written by hand.

mod read;
mod weights;

use crate::facts::KvCacheDtype;
use crate::inspection::Inspection;
use crate::kv_pages::{CachedLayer, WindowedLayers};
pub use weights::Weights;

/// The facts of a configuration that determine sizes. Counts are of elements unless stated otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outline {
    /// `model_type`.
    pub family: String,
    /// Dtype: `float32`, `bfloat16` or `float16`. It is the type of keys, values and hidden states, and of weights that are
    /// not quantised.
    pub dtype: String,
    /// Storage format of the weights.
    pub weights: Weights,
    /// Elements of a hidden state.
    pub hidden: usize,
    /// Rows of the embedding.
    pub vocabulary: usize,
    /// Positions that the model supports.
    pub context: usize,
    /// Positions that are served by default; see [`crate::ModelConfig::served_context`].
    pub served_context: usize,
    /// Rows of the learned position embedding; 0 without one.
    pub learned_positions: usize,
    /// Set if the head is the embedding.
    pub tied: bool,
    /// Set if the norms before attention, before the MLP and before the head have biases.
    pub norm_biases: bool,
    /// Set if the head has a bias.
    pub head_bias: bool,
    /// Layers, in order.
    pub layers: Vec<LayerOutline>,
}

/// Sizes of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerOutline {
    /// Attention of the layer.
    pub attention: AttentionOutline,
    /// Positions of the sliding window, the token's own included, if there is one.
    pub window: Option<usize>,
    /// MLP of the layer: dense, or routed experts.
    pub mlp: MlpOutline,
}

/// Kind and sizes of a layer's attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttentionOutline {
    /// Grouped-query attention; with one group for each head, multi-head attention.
    Grouped {
        /// Query heads.
        heads: usize,
        /// KV heads.
        groups: usize,
        /// Elements of a head.
        width: usize,
        /// Elements besides the four matrices: biases, norms of queries and keys, sinks.
        besides: usize,
    },
    /// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
    Latent {
        /// Heads.
        heads: usize,
        /// `q_lora_rank`, if queries have a latent, too.
        query_rank: Option<usize>,
        /// `kv_lora_rank`.
        rank: usize,
        /// `qk_nope_head_dim`.
        plain: usize,
        /// `qk_rope_head_dim`.
        rotary: usize,
        /// `v_head_dim`.
        value: usize,
        /// Elements of biases.
        biases: usize,
    },
}

/// Kind and sizes of a layer's MLP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MlpOutline {
    /// A dense MLP.
    Dense {
        /// Number of matrices: 3 with a gate, 2 without.
        matrices: usize,
        /// Intermediate size.
        width: usize,
    },
    /// Routed experts.
    Experts(ExpertsOutline),
}

/// Sizes of a layer's experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertsOutline {
    /// Number of routed experts.
    pub experts: usize,
    /// Number of routed experts per token.
    pub top_k: usize,
    /// Number of matrices of an expert: 3 with a gate, 2 without.
    pub matrices: usize,
    /// Intermediate size of a routed expert.
    pub width: usize,
    /// Elements of one expert's biases.
    pub biases: usize,
    /// Elements of the router besides its matrix.
    pub router_biases: usize,
    /// Elements of the bias that is added to the sum of the experts.
    pub output_biases: usize,
    /// Elements of the correction of the router's choice, which is always float32.
    pub corrections: usize,
    /// Number of shared experts.
    pub shared: usize,
    /// Intermediate size of all shared experts together.
    pub shared_width: usize,
    /// Set if shared experts have a gate.
    pub shared_gate: bool,
}

/// Elements of a part of a model, by how they are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Elements {
    /// Elements of matrices, which may be quantised.
    matrices: u128,
    /// Elements that are always float32.
    float32: u128,
    /// Elements that are always in the dtype.
    rest: u128,
}

impl std::ops::Add for Elements {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            matrices: self.matrices + other.matrices,
            float32: self.float32 + other.float32,
            rest: self.rest + other.rest,
        }
    }
}

impl Elements {
    fn all(self) -> u128 {
        self.matrices + self.float32 + self.rest
    }
}

fn product(factors: &[usize]) -> u128 {
    // Factors are bounded when they are read, so that no product exceeds 128 bits.
    factors.iter().fold(1, |product, factor| product.saturating_mul(*factor as u128))
}

impl AttentionOutline {
    fn elements(&self, hidden: usize) -> Elements {
        match *self {
            Self::Grouped { heads, groups, width, besides } => Elements {
                matrices: 2 * product(&[hidden, heads, width]) + 2 * product(&[hidden, groups, width]),
                rest: besides as u128,
                ..Elements::default()
            },
            Self::Latent { heads, query_rank, rank, plain, rotary, value, biases } => {
                let queries = product(&[heads, plain + rotary]);
                let (from_hidden, norm) = match query_rank {
                    None => (product(&[hidden]) * queries, 0),
                    Some(query) => (product(&[hidden, query]) + queries * query as u128, query),
                };
                Elements {
                    matrices: from_hidden
                        + product(&[hidden, rank + rotary])
                        + product(&[rank, heads, plain + value])
                        + product(&[heads, value, hidden]),
                    rest: (norm + rank + biases) as u128,
                    ..Elements::default()
                }
            }
        }
    }

    /// Returns the elements that one token adds to the KV cache.
    fn cache_elements(&self) -> u128 {
        match *self {
            Self::Grouped { groups, width, .. } => 2 * product(&[groups, width]),
            Self::Latent { rank, rotary, .. } => (rank + rotary) as u128,
        }
    }

    /// Returns the number of scales that one token adds to an int8 KV cache.
    fn cache_scales(&self) -> u128 {
        match *self {
            Self::Grouped { groups, width, .. } => 2 * KvCacheDtype::Int8.scales(groups, width) as u128,
            Self::Latent { rank, rotary, .. } => KvCacheDtype::Int8.scales(1, rank + rotary) as u128,
        }
    }
}

impl ExpertsOutline {
    /// Returns the elements of one routed expert.
    fn expert(&self, hidden: usize) -> Elements {
        Elements {
            matrices: product(&[self.matrices, hidden, self.width]),
            rest: self.biases as u128,
            ..Elements::default()
        }
    }

    /// Returns the elements of router and shared experts. Routers are never quantised.
    fn non_routed(&self, hidden: usize) -> Elements {
        let gate = if self.shared_gate { hidden } else { 0 };
        Elements {
            matrices: product(&[self.matrices, hidden, self.shared_width]),
            float32: self.corrections as u128,
            rest: product(&[hidden, self.experts]) + (self.router_biases + self.output_biases + gate) as u128,
        }
    }
}

impl Outline {
    /// Returns the same model with all weights in `dtype` (`float32` or `bfloat16`), not quantised.
    #[must_use]
    pub fn in_dtype(&self, dtype: &str) -> Self {
        Self { dtype: dtype.to_owned(), weights: Weights::Plain, ..self.clone() }
    }

    /// Returns the number of parameters: the elements of all weights.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        let layers = self.layers.iter().map(|layer| {
            let experts = layer
                .experts()
                .map_or(0, |experts| experts.expert(self.hidden).all() * experts.experts as u128);
            self.non_expert(layer).all() + experts
        });
        saturated(self.outside() + layers.sum::<u128>())
    }

    /// Returns the number of active parameters, with which one token is multiplied: without unused experts, and without
    /// the embedding, which is looked up.
    #[must_use]
    pub fn active_parameters(&self) -> u64 {
        let layers = self.layers.iter().map(|layer| {
            let experts = layer
                .experts()
                .map_or(0, |experts| experts.expert(self.hidden).all() * experts.top_k as u128);
            self.non_expert(layer).all() + experts
        });
        saturated(product(&[self.vocabulary, self.hidden]) + layers.sum::<u128>())
    }

    /// Returns the parameters of one routed expert; 0 without experts.
    #[must_use]
    pub fn expert_parameters(&self) -> u64 {
        saturated(self.experts().map_or(0, |experts| experts.expert(self.hidden).all()))
    }

    /// Returns the inspection of a checkpoint with this outline. `name` takes the place of the fingerprint, since there are
    /// no weights. If weights are quantised, `dtype` is the name of their format.
    #[must_use]
    pub fn inspection(&self, name: &str) -> Inspection {
        let element = self.element_bytes();
        let layers: Vec<u64> = self
            .layers
            .iter()
            .map(|layer| saturated(self.weights.bytes(self.non_expert(layer), element)))
            .collect();
        let moe_layers: Vec<usize> =
            (0..self.layers.len()).filter(|layer| self.layers[*layer].experts().is_some()).collect();
        let experts = self.experts();
        let expert_bytes = saturated(
            experts.map_or(0, |experts| self.weights.expert_bytes(experts.expert(self.hidden), element)),
        );
        let outside_bytes = saturated(self.outside() * element);
        let count = experts.map_or(0, |experts| experts.experts);
        let routed = product(&[moe_layers.len(), count]) * u128::from(expert_bytes);
        let rest: u128 = layers.iter().map(|bytes| u128::from(*bytes)).sum();
        let cache_elements: u128 = self.layers.iter().map(|layer| layer.attention.cache_elements()).sum();
        Inspection {
            fingerprint: name.to_owned(),
            family: self.family.clone(),
            dtype: self.weights.name(&self.dtype).to_owned(),
            stored_as: None,
            experts_dtype: None,
            dense_dtype: None,
            kv_cache_dtype: None,
            layers: self.layers.len(),
            experts: count,
            top_k: experts.map_or(0, |experts| experts.top_k),
            shared_experts: experts.map_or(0, |experts| experts.shared),
            hidden_size: self.hidden,
            vocab_size: self.vocabulary,
            context_length: self.context,
            served_context: Some(self.served_context).filter(|served| *served < self.context),
            expert_bytes,
            total_bytes: saturated(u128::from(outside_bytes) + rest + routed),
            non_expert_layer_bytes: layers,
            outside_bytes,
            kv_bytes_per_token: saturated(cache_elements * element),
            kv_scales_per_token: saturated(
                self.layers.iter().map(|layer| layer.attention.cache_scales()).sum(),
            ),
            kv_windowed: WindowedLayers::of(
                &self.layers.iter().map(LayerOutline::cached).collect::<Vec<_>>(),
            ),
            token_bytes: saturated(self.hidden as u128 * element),
            moe_layers,
            ignored: None,
        }
    }

    /// Returns the experts of the first layer with routed experts. All such layers have the same sizes.
    fn experts(&self) -> Option<&ExpertsOutline> {
        self.layers.iter().find_map(LayerOutline::experts)
    }

    fn element_bytes(&self) -> u128 {
        if self.dtype == "float32" { 4 } else { 2 }
    }

    /// Returns the elements of a norm.
    fn norm(&self) -> u128 {
        product(&[self.hidden, if self.norm_biases { 2 } else { 1 }])
    }

    /// Returns the elements of a layer without its routed experts.
    fn non_expert(&self, layer: &LayerOutline) -> Elements {
        let mlp = match &layer.mlp {
            MlpOutline::Dense { matrices, width } => {
                Elements { matrices: product(&[*matrices, self.hidden, *width]), ..Elements::default() }
            }
            MlpOutline::Experts(experts) => experts.non_routed(self.hidden),
        };
        let norms = Elements { rest: 2 * self.norm(), ..Elements::default() };
        norms + layer.attention.elements(self.hidden) + mlp
    }

    /// Returns the elements of embeddings, final norm and head. Tied weights count once.
    fn outside(&self) -> u128 {
        let tables = if self.tied { 1 } else { 2 };
        let rows = tables * self.vocabulary + self.learned_positions;
        product(&[rows, self.hidden]) + self.norm() + if self.head_bias { self.vocabulary as u128 } else { 0 }
    }
}

impl LayerOutline {
    fn cached(&self) -> CachedLayer {
        let page_bytes = usize::try_from(self.attention.cache_elements()).unwrap_or(usize::MAX);
        CachedLayer { page_bytes, window: self.window }
    }

    fn experts(&self) -> Option<&ExpertsOutline> {
        match &self.mlp {
            MlpOutline::Experts(experts) => Some(experts),
            MlpOutline::Dense { .. } => None,
        }
    }
}

/// Converts a count to `u64`, or to its maximum.
fn saturated(count: u128) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
