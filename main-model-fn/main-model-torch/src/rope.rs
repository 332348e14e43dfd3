//! Rotary position embedding (Su et al., arXiv 2104.09864).

use crate::library::{Kind, Tensor, TorchDevice};
use main_model_fn::backend::BackendError;
use remoe_model::{RopeFacts, RopeLayout};
use std::sync::Arc;

/// Frequencies on the device.
pub struct Rope {
    /// One for each rotated element, float32.
    frequencies: Tensor,
    /// Sign and factor of the sine of each rotated element: the first of a pair subtracts, the second adds.
    signs: Tensor,
    /// Factor of cosines.
    factor: f64,
    layout: RopeLayout,
    in_float32: bool,
}

/// Cosines and sines of the rows of one iteration.
pub struct Angles {
    /// rows x 1 x dim, in the dtype of the rotation.
    cos: Tensor,
    /// As `cos`, with the signs of `Rope::signs`.
    sin: Tensor,
    layout: RopeLayout,
}

impl Rope {
    pub(crate) fn new(facts: &RopeFacts, device: &Arc<TorchDevice>) -> Result<Self, BackendError> {
        let half = facts.inverse_frequencies();
        let factor = facts.attention_factor as f32;
        // Calls `value` with the index of each pair, for its first and its second element.
        let for_pairs = |value: &dyn Fn(usize, bool) -> f32| -> Vec<f32> {
            match facts.layout {
                RopeLayout::Halves => {
                    let pairs = 0..half.len();
                    let first = pairs.clone().map(|pair| value(pair, true));
                    first.chain(pairs.map(|pair| value(pair, false))).collect()
                }
                RopeLayout::Interleaved => {
                    (0..half.len()).flat_map(|pair| [value(pair, true), value(pair, false)]).collect()
                }
            }
        };
        let frequencies = for_pairs(&|pair, _| half[pair]);
        let signs = for_pairs(&|_, is_first| if is_first { -factor } else { factor });
        Ok(Self {
            frequencies: Tensor::from_slice(device, &frequencies)?,
            signs: Tensor::from_slice(device, &signs)?,
            factor: facts.attention_factor,
            layout: facts.layout,
            in_float32: facts.in_float32,
        })
    }

    /// Returns the angles at `positions`, for rows of type `kind`.
    pub(crate) fn angles(&self, positions: &[usize], kind: Kind) -> Result<Angles, BackendError> {
        let positions: Vec<f32> = positions.iter().map(|&position| position as f32).collect();
        let positions = Tensor::from_slice(self.frequencies.device(), &positions)?;
        let angles = positions.outer(&self.frequencies)?.unsqueeze(1)?;
        let kind = if self.in_float32 { Kind::Float } else { kind };
        let mut cos = angles.cos()?;
        if self.factor != 1.0 {
            cos = cos.mul_scalar(self.factor)?;
        }
        let sin = angles.sin()?.mul(&self.signs)?;
        Ok(Angles { cos: cos.to_kind(kind)?, sin: sin.to_kind(kind)?, layout: self.layout })
    }
}

impl Angles {
    /// Number of rotated elements.
    fn dim(&self) -> i64 {
        self.cos.size()[2]
    }

    /// Returns the angles of the rows that `select` takes from a tensor of all rows.
    pub(crate) fn select_rows(
        &self,
        select: impl Fn(&Tensor) -> Result<Tensor, BackendError>,
    ) -> Result<Self, BackendError> {
        Ok(Self { cos: select(&self.cos)?, sin: select(&self.sin)?, layout: self.layout })
    }

    /// Rotates the last elements of `x`: rows x heads x dim.
    pub(crate) fn rotate(&self, x: &Tensor) -> Result<Tensor, BackendError> {
        let (dim, rotated) = (x.size()[2], self.dim());
        if dim == rotated {
            return self.rotate_all(x);
        }
        let plain = x.narrow(-1, 0, dim - rotated)?;
        Tensor::cat(&[&plain, &self.rotate_all(&x.narrow(-1, dim - rotated, rotated)?)?], -1)
    }

    /// Rotates the last elements of two tensors of the same rows in one operation. Sizes: rows x heads x dim.
    pub(crate) fn rotate_both(&self, [first, second]: [&Tensor; 2]) -> Result<[Tensor; 2], BackendError> {
        let rotated = self.dim();
        let end = |x: &Tensor| -> Result<Tensor, BackendError> {
            let dim = x.size()[2];
            if dim == rotated { Ok(x.alias()) } else { x.narrow(-1, dim - rotated, rotated) }
        };
        let ends = [end(first)?, end(second)?];
        let heads = ends.each_ref().map(|end| end.size()[1]);
        let together = self.rotate_all(&Tensor::cat(&[&ends[0], &ends[1]], 1)?)?;
        let whole = |x: &Tensor, end: &Tensor, rotated: Tensor| -> Result<Tensor, BackendError> {
            if x.size() == rotated.size() {
                return Ok(rotated);
            }
            end.copy_(&rotated)?;
            Ok(x.alias())
        };
        Ok([
            whole(first, &ends[0], together.narrow(1, 0, heads[0])?)?,
            whole(second, &ends[1], together.narrow(1, heads[0], heads[1])?)?,
        ])
    }

    fn rotate_all(&self, x: &Tensor) -> Result<Tensor, BackendError> {
        let wide = x.to_kind(self.cos.kind())?;
        let size = wide.size();
        let partners = match self.layout {
            RopeLayout::Halves => wide.roll_last(size[2] / 2)?,
            RopeLayout::Interleaved => {
                wide.reshape(&[size[0], size[1], size[2] / 2, 2])?.flip_last()?.reshape(&size)?
            }
        };
        wide.mul(&self.cos)?.addcmul(&partners, &self.sin)?.to_kind(x.kind())
    }
}
