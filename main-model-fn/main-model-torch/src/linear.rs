//! Products with weights and gated networks: the kernels' on the host, LibTorch's on devices.

use crate::host::{HostMatrix, HostMlp};
use crate::library::Tensor;
use main_model_fn::backend::{BackendError, ResidentPart};
use remoe_kernels::PackedMatrix;
use remoe_model::Activation;
use std::sync::Arc;

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

impl ResidentPart for Linear {
    fn bytes(&self) -> usize {
        let weight = match &self.weight {
            Weight::Host(weight) => weight.matrix.bytes(),
            Weight::Device(weight) => weight.byte_count(),
        };
        weight + self.bias.as_ref().map_or(0, Tensor::byte_count)
    }
}

impl ResidentPart for Embedding {
    fn bytes(&self) -> usize {
        match self {
            Self::Rows(table) => table.byte_count(),
            Self::Packed(matrix) => matrix.bytes(),
        }
    }
}

impl ResidentPart for Gated {
    fn bytes(&self) -> usize {
        match self {
            Self::Host(mlp) => mlp.packed.bytes(),
            Self::Device(mlp) => mlp.gate_up.byte_count() + mlp.down.byte_count(),
        }
    }
}

impl Linear {
    /// `x`: rows x inputs.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, BackendError> {
        match &self.weight {
            Weight::Device(weight) => x.to_kind(weight.kind())?.linear(weight, self.bias.as_ref()),
            Weight::Host(weight) => match &self.bias {
                None => weight.multiply(x),
                Some(bias) => weight.multiply(x)?.add(bias),
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
    /// Weights of the gate, and below them those of the up-projection.
    pub(crate) gate_up: Tensor,
    pub(crate) down: Tensor,
    pub(crate) activation: Activation,
}

impl Gated {
    /// `x`: rows x hidden.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, BackendError> {
        match self {
            Self::Host(mlp) => mlp.forward(x),
            Self::Device(mlp) => mlp.forward(x),
        }
    }
}

impl DeviceMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor, BackendError> {
        let both = x.linear(&self.gate_up, None)?;
        let width = both.size()[1] / 2;
        let (gate, up) = (both.narrow(1, 0, width)?, both.narrow(1, width, width)?);
        let (gate, up) = match self.activation {
            Activation::Silu => (gate.silu()?, up),
            Activation::GeluTanh => (gate.gelu_tanh()?, up),
            Activation::Relu => (gate.relu()?, up),
            Activation::ClampedSwiglu => {
                let gate = gate.clamp_max(7.0)?;
                let up = up.clamp(-7.0, 7.0)?.add_scalar(1.0)?;
                (gate.mul(&gate.mul_scalar(1.702)?.sigmoid()?)?, up)
            }
        };
        gate.mul(&up)?.linear(&self.down, None)
    }
}
