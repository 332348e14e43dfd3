//! Non-expert weights from the checkpoint to the device.

use super::attention::Attention;
use super::cache::CacheShape;
use super::gqa::GroupedQueryAttention;
use super::linear::Linear;
use super::mla::{LatentAttention, Query};
use super::mlp::{GatedMlp, SharedExperts};
use super::norm::RmsNorm;
use super::rope::Rope;
use super::{Layer, LoadModelError, Mlp, Moe, Transformer};
use remoe_kernels::Dtype;
use remoe_model::{
    AttentionFacts, AttentionTensors, Checkpoint, GqaFacts, GqaTensors, MlaFacts, MlaTensors, MlpFacts,
    MlpTensors, MoeFacts, QueryTensors, StoredDtype, TensorRef,
};
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
    ) -> Result<Self, LoadModelError> {
        let loader = Loader { checkpoint, kind: kind(dtype), device };
        let config = checkpoint.config();
        let embedding = loader.tensor(checkpoint.embedding())?;
        let head = if checkpoint.head_is_embedding() {
            embedding.shallow_clone()
        } else {
            loader.tensor(checkpoint.head())?
        };
        let mut layers = Vec::with_capacity(config.layers.len());
        let mut cache_shapes = Vec::with_capacity(config.layers.len());
        for (id, facts) in config.layers.iter().enumerate() {
            let (attention, cache_shape) = match (&facts.attention, checkpoint.attention(id)?) {
                (AttentionFacts::Gqa(facts), AttentionTensors::Gqa(tensors)) => loader.gqa(facts, tensors)?,
                (AttentionFacts::Mla(facts), AttentionTensors::Mla(tensors)) => loader.mla(facts, tensors)?,
                _ => return Err(LoadModelError::Inconsistent("attention facts and tensors differ in kind")),
            };
            let mlp = match &facts.mlp {
                MlpFacts::Dense { .. } => Mlp::Dense(
                    loader.gated(
                        checkpoint
                            .dense(id)?
                            .ok_or(LoadModelError::Inconsistent("a dense layer has no weights"))?,
                    )?,
                ),
                MlpFacts::Moe(facts) => Mlp::Moe(Box::new(loader.moe(id, facts)?)),
            };
            let norms = checkpoint.norms(id)?;
            layers.push(Layer {
                before_attention: loader.norm(&norms.attention)?,
                attention,
                before_mlp: loader.norm(&norms.mlp)?,
                mlp,
            });
            cache_shapes.push(cache_shape);
        }
        Ok(Self {
            device,
            dtype,
            kind: loader.kind,
            hidden: config.hidden_size,
            rope: Rope::new(&config.rope, device)?,
            norm: loader.norm(checkpoint.final_norm())?,
            head: Linear { weight: head, bias: None },
            embedding,
            layers,
            cache_shapes,
        })
    }
}

fn kind(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::F32 => Kind::Float,
        Dtype::Bf16 => Kind::BFloat16,
    }
}

struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    kind: Kind,
    device: Device,
}

impl Loader<'_> {
    fn tensor(&self, tensor: &TensorRef) -> Result<Tensor, LoadModelError> {
        self.tensor_as(tensor, self.kind)
    }

    fn tensor_as(&self, tensor: &TensorRef, kind: Kind) -> Result<Tensor, LoadModelError> {
        let stored = match tensor.dtype {
            StoredDtype::F32 => Kind::Float,
            StoredDtype::Bf16 => Kind::BFloat16,
            StoredDtype::F16 => Kind::Half,
        };
        let bytes = self.checkpoint.read(tensor)?;
        let shape: Vec<i64> = tensor.shape.iter().map(|&size| size as i64).collect();
        Ok(Tensor::f_from_data_size(&bytes, &shape, stored)?.f_to_device(self.device)?.f_to_kind(kind)?)
    }

    fn linear(&self, linear: &remoe_model::Linear) -> Result<Linear, LoadModelError> {
        Ok(Linear {
            weight: self.tensor(&linear.weight)?,
            bias: linear.bias.as_ref().map(|bias| self.tensor(bias)).transpose()?,
        })
    }

    fn without_bias(&self, weight: &TensorRef) -> Result<Linear, LoadModelError> {
        Ok(Linear { weight: self.tensor(weight)?, bias: None })
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
            query: self.linear(&tensors.q)?,
            key: self.linear(&tensors.k)?,
            value: self.linear(&tensors.v)?,
            output: self.linear(&tensors.o)?,
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
        let query = match &tensors.query {
            QueryTensors::Direct(weight) => Query::Direct(self.without_bias(weight)?),
            QueryTensors::Latent { a, a_norm, b } => {
                Query::Latent { down: self.linear(a)?, norm: latent_norm(a_norm)?, up: self.without_bias(b)? }
            }
        };
        let size = |size: usize| size as i64;
        let (heads, latent_dim) = (size(facts.heads), size(facts.kv_rank));
        let (nope_dim, value_dim) = (size(facts.nope_dim), size(facts.value_dim));
        let expand = self.tensor(&tensors.kv_b)?.f_view([heads, nope_dim + value_dim, latent_dim])?;
        let attention = LatentAttention {
            query,
            compress: self.linear(&tensors.kv_a)?,
            latent_norm: latent_norm(&tensors.kv_a_norm)?,
            expand_key: expand.f_narrow(1, 0, nope_dim)?.f_contiguous()?,
            expand_value: expand.f_narrow(1, nope_dim, value_dim)?.f_contiguous()?,
            output: self.linear(&tensors.o)?,
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
        Ok(GatedMlp {
            gate: self.without_bias(&tensors.gate)?,
            up: self.without_bias(&tensors.up)?,
            down: self.without_bias(&tensors.down)?,
            activation: self.checkpoint.config().activation,
        })
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
                gate: tensors.gate.as_ref().map(|gate| self.without_bias(gate)).transpose()?,
            }),
        };
        Ok(Moe {
            router: Linear {
                weight: match facts.routing.logits_in_float32 {
                    true => self.tensor_as(router, Kind::Float)?,
                    false => self.tensor(router)?,
                },
                bias: None,
            },
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
    use std::path::Path;

    /// What a sequence's cache holds per position is what the checkpoint's facts promise: for latent
    /// attention the latent and the rotated key part, not the expanded keys and values.
    #[test]
    fn the_cache_holds_what_the_facts_say() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
        for name in ["dsv2-basic", "dsv2-group", "mixtral-basic"] {
            let checkpoint = Checkpoint::open(fixtures.join(name)).unwrap();
            let transformer = Transformer::load(&checkpoint, Dtype::F32, Device::Cpu).unwrap();
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
