//! Reads an outline from a `config.json`.

use std::path::Path;

use serde_json::{Map, Value};

use super::{AttentionOutline, ExpertsOutline, LayerOutline, MlpOutline, Outline, Weights};
use crate::config::{ModelConfig, declared_dtype};
use crate::error::CheckpointError;
use crate::facts::{AttentionFacts, ExpertBiases, LayerFacts, MlpFacts, NormKind, QkNorm, StoredDtype};
use crate::fields::Fields;
use crate::json;
use crate::modelopt;
use crate::store::Store;

const CONFIG: &str = "config.json";
/// Upper bounds above those of any model, which keep all sums and lists small.
const MAX_EXPERTS: usize = 65_536;
const MAX_WIDTH: usize = 1 << 24;

impl Outline {
    /// Reads the `config.json` in `store`. With `dtype`, weights are counted in that type; otherwise as they are stored,
    /// according to `quantization_config` or `hf_quant_config.json`.
    ///
    /// # Errors
    /// There is no config, its family or quantisation is not supported, or a field is missing, invalid or out of bounds.
    pub fn open_in(store: &dyn Store, dtype: Option<&str>) -> Result<Self, CheckpointError> {
        let path = store.root().join(CONFIG);
        match json::object_if_present(store, CONFIG)? {
            Some(object) => {
                let outline = Self::from_object(&path, object, dtype)?;
                if dtype.is_none() {
                    modelopt::refuse(store)?;
                }
                Ok(outline)
            }
            None => Err(CheckpointError::MissingFile {
                path,
                message: "model sizes are read from config.json".to_owned(),
            }),
        }
    }

    /// Reads an outline like [`Self::open_in`], from the text of a `config.json`. `path` only appears in messages.
    ///
    /// # Errors
    /// Fails as [`Self::open_in`] does.
    pub fn from_json(path: &Path, text: &[u8], dtype: Option<&str>) -> Result<Self, CheckpointError> {
        Self::from_object(path, json::parse_object(path, text)?, dtype)
    }

    fn from_object(
        path: &Path,
        mut object: Map<String, Value>,
        dtype: Option<&str>,
    ) -> Result<Self, CheckpointError> {
        let weights = match dtype {
            Some(_) => Weights::Plain,
            None => Weights::read(Fields::new(path, &object))?,
        };
        // The quantisation has been read. Whether the engine supports it does not matter for an outline.
        object.remove("quantization_config");
        let fields = Fields::new(path, &object);
        let outline = Self::from_config(&ModelConfig::from_object(path, &object, None)?);
        outline.check(fields)?;
        // Quantised weights are computed in bfloat16 if the config declares no dtype.
        let is_undeclared = weights != Weights::Plain && declared_dtype(&fields)?.is_none();
        let default = if is_undeclared { StoredDtype::Bf16.name() } else { &outline.dtype };
        let dtype = dtype.unwrap_or(default).to_owned();
        Ok(Self { weights, dtype, ..outline })
    }

    fn from_config(config: &ModelConfig) -> Self {
        Self {
            family: config.family.name().to_owned(),
            dtype: config.dtype.name().to_owned(),
            weights: Weights::Plain,
            hidden: config.hidden_size,
            vocabulary: config.vocab_size,
            context: config.context_length,
            served_context: config.served_context(),
            learned_positions: if config.rope.is_none() { config.context_length } else { 0 },
            tied: config.tie_embeddings,
            norm_biases: config.norm == NormKind::Layer,
            head_bias: config.head_bias,
            layers: config.layers.iter().map(|layer| layer_outline(layer, config.hidden_size)).collect(),
        }
    }

    /// Checks that sizes are within bounds.
    fn check(&self, fields: Fields<'_>) -> Result<(), CheckpointError> {
        for (name, value) in [("hidden_size", self.hidden), ("vocab_size", self.vocabulary)] {
            check_at_most(fields, name, value, MAX_WIDTH)?;
        }
        let Some(experts) = self.experts() else {
            return Err(fields.unsupported("num_hidden_layers", "no layer has routed experts"));
        };
        check_at_most(fields, "num_experts_per_tok", experts.experts, MAX_EXPERTS)?;
        if experts.top_k > experts.experts {
            let message = format!("is {}, more than the {} experts", experts.top_k, experts.experts);
            return Err(fields.error("num_experts_per_tok", message));
        }
        if self.parameters() > 1 << 60 {
            return Err(fields.error("hidden_size", "makes a model of more than 10^18 parameters"));
        }
        Ok(())
    }
}

fn check_at_most(fields: Fields<'_>, name: &str, value: usize, max: usize) -> Result<(), CheckpointError> {
    match value <= max {
        true => Ok(()),
        false => Err(fields.error(name, format!("is {value}, expected at most {max}"))),
    }
}

/// Counts the elements of a layer.
fn layer_outline(layer: &LayerFacts, hidden: usize) -> LayerOutline {
    let attention = match &layer.attention {
        AttentionFacts::Gqa(facts) => {
            let (queries, keys) = (facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim);
            let if_set = |is_set: bool, elements: usize| if is_set { elements } else { 0 };
            AttentionOutline::Grouped {
                heads: facts.heads,
                groups: facts.kv_heads,
                width: facts.head_dim,
                besides: if_set(facts.qkv_bias, queries + 2 * keys)
                    + if_set(facts.o_bias, hidden)
                    + match facts.qk_norm {
                        None => 0,
                        Some(QkNorm::Row) => queries + keys,
                        Some(QkNorm::Head) => 2 * facts.head_dim,
                    }
                    + if_set(facts.sinks, facts.heads),
            }
        }
        AttentionFacts::Mla(facts) => AttentionOutline::Latent {
            heads: facts.heads,
            query_rank: facts.q_rank,
            rank: facts.kv_rank,
            plain: facts.nope_dim,
            rotary: facts.rope_dim,
            value: facts.value_dim,
            biases: if facts.bias {
                facts.q_rank.unwrap_or(0) + facts.kv_rank + facts.rope_dim + hidden
            } else {
                0
            },
        },
    };
    let mlp = match &layer.mlp {
        MlpFacts::Dense { width } => MlpOutline::Dense { matrices: 3, width: *width },
        MlpFacts::Moe(facts) => {
            let inner = if facts.gated { 2 } else { 1 };
            MlpOutline::Experts(ExpertsOutline {
                experts: facts.experts,
                top_k: facts.top_k,
                matrices: inner + 1,
                width: facts.expert_width,
                biases: match facts.biases {
                    ExpertBiases::None => 0,
                    ExpertBiases::Inner => inner * facts.expert_width,
                    ExpertBiases::All => inner * facts.expert_width + hidden,
                },
                router_biases: if facts.routing.bias { facts.experts } else { 0 },
                output_biases: if facts.output_bias { hidden } else { 0 },
                corrections: if facts.routing.corrected { facts.experts } else { 0 },
                shared: facts.shared.as_ref().map_or(0, |shared| shared.count),
                shared_width: facts.shared.as_ref().map_or(0, |shared| shared.width),
                shared_gate: facts.shared.as_ref().is_some_and(|shared| shared.gated),
            })
        }
    };
    LayerOutline { attention, window: layer.attention.window(), mlp }
}
