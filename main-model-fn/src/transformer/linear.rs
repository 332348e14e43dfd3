use tch::{TchError, Tensor};

/// y = x W' + b.
pub(crate) struct Linear {
    /// outputs x inputs.
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
}

impl Linear {
    /// `x`: rows x inputs.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        x.f_linear(&self.weight, self.bias.as_ref())
    }
}
