//! Facts about one layer that the engine must know, in the terms of no particular family.

/// Element type of the weights at rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoredDtype {
    /// IEEE single precision, 4 bytes.
    F32,
    /// bfloat16, 2 bytes.
    Bf16,
    /// IEEE half precision, 2 bytes.
    F16,
}

impl StoredDtype {
    /// Bytes per element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The name that config files and `remoe inspect` use: `float32`, `bfloat16`, `float16`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// The type of that config name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        // torch.float32 is how very old configs wrote it.
        match name.strip_prefix("torch.").unwrap_or(name) {
            "float32" => Some(Self::F32),
            "bfloat16" => Some(Self::Bf16),
            "float16" => Some(Self::F16),
            _ => None,
        }
    }

    /// The type of that safetensors name.
    pub(crate) fn from_header(name: &str) -> Option<Self> {
        match name {
            "F32" => Some(Self::F32),
            "BF16" => Some(Self::Bf16),
            "F16" => Some(Self::F16),
            _ => None,
        }
    }
}

/// Quantisation of routed experts at load time: integers with a scale of 2 bytes for every 32 weights of a row, or the
/// fp8 that they are stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertsDtype {
    /// 8 bits a weight, 8.5 with the scales.
    Int8,
    /// 4 bits a weight, 4.5 with the scales.
    Int4,
    /// The OCP MX format MXFP4, in as many bits: weights that are stored so are kept as they are, others rounded.
    Mxfp4,
    /// fp8 e4m3 with block scales, of checkpoints that store them so: 8.25 bits a weight. What is computed is what is
    /// computed of them decoded.
    Fp8,
}

/// A name that experts cannot be quantised to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected int8, int4, mxfp4 or fp8, got `{0}`; omit the flag to keep experts in the compute dtype")]
pub struct ExpertsDtypeError(String);

impl ExpertsDtype {
    const ALL: [Self; 4] = [Self::Int8, Self::Int4, Self::Mxfp4, Self::Fp8];

    /// Returns the name of the type.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Mxfp4 => "mxfp4",
            Self::Fp8 => "fp8",
        }
    }

    /// Reports if weights differ from the decoded checkpoint's, so that results differ, too.
    #[must_use]
    pub fn quantises(self) -> bool {
        self != Self::Fp8
    }

    /// Bytes of so many weights with their scales.
    #[must_use]
    pub fn bytes(self, weights: u64) -> u64 {
        let per_group = match self {
            Self::Int8 => 34,
            Self::Int4 | Self::Mxfp4 => 18,
            Self::Fp8 => 33,
        };
        weights.div_ceil(32).saturating_mul(per_group)
    }
}

impl std::str::FromStr for ExpertsDtype {
    type Err = ExpertsDtypeError;

    fn from_str(name: &str) -> Result<Self, ExpertsDtypeError> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| ExpertsDtypeError(name.to_owned()))
    }
}

/// Type of weights outside of routed experts: the embedding, attention, dense layers, shared experts and the head.
/// Learned positions, routers and norms are kept in the compute dtype, whatever this says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DenseDtype {
    /// Quantised like [`ExpertsDtype::Int8`].
    Int8,
    /// Quantised like [`ExpertsDtype::Int4`].
    Int4,
    /// As computed in bfloat16.
    Bfloat16,
    /// As computed in float32.
    Float32,
}

/// A name that dense weights cannot be kept as.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected int8, int4, bfloat16 or float32, got `{0}`")]
pub struct DenseDtypeError(String);

impl DenseDtype {
    /// Returns the name of the type.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Bfloat16 => "bfloat16",
            Self::Float32 => "float32",
        }
    }

    /// Returns the quantisation of dense weights, if any, where a main function computes on `device` and was `asked`
    /// for this: by default int8 where `experts` are quantised, but not on GPUs, which compute with plain ones.
    #[must_use]
    pub fn quantised(asked: Option<Self>, experts: Option<ExpertsDtype>, device: &str) -> Option<Self> {
        match asked {
            Some(Self::Int8 | Self::Int4) => asked,
            Some(Self::Bfloat16 | Self::Float32) => None,
            None => {
                Some(Self::Int8).filter(|_| experts.is_some_and(ExpertsDtype::quantises) && device == "cpu")
            }
        }
    }

    /// Returns the type of experts that are quantised in the same way.
    #[must_use]
    pub fn of_experts(self) -> Option<ExpertsDtype> {
        match self {
            Self::Int8 => Some(ExpertsDtype::Int8),
            Self::Int4 => Some(ExpertsDtype::Int4),
            Self::Bfloat16 | Self::Float32 => None,
        }
    }

    /// Reads what weights are quantised to, or `true`, which is what int8 was called while there was nothing else.
    ///
    /// # Errors
    /// It is neither.
    pub fn deserialize_quantised<'de, D: serde::Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Self>, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum Stated {
            Name(DenseDtype),
            IsInt8(bool),
        }
        Ok(match <Option<Stated> as serde::Deserialize>::deserialize(from)? {
            Some(Stated::Name(dtype)) => Some(dtype).filter(|dtype| dtype.of_experts().is_some()),
            Some(Stated::IsInt8(is_int8)) => is_int8.then_some(Self::Int8),
            None => None,
        })
    }
}

impl std::str::FromStr for DenseDtype {
    type Err = DenseDtypeError;

    fn from_str(name: &str) -> Result<Self, DenseDtypeError> {
        [Self::Int8, Self::Int4, Self::Bfloat16, Self::Float32]
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| DenseDtypeError(name.to_owned()))
    }
}

/// Form of the KV cache of a main function, where it is not the compute dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvCacheDtype {
    /// Integers with a bfloat16 scale for each head, position and 64 elements.
    Int8,
}

/// Invalid name of a form of the KV cache.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected int8, got `{0}`; leave it out for the compute dtype")]
pub struct KvCacheDtypeError(String);

impl KvCacheDtype {
    /// Returns the name of the form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
        }
    }

    /// Bytes of `elements` of the cache with `scales`.
    #[must_use]
    pub fn bytes(self, elements: u64, scales: u64) -> u64 {
        match self {
            Self::Int8 => elements.saturating_add(scales.saturating_mul(2)),
        }
    }

    /// Scales of keys and values of `heads` heads with `dim` elements each.
    #[must_use]
    pub fn scales(self, heads: usize, dim: usize) -> usize {
        match self {
            Self::Int8 => heads.saturating_mul(dim.div_ceil(64)),
        }
    }
}

impl std::str::FromStr for KvCacheDtype {
    type Err = KvCacheDtypeError;

    fn from_str(name: &str) -> Result<Self, KvCacheDtypeError> {
        match name {
            "int8" => Ok(Self::Int8),
            _ => Err(KvCacheDtypeError(name.to_owned())),
        }
    }
}

/// Activation between the gate projection and the product with the up projection, or behind the up projection where
/// there is no gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x * sigmoid(x).
    Silu,
    /// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), torch's `gelu(approximate="tanh")`.
    GeluTanh,
    /// max(x, 0).
    Relu,
    /// gpt-oss's: gate and up projection clamped at 7, gate * sigmoid(1.702 gate) * (up + 1).
    ClampedSwiglu,
}

impl Activation {
    /// The name that config files use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::GeluTanh => "gelu_pytorch_tanh",
            Self::Relu => "relu",
            Self::ClampedSwiglu => "clamped_swiglu",
        }
    }
}

/// Kind of the norms before attention, before the feed-forward part and before the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// Root mean square, rounded to the compute dtype before the product with the weights.
    Rms,
    /// Root mean square, rounded after the product with the weights.
    RmsInFloat32,
    /// Mean and variance, with weights and biases, rounded once.
    Layer,
}

/// One decoder layer: attention, then MLP, each behind a norm and a residual.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerFacts {
    /// The attention of the layer.
    pub attention: AttentionFacts,
    /// The feed-forward part of the layer.
    pub mlp: MlpFacts,
}

/// How a layer attends.
#[derive(Debug, Clone, PartialEq)]
pub enum AttentionFacts {
    /// Multi-head, grouped-query or multi-query attention.
    Gqa(GqaFacts),
    /// Multi-head latent attention.
    Mla(MlaFacts),
}

impl AttentionFacts {
    /// Query heads.
    #[must_use]
    pub fn heads(&self) -> usize {
        match self {
            Self::Gqa(facts) => facts.heads,
            Self::Mla(facts) => facts.heads,
        }
    }

    /// Returns the factor of the scores before the softmax.
    #[must_use]
    pub fn softmax_scale(&self) -> f64 {
        match self {
            Self::Gqa(facts) => facts.softmax_scale,
            Self::Mla(facts) => facts.softmax_scale,
        }
    }

    /// Positions that a token sees, itself included, where not all before it.
    #[must_use]
    pub fn window(&self) -> Option<usize> {
        match self {
            Self::Gqa(facts) => facts.window,
            Self::Mla(_) => None,
        }
    }

    /// Scales of an int8 cache that one token adds.
    #[must_use]
    pub fn cache_scales(&self) -> usize {
        match self {
            Self::Gqa(facts) => 2 * KvCacheDtype::Int8.scales(facts.kv_heads, facts.head_dim),
            Self::Mla(facts) => KvCacheDtype::Int8.scales(1, facts.kv_rank + facts.rope_dim),
        }
    }

    /// Elements that the cache keeps per token: keys and values, or the latent and the rotated part.
    #[must_use]
    pub fn cache_elements(&self) -> usize {
        match self {
            Self::Gqa(facts) => 2 * facts.kv_heads * facts.head_dim,
            Self::Mla(facts) => facts.kv_rank + facts.rope_dim,
        }
    }
}

/// Grouped-query attention. Query head h reads key and value head h / (heads / `kv_heads`).
#[derive(Debug, Clone, PartialEq)]
pub struct GqaFacts {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Elements per head, even where they are rotated.
    pub head_dim: usize,
    /// Set if the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Set if the output projection has a bias.
    pub o_bias: bool,
    /// The RMS norm that queries and keys pass, with the model's epsilon, after the projection and
    /// before clipping and rotation.
    pub qk_norm: Option<QkNorm>,
    /// Queries, keys and values are clamped to [-clip, clip], after the norm, before the rotation.
    pub clip: Option<f64>,
    /// A query at position p sees keys at positions above p - window: itself and window - 1 before.
    pub window: Option<usize>,
    /// Set if each head has a sink: a score beside those of the positions, whose value is zero.
    pub sinks: bool,
    /// Factor of the scores before the softmax.
    pub softmax_scale: f64,
}

/// Elements over which a norm of queries and keys is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// The whole row, all heads together (OLMoE).
    Row,
    /// Each head by itself, all with the same weights (Qwen3).
    Head,
}

impl GqaFacts {
    /// Without anything that only some families have; scores are multiplied with 1 / sqrt(`head_dim`).
    pub(crate) fn plain(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self {
            heads,
            kv_heads,
            head_dim,
            qkv_bias: false,
            o_bias: false,
            qk_norm: None,
            clip: None,
            window: None,
            sinks: false,
            softmax_scale: (head_dim as f64).powf(-0.5),
        }
    }
}

/// Multi-head latent attention (DeepSeek-V2 and V3).
#[derive(Debug, Clone, PartialEq)]
pub struct MlaFacts {
    /// Heads.
    pub heads: usize,
    /// Rank of the query's latent; `None` where queries are projected directly.
    pub q_rank: Option<usize>,
    /// Rank of the latent of keys and values.
    pub kv_rank: usize,
    /// Elements of a head's query and key that are not rotated; they come first.
    pub nope_dim: usize,
    /// Elements of a head's query that are rotated; the rotated key is shared by all heads.
    pub rope_dim: usize,
    /// Elements of a head's value.
    pub value_dim: usize,
    /// Set if the projections to the latents and the output projection have a bias.
    pub bias: bool,
    /// Epsilon of the norms of the latents, which is not the model's.
    pub latent_norm_eps: f64,
    /// Factor of the scores before the softmax, yarn's correction included.
    pub softmax_scale: f64,
}

/// The feed-forward part of a layer.
#[derive(Debug, Clone, PartialEq)]
pub enum MlpFacts {
    /// One gated MLP.
    Dense {
        /// Intermediate size.
        width: usize,
    },
    /// Routed experts, with shared ones or not.
    Moe(MoeFacts),
}

/// A layer's experts.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeFacts {
    /// Routed experts.
    pub experts: usize,
    /// Routed experts per token.
    pub top_k: usize,
    /// Intermediate size of a routed expert.
    pub expert_width: usize,
    /// Set if a routed expert has a gate projection: down(act(gate(x)) * up(x)), else it is down(act(up(x))).
    pub gated: bool,
    /// Which projections of a routed expert have biases.
    pub biases: ExpertBiases,
    /// Set if the layer adds a bias to the sum of its experts: once, whichever were chosen.
    pub output_bias: bool,
    /// How a token chooses its experts.
    pub routing: RoutingFacts,
    /// The part that every token passes.
    pub shared: Option<SharedFacts>,
}

impl MoeFacts {
    /// Without anything that only some families have: gated experts without biases, weighed by a softmax.
    pub(crate) fn plain(experts: usize, top_k: usize, expert_width: usize) -> Self {
        Self {
            experts,
            top_k,
            expert_width,
            gated: true,
            biases: ExpertBiases::None,
            output_bias: false,
            routing: RoutingFacts::SOFTMAX,
            shared: None,
        }
    }
}

/// Which projections of an expert have biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertBiases {
    /// No projection.
    None,
    /// Projections before the activation, not the down projection.
    Inner,
    /// All of them.
    All,
}

/// How router logits become experts and weights.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutingFacts {
    /// Function that turns logits into scores.
    pub score: Score,
    /// Set if the router has a bias.
    pub bias: bool,
    /// Set if the router's product itself is made in float32, from float32 copies of hidden states and weight;
    /// otherwise it is made in the compute dtype and only the scores are float32.
    pub logits_in_float32: bool,
    /// Set if a correction per expert, a tensor of the router, is added to the scores for the choice. The weights are
    /// made of the scores without it.
    pub corrected: bool,
    /// Set if the chosen scores are divided by their sum.
    pub normalise: bool,
    /// Factor of the chosen scores, after normalisation.
    pub scale: f64,
    /// Limits the choice to the experts of some groups.
    pub groups: Option<GroupFacts>,
    /// Set if the weights are rounded to the compute dtype before they multiply the experts' outputs (otherwise they
    /// stay float32).
    pub weights_in_compute_dtype: bool,
}

impl RoutingFacts {
    /// Softmax over all experts, the best as they are, rounded; nothing that only some families have.
    pub(crate) const SOFTMAX: Self = Self {
        score: Score::Softmax,
        bias: false,
        logits_in_float32: false,
        corrected: false,
        normalise: false,
        scale: 1.0,
        groups: None,
        weights_in_compute_dtype: true,
    };
}

/// Function that turns router logits into scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Score {
    /// Softmax over all experts, in float32.
    Softmax,
    /// Softmax over the chosen experts, which are those of the largest logits, in float32.
    SoftmaxOfChosen,
    /// The sigmoid of each, in float32.
    Sigmoid,
    /// Nothing: the experts of the largest logits count with 1 each, whatever their logits are.
    Unweighted,
    /// Sparsemixer (arXiv 2409.12136) as it is in inference: the two largest logits one after the other,
    /// each weighed by a softmax over those that are not further below it than 2 `jitter` times the
    /// larger of it and of their own size.
    SparseMixer {
        /// `router_jitter_noise`.
        jitter: f64,
    },
}

/// Group-limited choice: experts are cut into `groups` runs of equal length, only experts of the best
/// `chosen` groups can be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupFacts {
    /// Number of groups, a divisor of the number of experts.
    pub groups: usize,
    /// Groups that a token may use.
    pub chosen: usize,
    /// A group's score is the sum of its so many best experts' scores.
    pub best: usize,
}

/// Shared experts, one gated MLP for all of them.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedFacts {
    /// Shared experts as the config counts them.
    pub count: usize,
    /// Intermediate size of all of them together.
    pub width: usize,
    /// Set if the output is multiplied by sigmoid of a gate's logit (one per token).
    pub gated: bool,
}
