//! Non-expert weights from the checkpoint to the device.

use super::attention::Attention;
use super::cache::CacheShape;
use super::gqa::GroupedQueryAttention;
use super::heads::{DeviceHeads, HeadProjections, HostHeads};
use super::host::{self, HostMatrix, HostMlp};
use super::linear::{Linear, Weight};
use super::mla::{LatentAttention, LatentQuery};
use super::mlp::{DeviceMlp, GatedMlp, SharedExperts};
use super::norm::RmsNorm;
use super::rope::Rope;
use super::{Layer, LoadModelError, Mlp, Moe, Transformer};
use remoe_experts::{in_parallel, load_gated, stored_dtype};
use remoe_kernels::{Dtype, PackedMatrix, Pool};
use remoe_model::{
    AttentionFacts, AttentionTensors, Checkpoint, GqaFacts, GqaTensors, MlaFacts, MlaTensors, MlpFacts,
    MlpTensors, MoeFacts, QueryTensors, StoredDtype, TensorRef,
};
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

impl Transformer {
    /// Reads every tensor outside of the routed experts.
    ///
    /// # Errors
    /// The checkpoint cannot be read, or the device has no room.
    pub(crate) fn load(
        checkpoint: &Checkpoint,
        dtype: Dtype,
        device: Device,
        pool: &Arc<Pool>,
    ) -> Result<Self, LoadModelError> {
        checkpoint.prefetch(checkpoint.outside_tensors())?;
        let loader = Loader { checkpoint, dtype, device, pool };
        let config = checkpoint.config();
        let (layers, cache_shapes) = loader.layers(pool.threads())?.into_iter().unzip();
        Ok(Self {
            device,
            dtype,
            kind: host::kind(dtype),
            hidden: config.hidden_size,
            rope: Rope::new(&config.rope, device)?,
            norm: loader.norm(checkpoint.final_norm())?,
            head: loader.product(&[checkpoint.head()], dtype)?,
            embedding: loader.tensor(checkpoint.embedding())?,
            layers,
            cache_shapes,
        })
    }
}

struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    dtype: Dtype,
    device: Device,
    pool: &'a Arc<Pool>,
}

impl Loader<'_> {
    /// All layers in order, read and packed by several threads.
    fn layers(&self, threads: usize) -> Result<Vec<(Layer, CacheShape)>, LoadModelError> {
        let count = self.checkpoint.config().layers.len();
        in_parallel(count, threads, LoadModelError::Panicked, |id| self.layer(id))
    }

    fn layer(&self, id: usize) -> Result<(Layer, CacheShape), LoadModelError> {
        let checkpoint = self.checkpoint;
        let facts =
            checkpoint.config().layers.get(id).ok_or(LoadModelError::Inconsistent("a layer has no facts"))?;
        let (attention, cache_shape) = match (&facts.attention, checkpoint.attention(id)?) {
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
        Ok((layer, cache_shape))
    }

    fn tensor(&self, tensor: &TensorRef) -> Result<Tensor, LoadModelError> {
        self.tensor_as(tensor, self.dtype)
    }

    fn tensor_as(&self, tensor: &TensorRef, dtype: Dtype) -> Result<Tensor, LoadModelError> {
        Ok(self.stored(tensor)?.f_to_kind(host::kind(dtype))?)
    }

    /// As the checkpoint has it, on the device.
    fn stored(&self, tensor: &TensorRef) -> Result<Tensor, LoadModelError> {
        let stored = match tensor.dtype {
            StoredDtype::F32 => Kind::Float,
            StoredDtype::Bf16 => Kind::BFloat16,
            StoredDtype::F16 => Kind::Half,
        };
        let bytes = self.checkpoint.read(tensor)?;
        let shape: Vec<i64> = tensor.shape.iter().map(|&size| size as i64).collect();
        Ok(Tensor::f_from_data_size(&bytes, &shape, stored)?.f_to_device(self.device)?)
    }

    /// Matrices of the same number of inputs, one below the other.
    fn product(&self, weights: &[&TensorRef], dtype: Dtype) -> Result<Linear, LoadModelError> {
        let weight = if self.device == Device::Cpu {
            let parts = weights
                .iter()
                .map(|weight| Ok((stored_dtype(weight.dtype), self.checkpoint.read(weight)?)))
                .collect::<Result<Vec<_>, LoadModelError>>()?;
            let parts: Vec<_> = parts.iter().map(|(stored, bytes)| (*stored, bytes.as_slice())).collect();
            let inputs = weights.first().and_then(|weight| weight.shape.last()).copied().unwrap_or(0);
            let matrix = PackedMatrix::pack(inputs, dtype, &parts)?;
            Weight::Host(HostMatrix { matrix, pool: self.pool.clone() })
        } else {
            let parts = weights
                .iter()
                .map(|weight| self.tensor_as(weight, dtype))
                .collect::<Result<Vec<_>, LoadModelError>>()?;
            Weight::Device(Tensor::f_cat(&parts, 0)?)
        };
        Ok(Linear { weight, bias: None })
    }

    /// As [`product`](Self::product), with biases, which are zero where a part has none.
    fn linear(&self, parts: &[&remoe_model::Linear]) -> Result<Linear, LoadModelError> {
        let weights: Vec<&TensorRef> = parts.iter().map(|part| &part.weight).collect();
        let mut linear = self.product(&weights, self.dtype)?;
        if parts.iter().any(|part| part.bias.is_some()) {
            let biases = parts
                .iter()
                .map(|part| match &part.bias {
                    Some(bias) => self.tensor(bias),
                    None => {
                        let outputs = part.weight.shape.first().copied().unwrap_or(0) as i64;
                        Ok(Tensor::f_zeros([outputs], (host::kind(self.dtype), self.device))?)
                    }
                })
                .collect::<Result<Vec<_>, LoadModelError>>()?;
            linear.bias = Some(Tensor::f_cat(&biases, 0)?);
        }
        Ok(linear)
    }

    fn norm(&self, weight: &TensorRef) -> Result<RmsNorm, LoadModelError> {
        Ok(RmsNorm { weight: self.tensor(weight)?, eps: self.checkpoint.config().norm_eps })
    }

    fn gqa(&self, facts: &GqaFacts, tensors: &GqaTensors) -> Result<(Attention, CacheShape), LoadModelError> {
        let norms = match (&tensors.q_norm, &tensors.k_norm) {
            (Some(query), Some(key)) => Some((self.norm(query)?, self.norm(key)?)),
            _ => None,
        };
        let head_dim = facts.head_dim as i64;
        let kv_heads = facts.kv_heads as i64;
        let attention = GroupedQueryAttention {
            projection: self.linear(&[&tensors.q, &tensors.k, &tensors.v])?,
            output: self.linear(&[&tensors.o])?,
            norms,
            clip: facts.clip,
            heads: facts.heads as i64,
            kv_heads,
            head_dim,
            scale: (facts.head_dim as f64).powf(-0.5),
            window: facts.window.map(|window| window as i64),
        };
        let cache = CacheShape { kv_heads, key_dim: head_dim, value_dim: head_dim };
        Ok((Attention::Grouped(attention), cache))
    }

    fn mla(&self, facts: &MlaFacts, tensors: &MlaTensors) -> Result<(Attention, CacheShape), LoadModelError> {
        let latent_norm = |weight: &TensorRef| -> Result<RmsNorm, LoadModelError> {
            Ok(RmsNorm { weight: self.tensor(weight)?, eps: facts.latent_norm_eps })
        };
        let (first, query) = match &tensors.query {
            QueryTensors::Direct(weight) => {
                (remoe_model::Linear { weight: weight.clone(), bias: None }, None)
            }
            QueryTensors::Latent { a, a_norm, b } => {
                let up = self.product(&[b], self.dtype)?;
                (a.clone(), Some(LatentQuery { norm: latent_norm(a_norm)?, up }))
            }
        };
        let size = |size: usize| size as i64;
        let (heads, latent_dim) = (size(facts.heads), size(facts.kv_rank));
        let (nope_dim, value_dim) = (size(facts.nope_dim), size(facts.value_dim));
        let expand = self.stored(&tensors.kv_b)?.f_view([heads, nope_dim + value_dim, latent_dim])?;
        let (keys, values) = (expand.f_narrow(1, 0, nope_dim)?, expand.f_narrow(1, nope_dim, value_dim)?);
        let projections = if self.device == Device::Cpu {
            let stored = stored_dtype(tensors.kv_b.dtype);
            HeadProjections::Host(HostHeads::pack(&keys, &values, stored, self.dtype, self.pool)?)
        } else {
            let on_device = |part: &Tensor| part.f_to_kind(host::kind(self.dtype))?.f_contiguous();
            HeadProjections::Device(DeviceHeads { keys: on_device(&keys)?, values: on_device(&values)? })
        };
        let attention = LatentAttention {
            projection: self.linear(&[&first, &tensors.kv_a])?,
            query,
            latent_norm: latent_norm(&tensors.kv_a_norm)?,
            projections,
            output: self.linear(&[&tensors.o])?,
            heads,
            latent_dim,
            nope_dim,
            rope_dim: size(facts.rope_dim),
            scale: facts.softmax_scale,
        };
        // Everything that a token leaves behind is one entry that serves as key and as value.
        let cache = CacheShape { kv_heads: 1, key_dim: latent_dim + size(facts.rope_dim), value_dim: 0 };
        Ok((Attention::Latent(attention), cache))
    }

    fn gated(&self, tensors: &MlpTensors) -> Result<GatedMlp, LoadModelError> {
        let activation = self.checkpoint.config().activation;
        if self.device != Device::Cpu {
            return Ok(GatedMlp::Device(DeviceMlp {
                gate: self.tensor(&tensors.gate)?,
                up: self.tensor(&tensors.up)?,
                down: self.tensor(&tensors.down)?,
                activation,
            }));
        }
        let packed = load_gated(self.checkpoint, tensors, self.dtype)?;
        Ok(GatedMlp::Host(HostMlp { packed, pool: self.pool.clone() }))
    }

    fn moe(&self, layer: usize, facts: &MoeFacts) -> Result<Moe, LoadModelError> {
        let router = self
            .checkpoint
            .router(layer)?
            .ok_or(LoadModelError::Inconsistent("a layer of experts has no router"))?;
        let shared = match self.checkpoint.shared(layer)? {
            None => None,
            Some(tensors) => Some(SharedExperts {
                mlp: self.gated(&tensors.mlp)?,
                gate: tensors.gate.as_ref().map(|gate| self.product(&[gate], self.dtype)).transpose()?,
            }),
        };
        Ok(Moe {
            router: self
                .product(&[router], if facts.routing.logits_in_float32 { Dtype::F32 } else { self.dtype })?,
            routing: facts.routing.clone(),
            experts: facts.experts,
            top_k: facts.top_k,
            shared,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use remoe_kernels::PoolConfig;
    use std::path::Path;

    /// What a sequence's cache holds per position is what the checkpoint's facts promise: for latent
    /// attention the latent and the rotated key part, not the expanded keys and values.
    #[test]
    fn the_cache_holds_what_the_facts_say() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
        let pool = Arc::new(Pool::new(PoolConfig::default()).unwrap());
        for name in ["dsv2-basic", "dsv2-group", "mixtral-basic"] {
            let checkpoint = Checkpoint::open(fixtures.join(name)).unwrap();
            let transformer = Transformer::load(&checkpoint, Dtype::F32, Device::Cpu, &pool).unwrap();
            let cache = transformer.new_cache().unwrap();
            for (layer, facts) in checkpoint.config().layers.iter().enumerate() {
                assert_eq!(cache.elements_per_position(layer), facts.attention.cache_elements(), "{name}");
                if let AttentionFacts::Mla(mla) = &facts.attention {
                    assert_eq!(facts.attention.cache_elements(), mla.kv_rank + mla.rope_dim);
                }
            }
        }
    }
}
