//! Linear layers and gated feed-forward networks: the kernels' on the host, LibTorch's on devices.

use crate::host::{HostMatrix, HostMlp};
use crate::library::Tensor;
use main_model_fn::backend::{BackendError, ResidentPart};
use remoe_kernels::PackedMatrix;
use remoe_model::Activation;
use std::sync::Arc;

/// Linear layer: `x weight' + bias`.
pub struct Linear {
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Tensor>,
}

/// Weight matrix of a linear layer, outputs x inputs.
pub(crate) enum Weight {
    Host(HostMatrix),
    Device(Tensor),
}

/// Embedding table.
pub enum Embedding {
    /// Rows on the device, in the compute dtype.
    Rows(Tensor),
    /// Matrix of the kernels on the host: quantised, or shared with the head.
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

/// Gated feed-forward network: down(activation(gate(x)) * up(x)).
pub enum Gated {
    Host(HostMlp),
    Device(DeviceMlp),
}

/// Weights of a gated network on a device.
pub struct DeviceMlp {
    /// Rows of the gate, then rows of the up-projection.
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
        let gate_up = x.linear(&self.gate_up, None)?;
        let width = gate_up.size()[1] / 2;
        let (gate, up) = (gate_up.narrow(1, 0, width)?, gate_up.narrow(1, width, width)?);
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
