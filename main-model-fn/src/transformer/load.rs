//! Non-expert weights from the checkpoint to the device.

use super::attention::Attention;
use super::cache::CacheShape;
use super::linear::Linear;
use super::mlp::{GatedMlp, SharedExperts};
use super::norm::RmsNorm;
use super::rope::Rope;
use super::{Layer, LoadModelError, Mlp, Moe, Transformer};
use remoe_kernels::Dtype;
use remoe_model::{
    AttentionFacts, AttentionTensors, Checkpoint, GqaFacts, GqaTensors, MlpFacts, MlpTensors,
    MoeFacts, StoredDtype, TensorRef,
};
use tch::{Device, Kind, Tensor};

impl Transformer {
    /// Reads every tensor outside of the routed experts.
    ///
    /// # Errors
    /// The checkpoint cannot be read, or the device has no room.
    pub(crate) fn load(checkpoint: &Checkpoint, dtype: Dtype, device: Device) -> Result<Self, LoadModelError> {
        let loader = Loader {
            checkpoint,
            kind: kind(dtype),
            device,
        };
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
                _ => return Err(LoadModelError::Unsupported("multi-head latent attention")),
            };
            let mlp = match &facts.mlp {
                MlpFacts::Dense { .. } => Mlp::Dense(loader.gated(
                    checkpoint.dense(id)?.ok_or(LoadModelError::Unsupported("a dense layer without weights"))?,
                )?),
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
            rope: Rope::new(&config.rope.inverse_frequencies(), config.rope.attention_factor(), device)?,
            norm: loader.norm(checkpoint.final_norm())?,
            head: Linear {
                weight: head,
                bias: None,
            },
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
        let stored = match tensor.dtype {
            StoredDtype::F32 => Kind::Float,
            StoredDtype::Bf16 => Kind::BFloat16,
            StoredDtype::F16 => Kind::Half,
        };
        let bytes = self.checkpoint.read(tensor)?;
        let shape: Vec<i64> = tensor.shape.iter().map(|&size| size as i64).collect();
        Ok(Tensor::f_from_data_size(&bytes, &shape, stored)?
            .f_to_device(self.device)?
            .f_to_kind(self.kind)?)
    }

    fn linear(&self, linear: &remoe_model::Linear) -> Result<Linear, LoadModelError> {
        Ok(Linear {
            weight: self.tensor(&linear.weight)?,
            bias: linear.bias.as_ref().map(|bias| self.tensor(bias)).transpose()?,
        })
    }

    fn without_bias(&self, weight: &TensorRef) -> Result<Linear, LoadModelError> {
        Ok(Linear {
            weight: self.tensor(weight)?,
            bias: None,
        })
    }

    fn norm(&self, weight: &TensorRef) -> Result<RmsNorm, LoadModelError> {
        Ok(RmsNorm {
            weight: self.tensor(weight)?,
            eps: self.checkpoint.config().norm_eps,
        })
    }

    fn gqa(&self, facts: &GqaFacts, tensors: &GqaTensors) -> Result<(Attention, CacheShape), LoadModelError> {
        let norms = match (&tensors.q_norm, &tensors.k_norm) {
            (Some(query), Some(key)) => Some((self.norm(query)?, self.norm(key)?)),
            _ => None,
        };
        let head_dim = facts.head_dim as i64;
        let kv_heads = facts.kv_heads as i64;
        let attention = Attention {
            query: self.linear(&tensors.q)?,
            key: self.linear(&tensors.k)?,
            value: self.linear(&tensors.v)?,
            output: self.linear(&tensors.o)?,
            norms,
            clip: facts.clip,
            heads: facts.heads as i64,
            kv_heads,
            head_dim,
            window: facts.window.map(|window| window as i64),
        };
        let cache = CacheShape {
            kv_heads,
            key_dim: head_dim,
            value_dim: head_dim,
        };
        Ok((attention, cache))
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
            .ok_or(LoadModelError::Unsupported("a layer of experts without a router"))?;
        let shared = match self.checkpoint.shared(layer)? {
            None => None,
            Some(tensors) => Some(SharedExperts {
                mlp: self.gated(&tensors.mlp)?,
                gate: tensors.gate.as_ref().map(|gate| self.without_bias(gate)).transpose()?,
            }),
        };
        Ok(Moe {
            router: self.without_bias(router)?,
            routing: facts.routing.clone(),
            experts: facts.experts,
            top_k: facts.top_k,
            shared,
        })
    }
}
