//! A model from its configuration alone, without weights: what its parts would take.
//!
//! An [`Outline`] counts elements and knows in which form they are stored. So the needs of a model can be computed
//! before anything of it is fetched, whether or not the engine runs its family. [`Outline::open_in`] reads one from a
//! `config.json`; shapes that are not published can be written down.

mod read;
mod weights;

use crate::facts::KvCacheDtype;
use crate::inspection::Inspection;
use crate::kv_pages::{CachedLayer, WindowedLayers};
pub use weights::Weights;

/// Facts of a configuration on which sizes depend. Counts are of elements unless said otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outline {
    /// `model_type`.
    pub family: String,
    /// Compute type: `float32`, `bfloat16` or `float16`. Keys, values and hidden states are in it, and weights that are
    /// stored in no shorter form.
    pub dtype: String,
    /// How weights are stored.
    pub weights: Weights,
    /// A hidden state.
    pub hidden: usize,
    /// Rows of the embedding.
    pub vocabulary: usize,
    /// Positions that the model was made for.
    pub context: usize,
    /// Positions that are served of them, see [`crate::ModelConfig::served_context`].
    pub served_context: usize,
    /// Rows of a learned position embedding; 0: there is none.
    pub learned_positions: usize,
    /// Set if the head is the embedding.
    pub tied: bool,
    /// Set if the norms before attention, before the MLP and before the head have biases.
    pub norm_biases: bool,
    /// Set if the head has a bias.
    pub head_bias: bool,
    /// The layers in order.
    pub layers: Vec<LayerOutline>,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerOutline {
    /// Keys, values and queries.
    pub attention: AttentionOutline,
    /// Positions that a token sees, itself included, where not all before it.
    pub window: Option<usize>,
    /// Feed-forward part.
    pub mlp: MlpOutline,
}

/// How a layer attends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttentionOutline {
    /// Keys and values for groups of heads; one group per head is plain multi-head attention.
    Grouped {
        /// Query heads.
        heads: usize,
        /// Key-value heads.
        groups: usize,
        /// Width of a head.
        width: usize,
        /// Elements besides the four matrices: biases, norms of queries and keys, sinks.
        besides: usize,
    },
    /// Keys and values from a latent vector (DeepSeek-V2, arXiv 2405.04434).
    Latent {
        /// Heads.
        heads: usize,
        /// `q_lora_rank`, where queries have a latent too.
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

/// Feed-forward part of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MlpOutline {
    /// One MLP for every token.
    Dense {
        /// Matrices: 3 with a gate, 2 without.
        matrices: usize,
        /// Width of the MLP.
        width: usize,
    },
    /// Routed experts.
    Experts(ExpertsOutline),
}

/// The experts of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertsOutline {
    /// Routed experts.
    pub experts: usize,
    /// Routed experts per token.
    pub top_k: usize,
    /// Matrices of one expert: 3 with a gate, 2 without.
    pub matrices: usize,
    /// Width of a routed expert.
    pub width: usize,
    /// Elements of one expert's biases.
    pub biases: usize,
    /// Elements of the router besides its matrix.
    pub router_biases: usize,
    /// Elements of what is added to what the experts give together.
    pub output_biases: usize,
    /// Elements of what corrects the router's choice, float32 in every form of weights.
    pub corrections: usize,
    /// Shared experts.
    pub shared: usize,
    /// Width of all shared experts together.
    pub shared_width: usize,
    /// Set if a gate weighs the shared experts.
    pub shared_gate: bool,
}

/// Elements of a part of a model: what is multiplied with, which short forms are for, what is float32
/// always, and the rest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Elements {
    matrices: u128,
    wide: u128,
    rest: u128,
}

impl std::ops::Add for Elements {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            matrices: self.matrices + other.matrices,
            wide: self.wide + other.wide,
            rest: self.rest + other.rest,
        }
    }
}

impl Elements {
    fn all(self) -> u128 {
        self.matrices + self.wide + self.rest
    }
}

fn product(factors: &[usize]) -> u128 {
    // The reader bounds every factor, so that no product comes near the end of 128 bits.
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

    /// Cached elements per token.
    fn cache(&self) -> u128 {
        match *self {
            Self::Grouped { groups, width, .. } => 2 * product(&[groups, width]),
            Self::Latent { rank, rotary, .. } => (rank + rotary) as u128,
        }
    }

    /// Scales of an int8 cache per token.
    fn scales(&self) -> u128 {
        match *self {
            Self::Grouped { groups, width, .. } => 2 * KvCacheDtype::Int8.scales(groups, width) as u128,
            Self::Latent { rank, rotary, .. } => KvCacheDtype::Int8.scales(1, rank + rotary) as u128,
        }
    }
}

impl ExpertsOutline {
    fn expert(&self, hidden: usize) -> Elements {
        Elements {
            matrices: product(&[self.matrices, hidden, self.width]),
            rest: self.biases as u128,
            ..Elements::default()
        }
    }

    /// Router and shared experts. Routers stay in the compute dtype in every form of weights.
    fn around(&self, hidden: usize) -> Elements {
        let gate = if self.shared_gate { hidden } else { 0 };
        Elements {
            matrices: product(&[self.matrices, hidden, self.shared_width]),
            wide: self.corrections as u128,
            rest: product(&[hidden, self.experts]) + (self.router_biases + self.output_biases + gate) as u128,
        }
    }
}

impl Outline {
    /// Returns the same model with all weights in `dtype` (`float32` or `bfloat16`), whatever they are stored in.
    #[must_use]
    pub fn in_dtype(&self, dtype: &str) -> Self {
        Self { dtype: dtype.to_owned(), weights: Weights::Plain, ..self.clone() }
    }

    /// Elements of all weights: the parameters that publishers count.
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

    /// Parameters that one token is multiplied with: those of the experts that it does not use left out, and
    /// of the embedding, which is looked up.
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

    /// Parameters of one routed expert; 0 without any.
    #[must_use]
    pub fn expert_parameters(&self) -> u64 {
        saturated(self.experts().map_or(0, |experts| experts.expert(self.hidden).all()))
    }

    /// The facts that a checkpoint of this outline would have. `name` stands for the fingerprint: there are no
    /// weights that one could be made of. Where weights are in a shorter form, `dtype` is its name.
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
        let cache: u128 = self.layers.iter().map(|layer| layer.attention.cache()).sum();
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
            kv_bytes_per_token: saturated(cache * element),
            kv_scales_per_token: saturated(self.layers.iter().map(|layer| layer.attention.scales()).sum()),
            kv_windowed: WindowedLayers::of(
                &self.layers.iter().map(LayerOutline::cached).collect::<Vec<_>>(),
            ),
            token_bytes: saturated(self.hidden as u128 * element),
            moe_layers,
            ignored: None,
        }
    }

    /// The experts of the first layer that has some; all such layers have the same.
    fn experts(&self) -> Option<&ExpertsOutline> {
        self.layers.iter().find_map(LayerOutline::experts)
    }

    fn element_bytes(&self) -> u128 {
        if self.dtype == "float32" { 4 } else { 2 }
    }

    fn norm(&self) -> u128 {
        product(&[self.hidden, if self.norm_biases { 2 } else { 1 }])
    }

    /// Everything in a layer but routed experts.
    fn non_expert(&self, layer: &LayerOutline) -> Elements {
        let mlp = match &layer.mlp {
            MlpOutline::Dense { matrices, width } => {
                Elements { matrices: product(&[*matrices, self.hidden, *width]), ..Elements::default() }
            }
            MlpOutline::Experts(experts) => experts.around(self.hidden),
        };
        let norms = Elements { rest: 2 * self.norm(), ..Elements::default() };
        norms + layer.attention.elements(self.hidden) + mlp
    }

    /// Embedding, last norm and head; tied weights once.
    fn outside(&self) -> u128 {
        let tables = if self.tied { 1 } else { 2 };
        let rows = tables * self.vocabulary + self.learned_positions;
        product(&[rows, self.hidden]) + self.norm() + if self.head_bias { self.vocabulary as u128 } else { 0 }
    }
}

impl LayerOutline {
    fn cached(&self) -> CachedLayer {
        let page_bytes = usize::try_from(self.attention.cache()).unwrap_or(usize::MAX);
        CachedLayer { page_bytes, window: self.window }
    }

    fn experts(&self) -> Option<&ExpertsOutline> {
        match &self.mlp {
            MlpOutline::Experts(experts) => Some(experts),
            MlpOutline::Dense { .. } => None,
        }
    }
}

fn saturated(count: u128) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
