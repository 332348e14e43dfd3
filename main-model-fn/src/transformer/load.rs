//! Loads the weights outside of routed experts from the checkpoint to the device.

use super::attention::{Attention, GroupedQueryAttention, LatentAttention};
use super::mlp::{Mlp, Moe, SharedContribution, SharedExperts};
use super::{Layer, Positions, Transformer};
use crate::backend::{Affine, Backend, DeferredWeights, LoadModelError, Router};
use crate::pages::assign_page_tables;
use crate::routing::RoutingRule;
use remoe_kernels::numerics::to_bf16;
use remoe_kernels::{AttentionShape, Dtype, NumericsClass};
use remoe_model::{
    AttentionFacts, AttentionTensors, Checkpoint, GqaFacts, GqaTensors, MlaFacts, MlaTensors, MlpFacts,
    MlpTensors, MoeFacts, NormKind, QueryTensors, TensorRef,
};
use remoe_weights::{in_parallel, load_floats};
use std::collections::BTreeMap;
use std::sync::Arc;

impl<B: Backend> Transformer<B> {
    /// Loads every tensor outside of the routed experts, with `threads` threads.
    ///
    /// # Errors
    /// Fails if the checkpoint cannot be read or the device has no memory left.
    pub(crate) fn load(
        checkpoint: &Arc<Checkpoint>,
        class: impl Into<NumericsClass>,
        ops: B,
        threads: usize,
    ) -> Result<Self, LoadModelError> {
        let class = class.into();
        checkpoint.prefetch(checkpoint.outside_tensors())?;
        let config = checkpoint.config();
        let loader = Loader { checkpoint, dtype: class.dtype, class, ops: &ops };
        let (table, weight) = (checkpoint.embedding(), checkpoint.head());
        // A tied embedding shares the head's matrix if the backend can use one format for both.
        let is_tied = table.name == weight.name;
        // The largest parts go first; a thread that finishes early continues with layers.
        let parts = in_parallel(2 + config.layers.len(), threads, LoadModelError::Panicked, |part| {
            Ok(match part.checked_sub(2) {
                Some(id) => ModelPart::Layer(Box::new(loader.layer(id)?)),
                None if part == 0 => {
                    let head = Affine { weight, bias: checkpoint.head_bias() };
                    ModelPart::Head(ops.load_linear(checkpoint, &[head], class, threads)?)
                }
                None if is_tied => ModelPart::Tied,
                None => ModelPart::Embedding(ops.load_embedding(checkpoint, table, class)?),
            })
        })?;
        let (mut heads, mut tables, mut layers) = (Vec::new(), Vec::new(), Vec::new());
        for part in parts {
            match part {
                ModelPart::Head(head) => heads.push(head),
                ModelPart::Embedding(table) => tables.push(table),
                ModelPart::Tied => (),
                ModelPart::Layer(layer) => layers.push(*layer),
            }
        }
        let (layers, shapes): (_, Vec<_>) = layers.into_iter().unzip();
        let (page_needs, paged_layers) = assign_page_tables(&shapes);
        let head = heads.pop().ok_or(LoadModelError::Inconsistent("the model has no head"))?;
        let tied = if is_tied { ops.tied_embedding(&head) } else { None };
        Ok(Self {
            hidden: config.hidden_size,
            vocab: weight.shape.first().copied().unwrap_or(0),
            positions: match (&config.rope, checkpoint.positions()) {
                (Some(rope), _) => Positions::Rotary(ops.rope(rope)?),
                (None, Some(table)) => {
                    Positions::Learned(ops.load_embedding(checkpoint, table, class.dtype.into())?)
                }
                (None, None) => return Err(LoadModelError::Inconsistent("learned positions have no table")),
            },
            norm: loader.norm(checkpoint.final_norm())?,
            tied: tied.is_some(),
            embedding: match tied.or(tables.pop()) {
                Some(table) => table,
                None => ops.load_embedding(checkpoint, table, class)?,
            },
            head,
            multipliers: config.multipliers,
            prefills: BTreeMap::new(),
            layers,
            pages: ops.new_pages(&paged_layers),
            page_needs,
            backend: ops,
        })
    }

    /// Returns the weights that may still have to be loaded while requests are answered.
    pub(crate) fn deferred_weights(&self) -> Vec<Arc<dyn DeferredWeights>> {
        let positions = match &self.positions {
            Positions::Rotary(_) => None,
            Positions::Learned(table) => Some(table),
        };
        std::iter::once(&self.embedding)
            .chain(positions)
            .filter_map(|table| self.backend.deferred_weights(table))
            .collect()
    }
}

/// Part of the model that one thread loads.
enum ModelPart<B: Backend> {
    Head(B::Linear),
    Embedding(B::Embedding),
    /// The head's matrix serves as embedding.
    Tied,
    Layer(Box<(Layer<B>, AttentionShape)>),
}

/// Loads single layers.
struct Loader<'a, B> {
    checkpoint: &'a Checkpoint,
    dtype: Dtype,
    /// Numerics of weights that may be quantised.
    class: NumericsClass,
    ops: &'a B,
}

impl<B: Backend> Loader<'_, B> {
    fn layer(&self, id: usize) -> Result<(Layer<B>, AttentionShape), LoadModelError> {
        let checkpoint = self.checkpoint;
        let facts =
            checkpoint.config().layers.get(id).ok_or(LoadModelError::Inconsistent("a layer has no facts"))?;
        let (attention, shape) = match (&facts.attention, checkpoint.attention(id)?) {
            (AttentionFacts::Gqa(facts), AttentionTensors::Gqa(tensors)) => self.gqa(facts, tensors)?,
            (AttentionFacts::Mla(facts), AttentionTensors::Mla(tensors)) => self.mla(facts, tensors)?,
            _ => return Err(LoadModelError::Inconsistent("attention facts and tensors differ in kind")),
        };
        let mlp = match &facts.mlp {
            MlpFacts::Dense { .. } => {
                let weights = checkpoint
                    .dense(id)?
                    .ok_or(LoadModelError::Inconsistent("a dense layer has no weights"))?;
                Mlp::Dense(self.gated(weights)?)
            }
            MlpFacts::Moe(facts) => Mlp::Moe(Box::new(self.moe(id, facts)?)),
        };
        let norms = checkpoint.norms(id)?;
        let layer = Layer {
            before_attention: self.norm(&norms.attention)?,
            attention,
            before_mlp: self.norm(&norms.mlp)?,
            mlp,
        };
        Ok((layer, shape))
    }

    /// Loads matrices without biases, stacked.
    fn linear_without_bias(
        &self,
        weights: &[&TensorRef],
        class: impl Into<NumericsClass>,
    ) -> Result<B::Linear, LoadModelError> {
        let parts: Vec<_> = weights.iter().map(|&weight| Affine { weight, bias: None }).collect();
        self.ops.load_linear(self.checkpoint, &parts, class.into(), 1)
    }

    /// Loads matrices with their biases, stacked.
    fn linear(&self, parts: &[&remoe_model::Linear]) -> Result<B::Linear, LoadModelError> {
        let parts: Vec<_> =
            parts.iter().map(|part| Affine { weight: &part.weight, bias: part.bias.as_ref() }).collect();
        self.ops.load_linear(self.checkpoint, &parts, self.class, 1)
    }

    /// Loads a layer's norm.
    fn norm(&self, norm: &remoe_model::Linear) -> Result<B::Norm, LoadModelError> {
        let config = self.checkpoint.config();
        let norm = Affine { weight: &norm.weight, bias: norm.bias.as_ref() };
        self.ops.load_norm(self.checkpoint, norm, config.norm, config.norm_eps)
    }

    /// Loads an RMS norm inside of attention.
    fn rms_norm(&self, weight: &TensorRef, epsilon: f64) -> Result<B::Norm, LoadModelError> {
        self.ops.load_norm(self.checkpoint, Affine { weight, bias: None }, NormKind::Rms, epsilon)
    }

    /// Loads grouped-query attention.
    fn gqa(
        &self,
        facts: &GqaFacts,
        tensors: &GqaTensors,
    ) -> Result<(Attention<B>, AttentionShape), LoadModelError> {
        let norms = match (&tensors.q_norm, &tensors.k_norm) {
            (Some(query), Some(key)) => {
                let epsilon = self.checkpoint.config().norm_eps;
                Some((self.rms_norm(query, epsilon)?, self.rms_norm(key, epsilon)?))
            }
            _ => None,
        };
        let attention = GroupedQueryAttention {
            projection: self.linear(&[&tensors.q, &tensors.k, &tensors.v])?,
            output: self.linear(&[&tensors.o])?,
            norms,
            clip: facts.clip,
            sinks: match &tensors.sinks {
                None => None,
                Some(sinks) => Some(self.ops.upload_vector(&load_floats(self.checkpoint, sinks)?)?),
            },
            heads: facts.heads,
            kv_heads: facts.kv_heads,
            head_dim: facts.head_dim,
        };
        let shape = AttentionShape {
            dtype: self.dtype,
            kv_heads: facts.kv_heads,
            group: facts.heads / facts.kv_heads,
            key_dim: facts.head_dim,
            value_dim: facts.head_dim,
            latent: false,
            scale: facts.softmax_scale,
            window: facts.window,
            cache: self.ops.cache_format(),
        };
        Ok((Attention::Grouped(attention), shape))
    }

    /// Loads latent attention.
    fn mla(
        &self,
        facts: &MlaFacts,
        tensors: &MlaTensors,
    ) -> Result<(Attention<B>, AttentionShape), LoadModelError> {
        let latent_norm = |weight: &TensorRef| self.rms_norm(weight, facts.latent_norm_eps);
        let (first, query) = match &tensors.query {
            QueryTensors::Direct(weight) => {
                (remoe_model::Linear { weight: weight.clone(), bias: None }, None)
            }
            QueryTensors::Latent { a, a_norm, b } => {
                (a.clone(), Some((latent_norm(a_norm)?, self.linear_without_bias(&[b], self.class)?)))
            }
        };
        let attention = LatentAttention {
            projection: self.linear(&[&first, &tensors.kv_a])?,
            query_dim: first.weight.shape.first().copied().unwrap_or(0),
            query,
            latent_norm: latent_norm(&tensors.kv_a_norm)?,
            up_projections: self.ops.load_up_projections(
                self.checkpoint,
                &tensors.kv_b,
                facts,
                self.class,
            )?,
            output: self.linear(&[&tensors.o])?,
            latent_dim: facts.kv_rank,
            nope_dim: facts.nope_dim,
            rope_dim: facts.rope_dim,
        };
        // One entry of the KV cache serves all heads as key and as value.
        let shape = AttentionShape {
            dtype: self.dtype,
            kv_heads: 1,
            group: facts.heads,
            key_dim: facts.kv_rank + facts.rope_dim,
            value_dim: facts.kv_rank,
            latent: true,
            scale: facts.softmax_scale,
            window: None,
            cache: self.ops.cache_format(),
        };
        Ok((Attention::Latent(attention), shape))
    }

    fn gated(&self, tensors: &MlpTensors) -> Result<B::GatedMlp, LoadModelError> {
        self.ops.load_gated(self.checkpoint, tensors, self.checkpoint.config().activation, self.class)
    }

    /// Reads a row to the host: compute dtype, little endian.
    fn row(&self, tensor: &TensorRef) -> Result<Vec<u8>, LoadModelError> {
        let values = load_floats(self.checkpoint, tensor)?;
        Ok(match self.dtype {
            Dtype::F32 => values.into_iter().flat_map(f32::to_le_bytes).collect(),
            Dtype::Bf16 => values.into_iter().flat_map(|value| to_bf16(value).to_le_bytes()).collect(),
        })
    }

    /// Loads the router and the shared contribution of a layer with routed experts.
    fn moe(&self, layer: usize, facts: &MoeFacts) -> Result<Moe<B>, LoadModelError> {
        let router = self
            .checkpoint
            .router(layer)?
            .ok_or(LoadModelError::Inconsistent("a layer of experts has no router"))?;
        let shared = match (self.checkpoint.shared(layer)?, self.checkpoint.experts_bias(layer)?) {
            (None, None) => SharedContribution::Nothing,
            (Some(tensors), None) => SharedContribution::Experts(SharedExperts {
                network: self.gated(&tensors.mlp)?,
                gate: tensors
                    .gate
                    .as_ref()
                    .map(|gate| self.linear_without_bias(&[gate], self.dtype))
                    .transpose()?,
            }),
            (None, Some(bias)) => SharedContribution::Bias(self.row(bias)?),
            (Some(_), Some(_)) => {
                return Err(LoadModelError::Inconsistent(
                    "a layer has shared experts and a bias beside its experts",
                ));
            }
        };
        let router_dtype = if facts.routing.logits_in_float32 { Dtype::F32 } else { self.dtype };
        let correction = match &router.correction {
            None => Vec::new(),
            Some(tensor) => load_floats(self.checkpoint, tensor)?,
        };
        let linear = Affine { weight: &router.linear.weight, bias: router.linear.bias.as_ref() };
        Ok(Moe {
            router: Router {
                linear: self.ops.load_linear(self.checkpoint, &[linear], router_dtype.into(), 1)?,
                correction: match correction.as_slice() {
                    [] => None,
                    correction => Some(self.ops.upload_vector(correction)?),
                },
                rule: RoutingRule {
                    experts: facts.experts,
                    top_k: facts.top_k,
                    facts: facts.routing.clone(),
                    correction,
                    dtype: self.dtype,
                },
            },
            hidden: self.checkpoint.config().hidden_size,
            shared,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Native;
    use crate::backend::PAGE_POSITIONS;
    use remoe_kernels::{Pool, PoolConfig, WeightFormat};
    use remoe_model::{DenseDtype, Inspection};
    use std::path::Path;

    /// Weights outside of experts take the memory that plans count for them: plain, int8 and int4.
    ///
    /// Embedding and head count once if they are tied. Norms held as float32 and padding columns of routers come on top.
    #[test]
    fn loaded_weights_take_the_planned_memory() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/model");
        let checkpoint = Arc::new(Checkpoint::open(demo).unwrap());
        let config = checkpoint.config();
        let (layers, hidden) = (config.layers.len(), config.hidden_size);
        let extra =
            layers * (64 - config.any_moe().unwrap().experts) * hidden * 2 + (2 * layers + 1) * hidden * 4;
        let pool = Arc::new(Pool::new(PoolConfig::default()).unwrap());
        for (dense_dtype, weights) in [
            (None, WeightFormat::Plain),
            (Some(DenseDtype::Int8), WeightFormat::Int8),
            (Some(DenseDtype::Int4), WeightFormat::Int4),
        ] {
            let class = NumericsClass { dtype: Dtype::Bf16, weights };
            let ops = Native::open(None, Dtype::Bf16, &pool).unwrap();
            let loaded = Transformer::load(&checkpoint, class, ops, 1).unwrap().weight_bytes();
            let inspection = Inspection { dense_dtype, ..checkpoint.inspect().unwrap() };
            let planned = inspection.resident_non_expert_bytes("bfloat16") as usize;
            assert!(
                (planned..planned + extra).contains(&loaded),
                "{weights}: {loaded}, not {planned} + {extra}"
            );
        }
    }

    /// Embeddings of tokens and positions are deferred if they are stored in the compute dtype, but not if they are
    /// quantised or tied to the head.
    #[test]
    fn only_plain_embedding_tables_are_deferred() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
        let pool = Arc::new(Pool::new(PoolConfig::default()).unwrap());
        let deferred = |name: &str, class: NumericsClass| -> Vec<usize> {
            let checkpoint = Arc::new(Checkpoint::open(fixtures.join(name)).unwrap());
            let ops = Native::open(None, class.dtype, &pool).unwrap();
            let deferred = Transformer::load(&checkpoint, class, ops, 2).unwrap().deferred_weights();
            let bytes = deferred.iter().map(|part| part.missing_bytes()).collect();
            deferred.iter().for_each(|part| part.load().unwrap());
            assert!(deferred.iter().all(|part| part.missing_bytes() == 0));
            bytes
        };
        let bytes = |name: &str, table: fn(&Checkpoint) -> Option<&TensorRef>| {
            let checkpoint = Checkpoint::open(fixtures.join(name)).unwrap();
            table(&checkpoint).unwrap().bytes as usize
        };
        let embedding = bytes("mixtral-basic", |checkpoint| Some(checkpoint.embedding()));
        assert_eq!(deferred("mixtral-basic", Dtype::F32.into()), [embedding]);
        let int8 = NumericsClass { dtype: Dtype::F32, weights: WeightFormat::Int8 };
        assert!(deferred("mixtral-basic", int8).is_empty());
        // This model's embedding is tied to its head.
        let positions = bytes("gpt2moe-basic", Checkpoint::positions);
        assert_eq!(deferred("gpt2moe-basic", Dtype::F32.into()), [positions]);
    }

    /// Per position, the KV cache holds the elements that the checkpoint's facts state. For latent attention these are the
    /// latent and the rotated key, not expanded keys and values.
    #[test]
    fn cache_entry_has_the_size_of_the_facts() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
        let pool = Arc::new(Pool::new(PoolConfig::default()).unwrap());
        for name in ["dsv2-basic", "dsv2-group", "mixtral-basic", "gptoss-basic", "gptoss-mxfp4"] {
            let checkpoint = Arc::new(Checkpoint::open(fixtures.join(name)).unwrap());
            let ops = Native::open(None, Dtype::F32, &pool).unwrap();
            let transformer = Transformer::load(&checkpoint, Dtype::F32, ops, 1).unwrap();
            let elements: usize =
                checkpoint.config().layers.iter().map(|layer| layer.attention.cache_elements()).sum();
            let bytes = Native::page_bytes(&transformer.pages) * transformer.page_needs.of_block();
            assert_eq!(bytes, PAGE_POSITIONS * elements * 4, "{name}");
        }
    }
}
