//! `config.json` as facts.

use serde_json::Value;

use crate::error::CheckpointError;
use crate::facts::{Activation, AttentionFacts};
use crate::facts::{LayerFacts, MlpFacts, MoeFacts, NormKind, StoredDtype};
use crate::family::Family;
use crate::fields::{Fields, SIZE_LIMIT};
use crate::rope::{RopeFacts, RopeScaling};

/// More layers than any model has, and few enough to describe each.
const LAYER_LIMIT: usize = 4096;

/// A model as its `config.json` describes it, the defaults of transformers 5.17 filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family, which fixes tensor names and the routing rule.
    pub family: Family,
    /// Element type of the weights at rest, but for those in a shorter form, which become this when they are
    /// read; where the config does not say, the checkpoint's tensors do (float32 for a config without tensors).
    pub dtype: StoredDtype,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Elements of a token's hidden state.
    pub hidden_size: usize,
    /// Epsilon of the norms, float32 arithmetic, before the square root.
    pub norm_eps: f64,
    /// Set if the head is the embedding.
    pub tie_embeddings: bool,
    /// Positions that the model was made for: those that its config states, scaled where its rope is.
    pub context_length: usize,
    /// Positions that its config states.
    pub stated_positions: usize,
    /// Activation of experts, shared experts and dense layers.
    pub activation: Activation,
    /// The norms outside of attention.
    pub norm: NormKind,
    /// Set if the head has a bias.
    pub head_bias: bool,
    /// Factors of hidden states and logits.
    pub multipliers: Multipliers,
    /// The decoder layers; a layer's id is its index.
    pub layers: Vec<LayerFacts>,
    /// Rotary position embedding. `None`: positions are learned, each has a row that is added to the embedding's.
    pub rope: Option<RopeFacts>,
    /// First token of a text, if the model has one.
    pub bos_id: Option<u32>,
    /// Tokens that end a text; only those inside the vocabulary.
    pub eos_ids: Vec<u32>,
}

/// Factors beside the weights, 1 in most families (Granite has others).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Multipliers {
    /// Factor of the embedding's rows.
    pub embedding: f64,
    /// Factor of the outputs of attention and feed-forward part, which are added to the hidden state.
    pub residual: f64,
    /// Logits are divided by it.
    pub logits_divisor: f64,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self { embedding: 1.0, residual: 1.0, logits_divisor: 1.0 }
    }
}

impl ModelConfig {
    /// Positions that are served: those for which the rotation's frequencies are the same however long the
    /// text is. All of [`Self::context_length`] for most kinds of rope.
    #[must_use]
    pub fn served_context(&self) -> usize {
        match self.rope.as_ref().map(|rope| &rope.scaling) {
            Some(RopeScaling::Long { original, .. }) => self.context_length.min(*original),
            _ => self.context_length,
        }
    }

    /// Returns the same model for texts of `positions`: shorter ones than it serves, or longer ones than those of
    /// longrope's training, up to those that the model was made for. The latter have the rotation for long texts at
    /// every position, from the first one on.
    ///
    /// # Errors
    /// A message if `positions` is 0 or more than the model was made for.
    pub(crate) fn for_positions(self, positions: usize) -> Result<Self, String> {
        let (most, served) = (self.context_length, self.served_context());
        if positions == 0 || positions > most {
            return Err(format!("expected --max-model-len of 1 to {most}, got {positions}"));
        }
        if positions <= served {
            return Ok(Self { context_length: positions, ..self });
        }
        let long = self.rope.as_ref().and_then(|rope| rope.for_long_texts(positions));
        Ok(Self { context_length: positions, rope: long, ..self })
    }

    /// Ids of the layers that have routed experts, ascending.
    #[must_use]
    pub fn moe_layers(&self) -> Vec<usize> {
        (0..self.layers.len()).filter(|layer| self.moe(*layer).is_some()).collect()
    }

    /// The experts of a layer, if it has routed ones.
    #[must_use]
    pub fn moe(&self, layer: usize) -> Option<&MoeFacts> {
        match &self.layers.get(layer)?.mlp {
            MlpFacts::Moe(facts) => Some(facts),
            MlpFacts::Dense { .. } => None,
        }
    }

    /// The experts of the first layer that has routed ones; all such layers have the same sizes.
    #[must_use]
    pub fn any_moe(&self) -> Option<&MoeFacts> {
        (0..self.layers.len()).find_map(|layer| self.moe(layer))
    }
}

/// The fields that all families share, read once.
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

/// Names of the fields of sizes.
pub(crate) struct FieldNames {
    pub(crate) layers: &'static str,
    pub(crate) heads: &'static str,
    pub(crate) hidden_size: &'static str,
    pub(crate) context_length: &'static str,
    pub(crate) norm_eps: &'static str,
}

/// Their names in most families.
const USUAL_FIELDS: FieldNames = FieldNames {
    layers: "num_hidden_layers",
    heads: "num_attention_heads",
    hidden_size: "hidden_size",
    context_length: "max_position_embeddings",
    norm_eps: "rms_norm_eps",
};

impl<'a> CommonConfig<'a> {
    pub(crate) fn read(fields: Fields<'a>, defaults: &'static Defaults) -> Result<Self, CheckpointError> {
        Self::read_named(fields, defaults, &USUAL_FIELDS)
    }

    /// As [`Self::read`], for a family whose fields have other names.
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

    /// Key and value heads; null means one per query head.
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

    /// Elements per head: `head_dim` where given, else hidden size over heads.
    pub(crate) fn head_dim(&self) -> Result<usize, CheckpointError> {
        let (name, head_dim) = match self.fields.optional_size("head_dim")? {
            Some(given) => ("head_dim", given),
            None => ("num_attention_heads", self.even_heads()?),
        };
        if head_dim % 2 != 0 {
            return Err(self
                .fields
                .error(name, format!("gives heads of {head_dim} elements; rotation needs an even number")));
        }
        Ok(head_dim)
    }

    /// Hidden size over heads, where it comes out even.
    pub(crate) fn even_heads(&self) -> Result<usize, CheckpointError> {
        if !self.hidden_size.is_multiple_of(self.heads) {
            let (name, of) = (self.names.heads, self.names.hidden_size);
            let message = format!("is {}, which does not divide {of} ({})", self.heads, self.hidden_size);
            return Err(self.fields.error(name, message));
        }
        Ok(self.hidden_size / self.heads)
    }

    /// Which layers attend to a window only, where the config lists them.
    pub(crate) fn layer_types(&self) -> Result<Option<Vec<bool>>, CheckpointError> {
        let fields = self.fields;
        let Some(types) = fields.list("layer_types")? else { return Ok(None) };
        self.one_for_each_layer(types)?;
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

    /// Refuses `layer_types` of another length than the model has layers.
    pub(crate) fn one_for_each_layer(&self, types: &[Value]) -> Result<(), CheckpointError> {
        if types.len() == self.layers {
            return Ok(());
        }
        let message = format!("has {} entries for {} layers", types.len(), self.layers);
        Err(self.fields.error("layer_types", message))
    }

    /// Experts, in the first of the fields `names` that is there, and experts per token, checked against each other.
    /// The latter have to be said where there is no default.
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

    /// Positions that `rope` reaches.
    fn reach(&self, rope: Option<&RopeFacts>) -> Result<usize, CheckpointError> {
        let Some(rope) = rope else { return Ok(self.context_length) };
        let reach = rope.reach(self.context_length).floor();
        if !(1.0..=SIZE_LIMIT as f64).contains(&reach) {
            let message = format!("gives a context of {reach} positions, expected 1 to {SIZE_LIMIT}");
            return Err(self.fields.error("rope_scaling.factor", message));
        }
        Ok(reach as usize)
    }

    pub(crate) fn finish(
        self,
        family: Family,
        layers: Vec<LayerFacts>,
        rope: impl Into<Option<RopeFacts>>,
    ) -> Result<ModelConfig, CheckpointError> {
        let (fields, defaults) = (self.fields, self.defaults);
        let norm_eps = fields.number(self.names.norm_eps, defaults.norm_eps)?;
        // A mean square is about 1: more would drown it.
        if !(0.0..=1.0).contains(&norm_eps) {
            return Err(fields.error(self.names.norm_eps, format!("is {norm_eps}, expected 0 to 1")));
        }
        for other in ["rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"] {
            fields.agree_on(self.names.norm_eps, norm_eps, other)?;
        }
        let token = |name: &str, default: Option<u32>| {
            let mut ids = fields.token_ids(name, self.vocab_size)?;
            // Absent is the default, null is none.
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
            context_length: self.reach(rope.as_ref())?,
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

/// `dtype`, or `torch_dtype` as it was called before; "auto" and null say nothing.
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
        // gelu_new is the same formula, but rounded after every step in bfloat16: not the same bits.
        Some(other) => Err(fields.unsupported(
            "hidden_act",
            format!("activation `{other}`; supported are silu, gelu_pytorch_tanh and relu"),
        )),
    }
}
