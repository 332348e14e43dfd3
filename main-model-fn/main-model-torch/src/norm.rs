use crate::linear::tensor_bytes;
use main_model_fn::backend::Held;
use remoe_model::NormKind;
use tch::{Kind, TchError, Tensor};

/// Normalisation over runs of as many elements as there are weights, computed in float32 and rounded to the
/// compute dtype where its kind says so, as the reference does.
pub struct Norm {
    pub(crate) kind: NormKind,
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
    pub(crate) eps: f64,
}

impl Held for Norm {
    fn bytes(&self) -> usize {
        tensor_bytes(&self.weight) + self.bias.as_ref().map_or(0, tensor_bytes)
    }
}

impl Norm {
    /// `x`: rows x features, a multiple of the weights' number.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let (kind, size) = (x.f_kind()?, x.size());
        let runs = x.f_reshape([-1, self.weight.size()[0]])?;
        let wide = || runs.f_to_kind(Kind::Float);
        let normed = match self.kind {
            NormKind::Rms => self.weight.f_mul(&self.by_rms(&wide()?)?.f_to_kind(kind)?)?,
            NormKind::RmsInFloat32 => {
                self.by_rms(&wide()?)?.f_mul(&self.weight.f_to_kind(Kind::Float)?)?.f_to_kind(kind)?
            }
            NormKind::Layer => runs.f_layer_norm(
                self.weight.size(),
                Some(&self.weight),
                self.bias.as_ref(),
                self.eps,
                false,
            )?,
        };
        normed.f_reshape(&size[..])
    }

    fn by_rms(&self, wide: &Tensor) -> Result<Tensor, TchError> {
        let variance = wide.f_square()?.f_mean_dim([-1_i64].as_slice(), true, Kind::Float)?;
        wide.f_mul(&variance.f_add_scalar(self.eps)?.f_rsqrt()?)
    }
}
