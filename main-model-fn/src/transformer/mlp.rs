//! Feed-forward parts that every token passes: dense layers and shared experts.

use super::linear::Linear;
use remoe_model::Activation;
use tch::{TchError, Tensor};

/// down(act(gate(x)) * up(x)).
pub(crate) struct GatedMlp {
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
    pub(crate) activation: Activation,
}

impl GatedMlp {
    /// `x`: rows x hidden.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let gate = self.gate.forward(x)?;
        let gate = match self.activation {
            Activation::Silu => gate.f_silu()?,
            Activation::GeluTanh => gate.f_gelu("tanh")?,
            Activation::Relu => gate.f_relu()?,
        };
        self.down.forward(&gate.f_mul(&self.up.forward(x)?)?)
    }
}

/// Experts that every token passes, with the gate that some families put on them.
pub(crate) struct SharedExperts {
    pub(crate) mlp: GatedMlp,
    pub(crate) gate: Option<Linear>,
}

impl SharedExperts {
    /// `x`: rows x hidden.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let output = self.mlp.forward(x)?;
        match &self.gate {
            None => Ok(output),
            Some(gate) => gate.forward(x)?.f_sigmoid()?.f_mul(&output),
        }
    }
}
