use super::error::ForwardError;
use super::host::HostMatrix;
use tch::Tensor;

/// y = x W' + b.
pub(crate) struct Linear {
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Tensor>,
}

/// outputs x inputs.
pub(crate) enum Weight {
    Host(HostMatrix),
    Device(Tensor),
}

impl Weight {
    /// Elements of a result's row.
    pub(crate) fn outputs(&self) -> i64 {
        match self {
            Self::Host(weight) => weight.matrix.outputs() as i64,
            Self::Device(weight) => weight.size()[0],
        }
    }
}

impl Linear {
    /// `x`: rows x inputs.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, ForwardError> {
        match &self.weight {
            Weight::Device(weight) => {
                Ok(x.f_to_kind(weight.f_kind()?)?.f_linear(weight, self.bias.as_ref())?)
            }
            Weight::Host(weight) => match &self.bias {
                None => weight.multiply(x),
                Some(bias) => Ok(weight.multiply(x)?.f_add(bias)?),
            },
        }
    }
}
