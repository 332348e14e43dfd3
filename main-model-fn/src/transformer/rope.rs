//! Rotary position embedding (Su et al., arXiv 2104.09864).

use tch::{Device, Kind, TchError, Tensor};

/// Inverse frequencies on the device and the factor on cosines and sines.
pub(crate) struct Rope {
    /// head_dim / 2, float32.
    frequencies: Tensor,
    attention_factor: f64,
}

/// Cosines and sines of the rows of one iteration: rows x 1 x head_dim, compute dtype.
pub(crate) struct Angles {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    pub(crate) fn new(frequencies: &[f32], attention_factor: f64, device: Device) -> Result<Self, TchError> {
        Ok(Self {
            frequencies: Tensor::f_from_slice(frequencies)?.f_to_device(device)?,
            attention_factor,
        })
    }

    /// Angles at `positions`.
    pub(crate) fn angles(&self, positions: &[i64], kind: Kind) -> Result<Angles, TchError> {
        let positions = Tensor::f_from_slice(positions)?
            .f_to_device(self.frequencies.device())?
            .f_to_kind(Kind::Float)?;
        let half = positions.f_outer(&self.frequencies)?;
        let whole = Tensor::f_cat(&[&half, &half], -1)?.f_unsqueeze(1)?;
        let scaled = |x: Tensor| x.f_mul_scalar(self.attention_factor)?.f_to_kind(kind);
        Ok(Angles {
            cos: scaled(whole.f_cos()?)?,
            sin: scaled(whole.f_sin()?)?,
        })
    }
}

impl Angles {
    /// Rotates `x`: rows x heads x head_dim, the two halves of each head being the coordinates.
    pub(crate) fn rotate(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let half = x.size()[2] / 2;
        let first = x.f_narrow(-1, 0, half)?;
        let second = x.f_narrow(-1, half, half)?;
        let turned = Tensor::f_cat(&[second.f_neg()?, first], -1)?;
        x.f_mul(&self.cos)?.f_add(&turned.f_mul(&self.sin)?)
    }
}
