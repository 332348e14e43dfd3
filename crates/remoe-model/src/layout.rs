//! Finds all tensors of a model in the headers, and checks their shapes and types. Reads no weights.

mod ignored;
mod quantised;

pub use ignored::Ignored;

use std::cell::RefCell;
use std::collections::HashSet;
use std::path::Path;

use crate::config::ModelConfig;
use crate::error::CheckpointError;
use crate::facts::{
    AttentionFacts, ExpertBiases, GqaFacts, LayerFacts, MlaFacts, MlpFacts, MoeFacts, NormKind, QkNorm,
    StoredDtype,
};
use crate::families::{BlockNames, FusedLayout, TensorNames};
use crate::quantised_form::{Quantisation, QuantisedForm};
use crate::shards::{RawTensor, Shards};
use crate::tensors::{
    AttentionTensors, GqaTensors, Linear, MlaTensors, MlpTensors, NormTensors, QueryTensors, RouterTensors,
    SharedTensors, StoredAs, TensorRef,
};

const EMBEDDING: &str = "model.embed_tokens.weight";
const POSITIONS: &str = "model.embed_positions.weight";
const HEAD: &str = "lm_head.weight";
const HEAD_BIAS: &str = "lm_head.bias";

/// Tensors of a model.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) embedding: TensorRef,
    pub(crate) positions: Option<TensorRef>,
    pub(crate) final_norm: Linear,
    pub(crate) head: TensorRef,
    pub(crate) head_bias: Option<TensorRef>,
    pub(crate) layers: Vec<LayerTensors>,
    /// Tensors in the files that are ignored.
    pub(crate) ignored: Ignored,
}

/// Tensors of one layer.
#[derive(Debug)]
pub(crate) struct LayerTensors {
    pub(crate) norms: NormTensors,
    pub(crate) attention: AttentionTensors,
    pub(crate) mlp: LayerMlp,
}

/// Tensors of a layer's MLP.
#[expect(clippy::large_enum_variant, reason = "there is one per layer")]
#[derive(Debug)]
pub(crate) enum LayerMlp {
    Dense(MlpTensors),
    Moe {
        router: RouterTensors,
        shared: Option<SharedTensors>,
        bias: Option<TensorRef>,
        experts: ExpertsLayout,
    },
}

/// Layout of a layer's routed experts in tensors.
#[derive(Debug)]
pub(crate) enum ExpertsLayout {
    /// Each expert has its own tensors, as `save_pretrained` writes them.
    Separate(Vec<MlpTensors>),
    /// Two tensors for all experts, as transformers keeps them in memory: `[experts, 2 x width, hidden]`, with gate rows
    /// before up rows, and `[experts, hidden, width]`.
    Fused { gate_up: TensorRef, down: TensorRef, experts: usize, width: usize },
    /// Two transposed tensors with alternating gate and up columns, `[experts, hidden, 2 x width]` and
    /// `[experts, width, hidden]`. Their biases are `[experts, 2 x width]` and `[experts, hidden]`.
    InterleavedColumns { gate_up: Linear, down: Linear, experts: usize },
    /// As `InterleavedColumns`, but not transposed, with alternating gate and up rows. MXFP4 is stored in this way.
    InterleavedRows { gate_up: Linear, down: Linear, experts: usize },
}

impl ExpertsLayout {
    /// Returns the tensors of an expert.
    pub(crate) fn get(&self, expert: usize) -> Option<MlpTensors> {
        match self {
            Self::Separate(experts) => experts.get(expert).cloned(),
            Self::Fused { gate_up, down, experts, width } => (expert < *experts).then(|| MlpTensors {
                gate: Some(gate_up.rows_of(expert, 0, *width).into()),
                up: gate_up.rows_of(expert, *width, *width).into(),
                down: down.rows_of(expert, 0, down.shape.get(1).copied().unwrap_or(0)).into(),
            }),
            Self::InterleavedColumns { gate_up, down, experts } => {
                let part = |linear: &Linear, first, step| {
                    linear.map(
                        |w| w.every_column(expert, first, step),
                        |b| b.every_element(expert, first, step),
                    )
                };
                (expert < *experts).then(|| deinterleave(gate_up, down, part))
            }
            Self::InterleavedRows { gate_up, down, experts } => {
                let part = |linear: &Linear, first, step| {
                    linear.map(|w| w.every_row(expert, first, step), |b| b.every_element(expert, first, step))
                };
                (expert < *experts).then(|| deinterleave(gate_up, down, part))
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Separate(experts) => experts.len(),
            Self::Fused { experts, .. }
            | Self::InterleavedColumns { experts, .. }
            | Self::InterleavedRows { experts, .. } => *experts,
        }
    }
}

/// Returns an expert with interleaved gate and up outputs. `part` takes the first output and the step.
fn deinterleave(
    gate_up: &Linear,
    down: &Linear,
    part: impl Fn(&Linear, usize, usize) -> Linear,
) -> MlpTensors {
    MlpTensors { gate: Some(part(gate_up, 0, 2)), up: part(gate_up, 1, 2), down: part(down, 0, 1) }
}

impl Layout {
    /// Returns all tensors except routed experts.
    pub(crate) fn outside(&self) -> Vec<&TensorRef> {
        let ends = [&self.embedding, &self.head].into_iter().chain(&self.positions).chain(&self.head_bias);
        ends.chain(self.final_norm.tensors())
            .chain(self.layers.iter().flat_map(LayerTensors::outside))
            .collect()
    }
}

impl LayerTensors {
    /// Returns all tensors of the layer except routed experts.
    pub(crate) fn outside(&self) -> Vec<&TensorRef> {
        let mut tensors: Vec<_> = self.norms.attention.tensors().chain(self.norms.mlp.tensors()).collect();
        tensors.extend(self.attention.tensors());
        match &self.mlp {
            LayerMlp::Dense(mlp) => tensors.extend(mlp.tensors()),
            LayerMlp::Moe { router, shared, bias, .. } => {
                tensors.extend(router.tensors());
                tensors.extend(bias);
                if let Some(shared) = shared {
                    tensors.extend(shared.mlp.tensors());
                    tensors.extend(&shared.gate);
                }
            }
        }
        tensors
    }
}

/// Returns the element type of the embedding, or of the head if it takes its place, for configs without a dtype.
pub(crate) fn stored_dtype(shards: &Shards) -> Option<StoredDtype> {
    let tensor = shards.tensors.get(EMBEDDING).or_else(|| shards.tensors.get(HEAD))?;
    StoredDtype::from_header(tensor.dtype)
}

/// Finds all tensors of `config`, and refuses others. The model's layers may be followed by `extra_layers` multi-token
/// prediction layers, which are ignored.
pub(crate) fn resolve(
    config: &ModelConfig,
    extra_layers: usize,
    quantisation: Option<&Quantisation>,
    shards: &Shards,
) -> Result<Layout, CheckpointError> {
    let finder = TensorFinder {
        shards,
        quantisation,
        dtype: config.dtype,
        hidden: config.hidden_size,
        norm_bias: config.norm == NormKind::Layer,
        names: config.family.names(),
        used: RefCell::default(),
    };
    ignored::check_layer_count(config.layers.len(), extra_layers, shards)?;
    let table = [config.vocab_size, config.hidden_size];
    let (has_embedding, has_head) = (finder.has(EMBEDDING), finder.has(HEAD));
    // Tied weights may be stored under either name. If both are stored and differ, transformers does not tie them. Using
    // both tensors is right in either case.
    let (embedding, head) = if config.tie_embeddings && !has_head {
        (EMBEDDING, EMBEDDING)
    } else if config.tie_embeddings && !has_embedding {
        (HEAD, HEAD)
    } else {
        (EMBEDDING, HEAD)
    };
    let mut layout = Layout {
        embedding: finder.find(embedding, &table)?,
        positions: match config.rope {
            Some(_) => None,
            None => Some(finder.find(POSITIONS, &[config.context_length, config.hidden_size])?),
        },
        final_norm: finder.norm("model.norm")?,
        head: finder.find_weight(head, &table)?,
        head_bias: config.head_bias.then(|| finder.find(HEAD_BIAS, &table[..1])).transpose()?,
        layers: config
            .layers
            .iter()
            .enumerate()
            .map(|(id, facts)| finder.layer(id, facts))
            .collect::<Result<_, _>>()?,
        ignored: Ignored::default(),
    };
    layout.ignored = finder.ignored(config.layers.len())?;
    if quantisation.is_some() {
        finder.check_equal_expert_sizes(&layout)?;
    }
    Ok(layout)
}

/// Finds tensors in the headers by name, and checks them.
struct TensorFinder<'a> {
    /// Names of all tensors that were found, scales included.
    used: RefCell<HashSet<&'a str>>,
    shards: &'a Shards,
    quantisation: Option<&'a Quantisation>,
    dtype: StoredDtype,
    hidden: usize,
    norm_bias: bool,
    names: &'static TensorNames,
}

impl<'a> TensorFinder<'a> {
    fn has(&self, name: &str) -> bool {
        self.shards.tensors.contains_key(name)
    }

    /// Returns the error for a missing tensor.
    fn missing(&self, name: &str, shape: &[usize]) -> CheckpointError {
        CheckpointError::MissingTensor {
            path: self.shards.listing.clone(),
            tensor: name.to_owned(),
            message: format!("expected with shape {shape:?}"),
        }
    }

    /// Finds a tensor, which must have the given shape and the checkpoint's dtype.
    fn find(&self, name: &str, shape: &[usize]) -> Result<TensorRef, CheckpointError> {
        self.find_typed(name, shape, &[self.dtype])
    }

    /// Finds a tensor like [`Self::find`], which may also be float32.
    fn find_maybe_float32(&self, name: &str, shape: &[usize]) -> Result<TensorRef, CheckpointError> {
        self.find_typed(name, shape, &[self.dtype, StoredDtype::F32])
    }

    fn find_typed(
        &self,
        name: &str,
        shape: &[usize],
        types: &[StoredDtype],
    ) -> Result<TensorRef, CheckpointError> {
        let raw = self.raw(name, shape)?;
        match StoredDtype::from_header(raw.dtype) {
            Some(dtype) if types.contains(&dtype) => Ok(TensorRef {
                file: raw.file,
                name: raw.name.clone(),
                offset: raw.offset,
                bytes: raw.bytes,
                dtype,
                shape: shape.to_vec(),
                strides: None,
                stored: StoredAs::Plain,
            }),
            _ => Err(self.wrong(
                raw,
                format!(
                    "has dtype {}, expected {}, the dtype of config.json or of the embedding; all tensors must have the same dtype",
                    raw.dtype,
                    self.dtype.name()
                ),
            )),
        }
    }

    /// Finds a tensor of any type, which must have the given shape.
    fn raw(&self, name: &str, shape: &[usize]) -> Result<&'a RawTensor, CheckpointError> {
        let raw = self.shards.tensors.get(name).ok_or_else(|| self.missing(name, shape))?;
        self.used.borrow_mut().insert(&raw.name);
        match same_shape(raw, shape) {
            true => Ok(raw),
            false => {
                Err(self.wrong(raw, format!("has shape {:?}, expected {shape:?} by config.json", raw.shape)))
            }
        }
    }

    /// Returns the error for an invalid tensor.
    fn wrong(&self, raw: &RawTensor, message: String) -> CheckpointError {
        let path = self.shards.files.get(raw.file).map_or(Path::new("?"), |shard| &shard.path);
        CheckpointError::tensor(path, &raw.name, message)
    }

    fn layer(&self, id: usize, facts: &LayerFacts) -> Result<LayerTensors, CheckpointError> {
        let prefix = format!("model.layers.{id}");
        let norm = |name: &str| self.norm(&format!("{prefix}.{name}"));
        let attention = format!("{prefix}.self_attn");
        Ok(LayerTensors {
            norms: NormTensors {
                attention: norm("input_layernorm")?,
                mlp: norm("post_attention_layernorm")?,
            },
            attention: match &facts.attention {
                AttentionFacts::Gqa(facts) => AttentionTensors::Gqa(self.gqa(&attention, facts)?),
                AttentionFacts::Mla(facts) => AttentionTensors::Mla(self.mla(&attention, facts)?),
            },
            mlp: match &facts.mlp {
                // Dense layers have the same names in every family.
                MlpFacts::Dense { width } => LayerMlp::Dense(self.gated(&format!("{prefix}.mlp"), *width)?),
                MlpFacts::Moe(facts) => self.moe(&prefix, facts)?,
            },
        })
    }

    /// Finds the weight of a projection, which may be quantised, and its bias.
    fn linear(&self, name: &str, shape: &[usize], bias: bool) -> Result<Linear, CheckpointError> {
        let weight = self.find_weight(&format!("{name}.weight"), shape)?;
        Ok(Linear { weight, bias: self.bias(name, shape, bias)? })
    }

    fn bias(
        &self,
        name: &str,
        shape: &[usize],
        has_bias: bool,
    ) -> Result<Option<TensorRef>, CheckpointError> {
        has_bias.then(|| self.find(&format!("{name}.bias"), &shape[..1])).transpose()
    }

    /// Finds a projection like [`Self::linear`], with a weight that is never quantised.
    fn unquantised_linear(&self, name: &str, shape: &[usize], bias: bool) -> Result<Linear, CheckpointError> {
        let weight = self.find(&format!("{name}.weight"), shape)?;
        Ok(Linear { weight, bias: self.bias(name, shape, bias)? })
    }

    fn norm(&self, name: &str) -> Result<Linear, CheckpointError> {
        self.unquantised_linear(name, &[self.hidden], self.norm_bias)
    }

    fn gqa(&self, prefix: &str, facts: &GqaFacts) -> Result<GqaTensors, CheckpointError> {
        let (q, kv) = (facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim);
        let project = |name: &str, rows: usize| {
            self.linear(&format!("{prefix}.{name}"), &[rows, self.hidden], facts.qkv_bias)
        };
        let norm = |name: &str, row: usize| {
            let width = |over| if over == QkNorm::Row { row } else { facts.head_dim };
            let find = |over| self.find(&format!("{prefix}.{name}.weight"), &[width(over)]);
            facts.qk_norm.map(find).transpose()
        };
        Ok(GqaTensors {
            q: project("q_proj", q)?,
            k: project("k_proj", kv)?,
            v: project("v_proj", kv)?,
            o: self.linear(&format!("{prefix}.o_proj"), &[self.hidden, q], facts.o_bias)?,
            q_norm: norm("q_norm", q)?,
            k_norm: norm("k_norm", kv)?,
            sinks: facts.sinks.then(|| self.find(&format!("{prefix}.sinks"), &[facts.heads])).transpose()?,
        })
    }

    fn mla(&self, prefix: &str, facts: &MlaFacts) -> Result<MlaTensors, CheckpointError> {
        let query_rows = facts.heads * (facts.nope_dim + facts.rope_dim);
        let weight =
            |name: &str, shape: &[usize]| self.find_weight(&format!("{prefix}.{name}.weight"), shape);
        let norm = |name: &str, rank: usize| self.find(&format!("{prefix}.{name}.weight"), &[rank]);
        let query = match facts.q_rank {
            None => QueryTensors::Direct(weight("q_proj", &[query_rows, self.hidden])?),
            Some(rank) => QueryTensors::Latent {
                a: self.linear(&format!("{prefix}.q_a_proj"), &[rank, self.hidden], facts.bias)?,
                a_norm: norm("q_a_layernorm", rank)?,
                b: weight("q_b_proj", &[query_rows, rank])?,
            },
        };
        Ok(MlaTensors {
            query,
            kv_a: self.linear(
                &format!("{prefix}.kv_a_proj_with_mqa"),
                &[facts.kv_rank + facts.rope_dim, self.hidden],
                facts.bias,
            )?,
            kv_a_norm: norm("kv_a_layernorm", facts.kv_rank)?,
            kv_b: weight("kv_b_proj", &[facts.heads * (facts.nope_dim + facts.value_dim), facts.kv_rank])?,
            o: self.linear(
                &format!("{prefix}.o_proj"),
                &[self.hidden, facts.heads * facts.value_dim],
                facts.bias,
            )?,
        })
    }

    /// Finds the MLP of a dense layer or of shared experts, which have the same names in every family.
    fn gated(&self, prefix: &str, width: usize) -> Result<MlpTensors, CheckpointError> {
        let linear = |name: &str, shape: [usize; 2]| self.linear(&format!("{prefix}.{name}"), &shape, false);
        Ok(MlpTensors {
            gate: Some(linear("gate_proj", [width, self.hidden])?),
            up: linear("up_proj", [width, self.hidden])?,
            down: linear("down_proj", [self.hidden, width])?,
        })
    }

    /// Finds a routed expert with its own tensors.
    fn expert(&self, prefix: &str, facts: &MoeFacts) -> Result<MlpTensors, CheckpointError> {
        let (width, names) = (facts.expert_width, self.names);
        let linear =
            |name: &str, shape: [usize; 2], bias| self.linear(&format!("{prefix}.{name}"), &shape, bias);
        let inner = facts.biases != ExpertBiases::None;
        let gate = || linear(names.gate, [width, self.hidden], inner);
        Ok(MlpTensors {
            gate: facts.gated.then(gate).transpose()?,
            up: linear(names.up, [width, self.hidden], inner)?,
            down: linear(names.down, [self.hidden, width], facts.biases == ExpertBiases::All)?,
        })
    }

    fn moe(&self, prefix: &str, facts: &MoeFacts) -> Result<LayerMlp, CheckpointError> {
        // The router decides which of the possible names the block has. If it is missing, the error has the current name.
        let has_router =
            |names: &&BlockNames| self.has(&format!("{prefix}.{}.{}.weight", names.block, names.router));
        let names = self.names.blocks.iter().find(has_router).or(self.names.blocks.first());
        let Some(names) = names else { return Err(self.missing(&format!("{prefix}.experts"), &[])) };
        let block = format!("{prefix}.{}", names.block);
        let shared = facts
            .shared
            .as_ref()
            .map(|shared| {
                let gate_name = format!("{block}.{}.weight", self.names.shared_gate);
                Ok::<_, CheckpointError>(SharedTensors {
                    mlp: self.gated(&format!("{block}.{}", self.names.shared), shared.width)?,
                    gate: shared.gated.then(|| self.find(&gate_name, &[1, self.hidden])).transpose()?,
                })
            })
            .transpose()?;
        let router = format!("{block}.{}", names.router);
        let correction = format!("{router}.e_score_correction_bias");
        let correction =
            facts.routing.corrected.then(|| self.find_maybe_float32(&correction, &[facts.experts]));
        let router = RouterTensors {
            linear: self.unquantised_linear(&router, &[facts.experts, self.hidden], facts.routing.bias)?,
            correction: correction.transpose()?,
        };
        let bias = || self.find(&format!("{block}.bias"), &[self.hidden]);
        let bias = facts.output_bias.then(bias).transpose()?;
        Ok(LayerMlp::Moe { router, shared, bias, experts: self.experts(&block, names, facts)? })
    }

    fn experts(
        &self,
        block: &str,
        names: &BlockNames,
        facts: &MoeFacts,
    ) -> Result<ExpertsLayout, CheckpointError> {
        let gate_up = format!("{block}.{}", names.gate_up);
        let (experts, width) = (facts.experts, facts.expert_width);
        if names.fused == FusedLayout::Interleaved {
            let down = format!("{block}.{}", names.down);
            let mxfp4 = self.quantisation.is_some_and(|stored| stored.form == QuantisedForm::Mxfp4);
            if let Some(raw) = self.shards.tensors.get(&*format!("{gate_up}_blocks")).filter(|_| !mxfp4) {
                return Err(self.wrong(raw, self.undeclared("mxfp4")));
            }
            let with_bias = |name: &str, [inputs, outputs]: [usize; 2]| {
                let weight = match mxfp4 {
                    true => self.find_mxfp4(name, [experts, outputs, inputs])?,
                    false => self.find(name, &[experts, inputs, outputs])?,
                };
                let bias = || self.find(&format!("{name}_bias"), &[experts, outputs]);
                let all = facts.biases == ExpertBiases::All;
                Ok::<_, CheckpointError>(Linear { weight, bias: all.then(bias).transpose()? })
            };
            let gate_up = with_bias(&gate_up, [self.hidden, 2 * width])?;
            let down = with_bias(&down, [width, self.hidden])?;
            return Ok(match mxfp4 {
                true => ExpertsLayout::InterleavedRows { gate_up, down, experts },
                false => ExpertsLayout::InterleavedColumns { gate_up, down, experts },
            });
        }
        if facts.gated && self.has(&gate_up) {
            return Ok(ExpertsLayout::Fused {
                gate_up: self.find(&gate_up, &[experts, 2 * width, self.hidden])?,
                down: self.find(&format!("{block}.{}", names.down), &[experts, self.hidden, width])?,
                experts,
                width,
            });
        }
        (0..experts)
            .map(|expert| self.expert(&format!("{block}.experts.{expert}"), facts))
            .collect::<Result<_, _>>()
            .map(ExpertsLayout::Separate)
    }
}

fn same_shape(raw: &RawTensor, shape: &[usize]) -> bool {
    raw.shape.len() == shape.len()
        && raw.shape.iter().zip(shape).all(|(size, expected)| *size == *expected as u64)
}
