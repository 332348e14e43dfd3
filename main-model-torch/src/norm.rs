use tch::{Kind, TchError, Tensor};

/// Root-mean-square normalisation over the last dimension: the mean in float32, the result rounded
/// to the compute dtype before it is multiplied by the weight, as the reference does.
pub struct RmsNorm {
    pub(crate) weight: Tensor,
    pub(crate) eps: f64,
}

impl RmsNorm {
    /// `x`: rows x features.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let kind = x.f_kind()?;
        let wide = x.f_to_kind(Kind::Float)?;
        let variance = wide.f_square()?.f_mean_dim([-1_i64].as_slice(), true, Kind::Float)?;
        let normed = wide.f_mul(&variance.f_add_scalar(self.eps)?.f_rsqrt()?)?;
        self.weight.f_mul(&normed.f_to_kind(kind)?)
    }
}
