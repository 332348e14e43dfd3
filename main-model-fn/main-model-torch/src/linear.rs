//! Products with weights and gated networks: the kernels' on the host, LibTorch's on devices.

use crate::error::Refused;
use crate::host::{HostMatrix, HostMlp};
use main_model_fn::backend::{BackendError, Held};
use remoe_kernels::PackedMatrix;
use remoe_model::Activation;
use std::sync::Arc;
use tch::{TchError, Tensor};

/// y = x W' + b.
pub struct Linear {
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Tensor>,
}

/// outputs x inputs.
pub(crate) enum Weight {
    Host(HostMatrix),
    Device(Tensor),
}

/// A table of rows.
pub enum Embedding {
    /// LibTorch's, in the compute dtype.
    Rows(Tensor),
    /// The kernels' on the host: quantised, or what products are made with as well.
    Packed(Arc<PackedMatrix>),
}

/// Bytes of a tensor's elements.
pub(crate) fn tensor_bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

impl Held for Linear {
    fn bytes(&self) -> usize {
        let weight = match &self.weight {
            Weight::Host(weight) => weight.matrix.bytes(),
            Weight::Device(weight) => tensor_bytes(weight),
        };
        weight + self.bias.as_ref().map_or(0, tensor_bytes)
    }
}

impl Held for Embedding {
    fn bytes(&self) -> usize {
        match self {
            Self::Rows(table) => tensor_bytes(table),
            Self::Packed(matrix) => matrix.bytes(),
        }
    }
}

impl Held for Gated {
    fn bytes(&self) -> usize {
        match self {
            Self::Host(mlp) => mlp.packed.bytes(),
            Self::Device(mlp) => [&mlp.gate, &mlp.up, &mlp.down].into_iter().map(tensor_bytes).sum(),
        }
    }
}

impl Linear {
    /// `x`: rows x inputs.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, BackendError> {
        match &self.weight {
            Weight::Device(weight) => {
                let x = x.f_to_kind(weight.f_kind().told()?).told()?;
                x.f_linear(weight, self.bias.as_ref()).told()
            }
            Weight::Host(weight) => match &self.bias {
                None => weight.multiply(x),
                Some(bias) => weight.multiply(x)?.f_add(bias).told(),
            },
        }
    }
}

/// down(act(gate(x)) * up(x)).
pub enum Gated {
    /// The kernels' own.
    Host(HostMlp),
    /// LibTorch's.
    Device(DeviceMlp),
}

/// The weights on a device.
pub struct DeviceMlp {
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    pub(crate) down: Tensor,
    pub(crate) activation: Activation,
}

impl Gated {
    /// `x`: rows x hidden.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, BackendError> {
        match self {
            Self::Host(mlp) => mlp.forward(x),
            Self::Device(mlp) => mlp.forward(x).told(),
        }
    }
}

impl DeviceMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let product = |weight: &Tensor, x: &Tensor| x.f_linear(weight, None::<&Tensor>);
        let gate = product(&self.gate, x)?;
        let up = product(&self.up, x)?;
        let (gate, up) = match self.activation {
            Activation::Silu => (gate.f_silu()?, up),
            Activation::GeluTanh => (gate.f_gelu("tanh")?, up),
            Activation::Relu => (gate.f_relu()?, up),
            Activation::ClampedSwiglu => {
                let gate = gate.f_clamp_max(7.0)?;
                let up = up.f_clamp(-7.0, 7.0)?.f_add_scalar(1.0)?;
                (gate.f_mul(&gate.f_mul_scalar(1.702)?.f_sigmoid()?)?, up)
            }
        };
        product(&self.down, &gate.f_mul(&up)?)
    }
}
