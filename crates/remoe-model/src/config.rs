//! The model configuration, and the fields of `config.json` that all families share.

use serde_json::Value;

use crate::error::CheckpointError;
use crate::facts::{Activation, AttentionFacts};
use crate::facts::{LayerFacts, MlpFacts, MoeFacts, NormKind, StoredDtype};
use crate::family::Family;
use crate::fields::{Fields, SIZE_LIMIT};
use crate::rope::{RopeFacts, RopeScaling};

/// Upper bound of the number of layers, above that of any model.
const LAYER_LIMIT: usize = 4096;

/// A model as its `config.json` describes it, the defaults of transformers 5.17 filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Family, which determines tensor names and the routing rule.
    pub family: Family,
    /// Element type of stored weights; quantised weights are decoded to it. If the config does not declare it, it is the
    /// type of the checkpoint's tensors (float32 for a config without tensors).
    pub dtype: StoredDtype,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Elements of a token's hidden state.
    pub hidden_size: usize,
    /// Epsilon of the norms, added in float32 before the square root.
    pub norm_eps: f64,
    /// Set if the head is the embedding.
    pub tie_embeddings: bool,
    /// Positions that the model supports: those that its config states, scaled by its rope type.
    pub context_length: usize,
    /// Positions that the config states, before rope scaling.
    pub stated_positions: usize,
    /// Activation of experts, shared experts and dense layers.
    pub activation: Activation,
    /// Kind of the norms outside of attention.
    pub norm: NormKind,
    /// Set if the head has a bias.
    pub head_bias: bool,
    /// Constant factors of hidden states and logits.
    pub multipliers: Multipliers,
    /// Decoder layers, indexed by layer id.
    pub layers: Vec<LayerFacts>,
    /// Rotary position embedding. `None` if positions are learned: their rows are added to those of the embedding.
    pub rope: Option<RopeFacts>,
    /// First token of a text, if the model has one.
    pub bos_id: Option<u32>,
    /// Tokens that end a text, restricted to the vocabulary.
    pub eos_ids: Vec<u32>,
}

/// Constant factors besides the weights. They are 1 in most families, but not in Granite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Multipliers {
    /// Factor of the embedding's rows.
    pub embedding: f64,
    /// Factor of the outputs of attention and MLP before they are added to the hidden state.
    pub residual: f64,
    /// Divisor of the logits.
    pub logits_divisor: f64,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self { embedding: 1.0, residual: 1.0, logits_divisor: 1.0 }
    }
}

impl ModelConfig {
    /// Returns the number of positions that are served by default. For most rope types these are all of
    /// [`Self::context_length`]. With longrope, whose frequencies depend on the text's length, it is the original context.
    #[must_use]
    pub fn served_context(&self) -> usize {
        match self.rope.as_ref().map(|rope| &rope.scaling) {
            Some(RopeScaling::Long { original, .. }) => self.context_length.min(*original),
            _ => self.context_length,
        }
    }

    /// Returns the same model with a context of `positions`. Beyond the original context of longrope, the factors for
    /// long texts apply at every position.
    ///
    /// # Errors
    /// A message if `positions` is 0 or more than the model supports.
    pub(crate) fn for_positions(self, positions: usize) -> Result<Self, String> {
        let (max, served) = (self.context_length, self.served_context());
        if positions == 0 || positions > max {
            return Err(format!("expected --max-model-len of 1 to {max}, got {positions}"));
        }
        if positions <= served {
            return Ok(Self { context_length: positions, ..self });
        }
        let long_rope = self.rope.as_ref().and_then(|rope| rope.for_long_texts(positions));
        Ok(Self { context_length: positions, rope: long_rope, ..self })
    }

    /// Returns the ids of the layers with routed experts, ascending.
    #[must_use]
    pub fn moe_layers(&self) -> Vec<usize> {
        (0..self.layers.len()).filter(|layer| self.moe(*layer).is_some()).collect()
    }

    /// Returns the experts of a layer, if it has routed experts.
    #[must_use]
    pub fn moe(&self, layer: usize) -> Option<&MoeFacts> {
        match &self.layers.get(layer)?.mlp {
            MlpFacts::Moe(facts) => Some(facts),
            MlpFacts::Dense { .. } => None,
        }
    }

    /// Returns the experts of the first layer with routed experts. All such layers have the same sizes.
    #[must_use]
    pub fn any_moe(&self) -> Option<&MoeFacts> {
        (0..self.layers.len()).find_map(|layer| self.moe(layer))
    }
}

/// Fields of `config.json` that all families share.
pub(crate) struct CommonConfig<'a> {
    pub(crate) fields: Fields<'a>,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) hidden_size: usize,
    pub(crate) context_length: usize,
    defaults: &'static Defaults,
    names: &'static FieldNames,
    vocab_size: usize,
    dtype: StoredDtype,
    activation: Activation,
    tie_embeddings: bool,
}

/// Values that transformers assumes for absent fields.
pub(crate) struct Defaults {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) context_length: usize,
    pub(crate) norm_eps: f64,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
}

/// Names of the fields that state sizes.
pub(crate) struct FieldNames {
    pub(crate) layers: &'static str,
    pub(crate) heads: &'static str,
    pub(crate) hidden_size: &'static str,
    pub(crate) context_length: &'static str,
    pub(crate) norm_eps: &'static str,
}

/// Names of the size fields in most families.
const USUAL_FIELDS: FieldNames = FieldNames {
    layers: "num_hidden_layers",
    heads: "num_attention_heads",
    hidden_size: "hidden_size",
    context_length: "max_position_embeddings",
    norm_eps: "rms_norm_eps",
};

impl<'a> CommonConfig<'a> {
    /// Reads the fields, under the names of most families.
    pub(crate) fn read(fields: Fields<'a>, defaults: &'static Defaults) -> Result<Self, CheckpointError> {
        Self::read_named(fields, defaults, &USUAL_FIELDS)
    }

    /// Reads the fields like [`Self::read`], for a family with other field names.
    pub(crate) fn read_named(
        fields: Fields<'a>,
        defaults: &'static Defaults,
        names: &'static FieldNames,
    ) -> Result<Self, CheckpointError> {
        let layers = fields.size(names.layers, defaults.layers)?;
        if layers > LAYER_LIMIT {
            return Err(fields.error(names.layers, format!("is {layers}, expected at most {LAYER_LIMIT}")));
        }
        Ok(Self {
            fields,
            defaults,
            names,
            layers,
            heads: fields.size(names.heads, defaults.heads)?,
            hidden_size: fields.size(names.hidden_size, defaults.hidden_size)?,
            context_length: fields.size(names.context_length, defaults.context_length)?,
            vocab_size: fields.size("vocab_size", defaults.vocab_size)?,
            dtype: declared_dtype(&fields)?.unwrap_or(StoredDtype::F32),
            activation: activation(&fields)?,
            tie_embeddings: fields.flag("tie_word_embeddings", false)?,
        })
    }

    /// Returns the number of KV heads. Null means one for each query head.
    pub(crate) fn kv_heads(&self, default: usize) -> Result<usize, CheckpointError> {
        let name = "num_key_value_heads";
        let kv_heads = match self.fields.optional_size(name)? {
            Some(given) => given,
            None if self.fields.is_null(name) => self.heads,
            None => default,
        };
        if !self.heads.is_multiple_of(kv_heads) {
            return Err(self.fields.error(
                name,
                format!("is {kv_heads}, which does not divide num_attention_heads ({})", self.heads),
            ));
        }
        Ok(kv_heads)
    }

    /// Returns the elements of a head: `head_dim` if it is given, else hidden size / heads.
    pub(crate) fn head_dim(&self) -> Result<usize, CheckpointError> {
        let (name, head_dim) = match self.fields.optional_size("head_dim")? {
            Some(given) => ("head_dim", given),
            None => ("num_attention_heads", self.hidden_per_head()?),
        };
        if head_dim % 2 != 0 {
            return Err(self
                .fields
                .error(name, format!("gives heads of {head_dim} elements; rotation needs an even number")));
        }
        Ok(head_dim)
    }

    /// Returns hidden size / heads, which must be an integer.
    pub(crate) fn hidden_per_head(&self) -> Result<usize, CheckpointError> {
        if !self.hidden_size.is_multiple_of(self.heads) {
            let (name, of) = (self.names.heads, self.names.hidden_size);
            let message = format!("is {}, which does not divide {of} ({})", self.heads, self.hidden_size);
            return Err(self.fields.error(name, message));
        }
        Ok(self.hidden_size / self.heads)
    }

    /// Returns for each layer if it has a sliding window, if the config lists `layer_types`.
    pub(crate) fn layer_types(&self) -> Result<Option<Vec<bool>>, CheckpointError> {
        let fields = self.fields;
        let Some(types) = fields.list("layer_types")? else { return Ok(None) };
        self.check_layer_types(types)?;
        let slides = |entry: &Value| match entry.as_str() {
            Some("full_attention") => Ok(false),
            Some("sliding_attention") => Ok(true),
            _ => Err(fields.unsupported(
                "layer_types",
                format!("{entry}; supported are full_attention and sliding_attention"),
            )),
        };
        types.iter().map(slides).collect::<Result<_, _>>().map(Some)
    }

    /// Checks that `layer_types` has one entry for each layer.
    pub(crate) fn check_layer_types(&self, types: &[Value]) -> Result<(), CheckpointError> {
        if types.len() == self.layers {
            return Ok(());
        }
        let message = format!("has {} entries for {} layers", types.len(), self.layers);
        Err(self.fields.error("layer_types", message))
    }

    /// Returns the number of experts and of experts per token. The former is read from the first existing field of the
    /// two names, the latter has a default only if `top_k` is given.
    pub(crate) fn experts(
        &self,
        [name, other]: [&'static str; 2],
        experts: usize,
        top_k: Option<usize>,
    ) -> Result<(usize, usize), CheckpointError> {
        const TOP_K: &str = "num_experts_per_tok";
        let fields = self.fields;
        let name = fields.either(name, other)?;
        let experts = fields.size(name, experts)?;
        for other in ["num_experts", "num_local_experts", "n_routed_experts"] {
            fields.agree_on(name, experts, other)?;
        }
        let top_k = match top_k {
            Some(default) => fields.size(TOP_K, default)?,
            None => fields.required_size(TOP_K)?,
        };
        for other in ["num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"] {
            fields.agree_on(TOP_K, top_k, other)?;
        }
        if top_k > experts {
            return Err(fields.error(TOP_K, format!("is {top_k}, more than {name} ({experts})")));
        }
        Ok((experts, top_k))
    }

    /// Returns the positions that the model supports after rope scaling.
    fn scaled_context(&self, rope: Option<&RopeFacts>) -> Result<usize, CheckpointError> {
        let Some(rope) = rope else { return Ok(self.context_length) };
        let positions = rope.scaled_context(self.context_length).floor();
        if !(1.0..=SIZE_LIMIT as f64).contains(&positions) {
            let message = format!("gives a context of {positions} positions, expected 1 to {SIZE_LIMIT}");
            return Err(self.fields.error("rope_scaling.factor", message));
        }
        Ok(positions as usize)
    }

    /// Completes the configuration with a family's layers and rope, and reads the remaining shared fields.
    pub(crate) fn finish(
        self,
        family: Family,
        layers: Vec<LayerFacts>,
        rope: impl Into<Option<RopeFacts>>,
    ) -> Result<ModelConfig, CheckpointError> {
        let (fields, defaults) = (self.fields, self.defaults);
        let norm_eps = fields.number(self.names.norm_eps, defaults.norm_eps)?;
        // A mean square is about 1: a larger epsilon would dominate it.
        if !(0.0..=1.0).contains(&norm_eps) {
            return Err(fields.error(self.names.norm_eps, format!("is {norm_eps}, expected 0 to 1")));
        }
        for other in ["rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"] {
            fields.agree_on(self.names.norm_eps, norm_eps, other)?;
        }
        let token = |name: &str, default: Option<u32>| {
            let mut ids = fields.token_ids(name, self.vocab_size)?;
            // An absent field means the default, null means no token.
            if fields.get(name).is_none() && !fields.is_null(name) {
                ids.extend(default.filter(|id| (*id as usize) < self.vocab_size));
            }
            Ok::<_, CheckpointError>(ids)
        };
        for layer in &layers {
            if let AttentionFacts::Gqa(facts) = &layer.attention
                && facts.window == Some(0)
            {
                return Err(fields.error("sliding_window", "is 0, expected at least 1"));
            }
        }
        let rope = rope.into();
        Ok(ModelConfig {
            family,
            dtype: self.dtype,
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            norm_eps,
            tie_embeddings: self.tie_embeddings,
            context_length: self.scaled_context(rope.as_ref())?,
            stated_positions: self.context_length,
            activation: self.activation,
            norm: NormKind::Rms,
            head_bias: false,
            multipliers: Multipliers::default(),
            layers,
            rope,
            bos_id: token("bos_token_id", defaults.bos)?.first().copied(),
            eos_ids: token("eos_token_id", defaults.eos)?,
        })
    }
}

/// Reads `dtype`, or its older name `torch_dtype`. Returns `None` for "auto", null and absent fields.
pub(crate) fn declared_dtype(fields: &Fields<'_>) -> Result<Option<StoredDtype>, CheckpointError> {
    fields.agree("dtype", "torch_dtype")?;
    let name = if fields.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match fields.text(name)? {
        None | Some("auto") => Ok(None),
        Some(text) => StoredDtype::from_name(text).map(Some).ok_or_else(|| {
            fields.unsupported(name, format!("`{text}`; supported are float32, bfloat16 and float16"))
        }),
    }
}

fn activation(fields: &Fields<'_>) -> Result<Activation, CheckpointError> {
    match fields.text("hidden_act")? {
        None | Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some("relu") => Ok(Activation::Relu),
        // gelu_new is the same formula, but rounds after every step in bfloat16, which gives other bits.
        Some(other) => Err(fields.unsupported(
            "hidden_act",
            format!("activation `{other}`; supported are silu, gelu_pytorch_tanh and relu"),
        )),
    }
}
