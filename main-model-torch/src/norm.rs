use tch::{Kind, TchError, Tensor};

/// Root-mean-square normalisation over runs of as many elements as there are weights: the mean in float32, the result rounded
/// to the compute dtype before it is multiplied by the weight, as the reference does.
pub struct RmsNorm {
    pub(crate) weight: Tensor,
    pub(crate) eps: f64,
}

impl RmsNorm {
    /// `x`: rows x features, a multiple of the weights' number.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let (kind, size) = (x.f_kind()?, x.size());
        let wide = x.f_to_kind(Kind::Float)?.f_reshape([-1, self.weight.size()[0]])?;
        let variance = wide.f_square()?.f_mean_dim([-1_i64].as_slice(), true, Kind::Float)?;
        let normed = wide.f_mul(&variance.f_add_scalar(self.eps)?.f_rsqrt()?)?;
        self.weight.f_mul(&normed.f_to_kind(kind)?)?.f_reshape(&size[..])
    }
}
