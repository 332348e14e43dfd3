//! Attention over per-sequence caches, whichever kind a layer has.

use super::cache::SequenceCache;
use super::error::ForwardError;
use super::gqa::GroupedQueryAttention;
use super::mla::LatentAttention;
use super::rope::Angles;
use tch::{Device, Kind, TchError, Tensor};

/// The attention of one layer.
pub(crate) enum Attention {
    /// Multi-head, grouped-query or multi-query attention.
    Grouped(GroupedQueryAttention),
    /// Multi-head latent attention.
    Latent(LatentAttention),
}

/// The rows of one sequence in an iteration.
pub(crate) struct Span<'a> {
    pub(crate) first: i64,
    pub(crate) rows: i64,
    pub(crate) cache: &'a mut SequenceCache,
}

impl Attention {
    /// `x`: rows x hidden, the rows of all spans one after the other.
    pub(crate) fn forward(
        &self,
        layer: usize,
        x: &Tensor,
        angles: &Angles,
        spans: &mut [Span<'_>],
    ) -> Result<Tensor, ForwardError> {
        match self {
            Self::Grouped(attention) => attention.forward(layer, x, angles, spans),
            Self::Latent(attention) => attention.forward(layer, x, angles, spans),
        }
    }
}

/// What a row may see beside the causal rule.
pub(super) struct Visibility {
    /// Positions before the first row.
    pub(super) past: i64,
    /// A token sees itself and the `window` - 1 before it.
    pub(super) window: Option<i64>,
}

impl Visibility {
    /// Which of `positions` each of `rows` sees: itself and what lies before it, as far as the
    /// window reaches. None where plain causal attention from position 0 says the same.
    fn mask(&self, rows: i64, positions: i64, device: Device) -> Result<Option<Tensor>, TchError> {
        let narrow = self.window.is_some_and(|window| positions > window);
        if self.past == 0 && !narrow {
            return Ok(None);
        }
        let seen = Tensor::f_ones([rows, positions], (Kind::Bool, device))?.f_tril(self.past)?;
        match self.window {
            None => Ok(Some(seen)),
            Some(window) => Ok(Some(seen.f_triu(self.past + 1 - window)?)),
        }
    }
}

/// softmax(scale q k') v for several rows. `query`: heads x rows x dim; `keys`, `values`: heads x
/// positions x dim. Returns rows x (heads value-dim).
pub(super) fn attend(
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    scale: f64,
    visibility: &Visibility,
) -> Result<Tensor, TchError> {
    let rows = query.size()[1];
    let mask = visibility.mask(rows, keys.size()[1], query.device())?;
    let causal = mask.is_none();
    let output = dot_product(&query.f_unsqueeze(0)?, keys, values, scale, mask, causal)?;
    output.f_squeeze_dim(0)?.f_transpose(0, 1)?.f_reshape([rows, -1])
}

/// Scaled dot-product attention; the batch dimension of keys and values is added.
pub(super) fn dot_product(
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    scale: f64,
    mask: Option<Tensor>,
    causal: bool,
) -> Result<Tensor, TchError> {
    let (keys, values) = (keys.f_unsqueeze(0)?, values.f_unsqueeze(0)?);
    Tensor::f_scaled_dot_product_attention(query, &keys, &values, mask, 0.0, causal, scale, false)
}
