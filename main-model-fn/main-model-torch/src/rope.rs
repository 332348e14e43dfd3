//! Rotary position embedding (Su et al., arXiv 2104.09864).

use remoe_model::{RopeFacts, RopeLayout};
use tch::{Device, Kind, TchError, Tensor};

/// Inverse frequencies on the device and the factor on cosines and sines.
pub struct Rope {
    /// dim / 2, float32.
    frequencies: Tensor,
    attention_factor: f64,
    layout: RopeLayout,
    in_float32: bool,
    dim: i64,
}

/// Cosines and sines of the rows of one iteration.
pub struct Angles {
    /// rows x 1 x dim (halves), or rows x 1 x dim / 2 (pairs), in the dtype of the rotation.
    cos: Tensor,
    sin: Tensor,
    layout: RopeLayout,
    /// Elements that are rotated.
    dim: i64,
}

impl Rope {
    pub(crate) fn new(facts: &RopeFacts, device: Device) -> Result<Self, TchError> {
        Ok(Self {
            frequencies: Tensor::f_from_slice(&facts.inverse_frequencies())?.f_to_device(device)?,
            attention_factor: facts.attention_factor,
            layout: facts.layout,
            in_float32: facts.in_float32,
            dim: facts.dim as i64,
        })
    }

    /// Angles at `positions`, for rows in `kind`.
    pub(crate) fn angles(&self, positions: &[i64], kind: Kind) -> Result<Angles, TchError> {
        let positions = Tensor::f_from_slice(positions)?
            .f_to_device(self.frequencies.device())?
            .f_to_kind(Kind::Float)?;
        let angles = positions.f_outer(&self.frequencies)?.f_unsqueeze(1)?;
        let kind = if self.in_float32 { Kind::Float } else { kind };
        let angles = match self.layout {
            RopeLayout::Halves => Tensor::f_cat(&[&angles, &angles], -1)?,
            RopeLayout::Interleaved => angles,
        };
        let scaled = |x: Tensor| x.f_mul_scalar(self.attention_factor)?.f_to_kind(kind);
        Ok(Angles {
            cos: scaled(angles.f_cos()?)?,
            sin: scaled(angles.f_sin()?)?,
            layout: self.layout,
            dim: self.dim,
        })
    }
}

impl Angles {
    /// The angles of the rows at `rows`, an index.
    pub(crate) fn of_rows(&self, rows: &Tensor) -> Result<Self, TchError> {
        let of = |all: &Tensor| all.f_index_select(0, rows);
        Ok(Self { cos: of(&self.cos)?, sin: of(&self.sin)?, ..*self })
    }

    /// Rotates the last elements of `x`: rows x heads x dim.
    pub(crate) fn rotate(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let (dim, rotated) = (x.size()[2], self.dim);
        if dim == rotated {
            return self.rotate_all(x);
        }
        let plain = x.f_narrow(-1, 0, dim - rotated)?;
        Tensor::f_cat(&[plain, self.rotate_all(&x.f_narrow(-1, dim - rotated, rotated)?)?], -1)
    }

    fn rotate_all(&self, x: &Tensor) -> Result<Tensor, TchError> {
        match self.layout {
            RopeLayout::Halves => {
                let half = x.size()[2] / 2;
                let first = x.f_narrow(-1, 0, half)?;
                let second = x.f_narrow(-1, half, half)?;
                let turned = Tensor::f_cat(&[second.f_neg()?, first], -1)?;
                x.f_mul(&self.cos)?.f_add(&turned.f_mul(&self.sin)?)
            }
            RopeLayout::Interleaved => {
                let size = x.size();
                let pairs = x.f_to_kind(self.cos.f_kind()?)?.f_reshape([size[0], size[1], size[2] / 2, 2])?;
                let (first, second) = (pairs.f_select(-1, 0)?, pairs.f_select(-1, 1)?);
                let real = first.f_mul(&self.cos)?.f_sub(&second.f_mul(&self.sin)?)?;
                let imaginary = first.f_mul(&self.sin)?.f_add(&second.f_mul(&self.cos)?)?;
                Tensor::f_stack(&[real, imaginary], -1)?.f_reshape(&size[..])?.f_to_kind(x.f_kind()?)
            }
        }
    }
}
