//! Feed-forward parts that every token passes: dense layers and shared experts.

use super::error::ForwardError;
use super::host::HostMlp;
use super::linear::Linear;
use remoe_model::Activation;
use tch::{TchError, Tensor};

/// down(act(gate(x)) * up(x)).
pub(crate) enum GatedMlp {
    Host(HostMlp),
    Device(DeviceMlp),
}

/// The weights on a device.
pub(crate) struct DeviceMlp {
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    pub(crate) down: Tensor,
    pub(crate) activation: Activation,
}

impl GatedMlp {
    /// `x`: rows x hidden.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, ForwardError> {
        match self {
            Self::Host(mlp) => mlp.forward(x),
            Self::Device(mlp) => Ok(mlp.forward(x)?),
        }
    }
}

impl DeviceMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let product = |weight: &Tensor, x: &Tensor| x.f_linear(weight, None::<&Tensor>);
        let gate = product(&self.gate, x)?;
        let gate = match self.activation {
            Activation::Silu => gate.f_silu()?,
            Activation::GeluTanh => gate.f_gelu("tanh")?,
            Activation::Relu => gate.f_relu()?,
        };
        product(&self.down, &gate.f_mul(&product(&self.up, x)?)?)
    }
}

/// Experts that every token passes, with the gate that some families put on them.
pub(crate) struct SharedExperts {
    pub(crate) mlp: GatedMlp,
    pub(crate) gate: Option<Linear>,
}

impl SharedExperts {
    /// `x`: rows x hidden.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, ForwardError> {
        let output = self.mlp.forward(x)?;
        match &self.gate {
            None => Ok(output),
            Some(gate) => Ok(gate.forward(x)?.f_sigmoid()?.f_mul(&output)?),
        }
    }
}
