//! Facts about layers that the engine needs, independent of the model family.
//!
//! The `Debug` output of these types is hashed into the fingerprint of a checkpoint ([`crate::Fingerprint`]): renaming a
//! struct, field or variant changes all fingerprints.

/// Element type of stored weights.
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

    /// Returns the name in config files and in `remoe inspect`: `float32`, `bfloat16`, `float16`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// Parses the name of config files.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        // Very old configs have names such as torch.float32.
        match name.strip_prefix("torch.").unwrap_or(name) {
            "float32" => Some(Self::F32),
            "bfloat16" => Some(Self::Bf16),
            "float16" => Some(Self::F16),
            _ => None,
        }
    }

    /// Parses the name of safetensors headers.
    pub(crate) fn from_header(name: &str) -> Option<Self> {
        match name {
            "F32" => Some(Self::F32),
            "BF16" => Some(Self::Bf16),
            "F16" => Some(Self::F16),
            _ => None,
        }
    }
}

/// Quantisation of routed experts in memory: integers with a 2-byte scale for every 32 weights of a row, or fp8 as stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertsDtype {
    /// 8 bits a weight, 8.5 with the scales.
    Int8,
    /// 4 bits a weight, 4.5 with the scales.
    Int4,
    /// The OCP MX format MXFP4: 4 bits a weight, 4.5 with the scales. Weights stored as MXFP4 keep their value, others are rounded.
    Mxfp4,
    /// fp8 e4m3 with block scales, only for checkpoints that store it: 8.25 bits a weight. Results have the same bits as
    /// with decoded weights.
    Fp8,
}

/// Invalid name of an [`ExpertsDtype`].
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

    /// Reports if weights, and so results, differ from those of the decoded checkpoint.
    #[must_use]
    pub fn quantises(self) -> bool {
        self != Self::Fp8
    }

    /// Returns the bytes of `weights` weights with their scales.
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

/// Type of weights outside of routed experts: embedding, attention, dense layers, shared experts and head. Learned
/// positions, routers and norms are always kept in the compute dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DenseDtype {
    /// Quantised like [`ExpertsDtype::Int8`].
    Int8,
    /// Quantised like [`ExpertsDtype::Int4`].
    Int4,
    /// Not quantised, with compute dtype bfloat16.
    Bfloat16,
    /// Not quantised, with compute dtype float32.
    Float32,
}

/// Invalid name of a [`DenseDtype`].
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

    /// Returns the quantisation of dense weights of a main function on `device`, if any. Without a `requested` type it is
    /// int8 if `experts` are quantised and the device is a CPU. GPUs compute with unquantised dense weights.
    #[must_use]
    pub fn quantised(requested: Option<Self>, experts: Option<ExpertsDtype>, device: &str) -> Option<Self> {
        match requested {
            Some(Self::Int8 | Self::Int4) => requested,
            Some(Self::Bfloat16 | Self::Float32) => None,
            None => {
                Some(Self::Int8).filter(|_| experts.is_some_and(ExpertsDtype::quantises) && device == "cpu")
            }
        }
    }

    /// Returns the equivalent quantisation of experts, if any.
    #[must_use]
    pub fn of_experts(self) -> Option<ExpertsDtype> {
        match self {
            Self::Int8 => Some(ExpertsDtype::Int8),
            Self::Int4 => Some(ExpertsDtype::Int4),
            Self::Bfloat16 | Self::Float32 => None,
        }
    }

    /// Deserialises the quantisation of dense weights: a name, or `true` for int8, as earlier versions wrote it.
    ///
    /// # Errors
    /// The value is neither a name nor a boolean.
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

/// Format of a main function's KV cache, if it is not the compute dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvCacheDtype {
    /// 8-bit integers with a bfloat16 scale for each 64 elements of a head at one position.
    Int8,
}

/// Invalid name of a [`KvCacheDtype`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected int8, got `{0}`; leave it out for the compute dtype")]
pub struct KvCacheDtypeError(String);

impl KvCacheDtype {
    /// Returns the name of the format.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
        }
    }

    /// Returns the bytes of `elements` cached elements with `scales` scales.
    #[must_use]
    pub fn bytes(self, elements: u64, scales: u64) -> u64 {
        match self {
            Self::Int8 => elements.saturating_add(scales.saturating_mul(2)),
        }
    }

    /// Returns the number of scales of `heads` heads with `dim` elements each, at one position.
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

/// Activation function of the gate projection, or of the up projection if there is no gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, torch's `gelu(approximate="tanh")`.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// Clamped SwiGLU of gpt-oss: gate and up projection clamped at 7, `gate * sigmoid(1.702 gate) * (up + 1)`.
    ClampedSwiglu,
}

impl Activation {
    /// Returns the name of config files.
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

/// Kind of the norms before attention, MLP and head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// RMS norm, rounded to the compute dtype before the product with the weights.
    Rms,
    /// RMS norm, rounded after the product with the weights.
    RmsInFloat32,
    /// Layer norm with weights and biases, rounded once.
    Layer,
}

/// A decoder layer: attention, then MLP, each with a norm before it and a residual connection.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerFacts {
    /// Attention of the layer.
    pub attention: AttentionFacts,
    /// MLP of the layer: dense, or routed experts.
    pub mlp: MlpFacts,
}

/// Kind and sizes of a layer's attention.
#[derive(Debug, Clone, PartialEq)]
pub enum AttentionFacts {
    /// Multi-head, grouped-query or multi-query attention.
    Gqa(GqaFacts),
    /// Multi-head latent attention.
    Mla(MlaFacts),
}

impl AttentionFacts {
    /// Returns the number of query heads.
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

    /// Returns the positions of the sliding window, the token's own included, if there is one.
    #[must_use]
    pub fn window(&self) -> Option<usize> {
        match self {
            Self::Gqa(facts) => facts.window,
            Self::Mla(_) => None,
        }
    }

    /// Returns the number of scales that one token adds to an int8 KV cache.
    #[must_use]
    pub fn cache_scales(&self) -> usize {
        match self {
            Self::Gqa(facts) => 2 * KvCacheDtype::Int8.scales(facts.kv_heads, facts.head_dim),
            Self::Mla(facts) => KvCacheDtype::Int8.scales(1, facts.kv_rank + facts.rope_dim),
        }
    }

    /// Returns the elements that one token adds to the KV cache: keys and values, or the latent and the rotated part.
    #[must_use]
    pub fn cache_elements(&self) -> usize {
        match self {
            Self::Gqa(facts) => 2 * facts.kv_heads * facts.head_dim,
            Self::Mla(facts) => facts.kv_rank + facts.rope_dim,
        }
    }
}

/// Grouped-query attention. Query head h reads KV head h / (`heads` / `kv_heads`).
#[derive(Debug, Clone, PartialEq)]
pub struct GqaFacts {
    /// Query heads.
    pub heads: usize,
    /// KV heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Elements of a head; an even number if they are rotated.
    pub head_dim: usize,
    /// Set if the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Set if the output projection has a bias.
    pub o_bias: bool,
    /// RMS norm of queries and keys, with the model's epsilon, after the projection and before clipping and rotation.
    pub qk_norm: Option<QkNorm>,
    /// Bound to which magnitudes of queries, keys and values are clamped, after the norm and before the rotation.
    pub clip: Option<f64>,
    /// Positions of the sliding window: the token itself and `window` - 1 before it.
    pub window: Option<usize>,
    /// Set if each head has an attention sink: an additional score, with a value of zero.
    pub sinks: bool,
    /// Factor of the scores before the softmax.
    pub softmax_scale: f64,
}

/// Elements over which queries and keys are normalised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// All heads together (OLMoE).
    Row,
    /// Each head separately, all with the same weights (Qwen3).
    Head,
}

impl GqaFacts {
    /// Returns attention without biases, norms, clipping, window or sinks. Scores are multiplied by 1 / sqrt(`head_dim`).
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
    /// Query heads.
    pub heads: usize,
    /// Rank of the query's latent; `None` if queries are projected directly.
    pub q_rank: Option<usize>,
    /// Rank of the latent of keys and values.
    pub kv_rank: usize,
    /// Elements of a head's query and key that are not rotated; they come first.
    pub nope_dim: usize,
    /// Elements of a head's query that are rotated. All heads share the rotated part of the key.
    pub rope_dim: usize,
    /// Elements of a head's value.
    pub value_dim: usize,
    /// Set if the projections to the latents and the output projection have a bias.
    pub bias: bool,
    /// Epsilon of the norms of the latents, which differs from the model's.
    pub latent_norm_eps: f64,
    /// Factor of the scores before the softmax, yarn's correction included.
    pub softmax_scale: f64,
}

/// Kind and sizes of a layer's MLP.
#[derive(Debug, Clone, PartialEq)]
pub enum MlpFacts {
    /// A dense, gated MLP.
    Dense {
        /// Intermediate size.
        width: usize,
    },
    /// Routed experts, with or without shared ones.
    Moe(MoeFacts),
}

/// Experts of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeFacts {
    /// Number of routed experts.
    pub experts: usize,
    /// Number of routed experts per token.
    pub top_k: usize,
    /// Intermediate size of a routed expert.
    pub expert_width: usize,
    /// Set if a routed expert has a gate projection: `down(act(gate(x)) * up(x))`, else `down(act(up(x)))`.
    pub gated: bool,
    /// Projections of a routed expert that have biases.
    pub biases: ExpertBiases,
    /// Set if the layer adds a bias once to the sum of the chosen experts.
    pub output_bias: bool,
    /// Rule by which a token's experts are chosen and weighted.
    pub routing: RoutingFacts,
    /// Shared experts, which every token uses.
    pub shared: Option<SharedFacts>,
}

impl MoeFacts {
    /// Returns gated experts without biases, weighted by a softmax, without shared experts.
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

/// Projections of an expert that have biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertBiases {
    /// No projection.
    None,
    /// All but the down projection.
    Inner,
    /// All projections.
    All,
}

/// Rule by which router logits select experts and their weights.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutingFacts {
    /// Function that turns logits into scores.
    pub score: Score,
    /// Set if the router has a bias.
    pub bias: bool,
    /// Set if the router computes its logits in float32, from float32 copies of hidden states and weights. Otherwise
    /// logits are computed in the compute dtype, and only scores are float32.
    pub logits_in_float32: bool,
    /// Set if a correction for each expert, a tensor of the router, is added to the scores that select experts. Weights
    /// are computed from the scores without it.
    pub corrected: bool,
    /// Set if the scores of the chosen experts are divided by their sum.
    pub normalise: bool,
    /// Factor of the scores of the chosen experts, after normalisation.
    pub scale: f64,
    /// Group-limited choice, if the model uses it.
    pub groups: Option<GroupFacts>,
    /// Set if weights are rounded to the compute dtype before they multiply the experts' outputs. Otherwise they stay
    /// float32.
    pub weights_in_compute_dtype: bool,
}

impl RoutingFacts {
    /// Softmax over all experts. Scores are not normalised, but rounded to the compute dtype.
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
    /// Softmax over the experts with the largest logits, in float32.
    SoftmaxOfChosen,
    /// Sigmoid of each logit, in float32.
    Sigmoid,
    /// Weight 1 for each of the experts with the largest logits.
    Unweighted,
    /// Inference of Sparsemixer (arXiv 2409.12136): the two largest logits are chosen one after the other. Each is weighted
    /// by a softmax over the logits that are at most 2 `jitter` times the larger of the two magnitudes below it.
    SparseMixer {
        /// `router_jitter_noise` of the config.
        jitter: f64,
    },
}

/// Group-limited choice: experts are divided into `groups` ranges of equal length. Only experts of the best `chosen` groups
/// are candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupFacts {
    /// Number of groups, a divisor of the number of experts.
    pub groups: usize,
    /// Number of groups that a token may use.
    pub chosen: usize,
    /// Number of best experts whose scores sum to a group's score.
    pub best: usize,
}

/// Shared experts, stored as one gated MLP.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedFacts {
    /// Number of shared experts in the config.
    pub count: usize,
    /// Intermediate size of all shared experts together.
    pub width: usize,
    /// Set if the output is multiplied by the sigmoid of a gate's logit, one for each token.
    pub gated: bool,
}
