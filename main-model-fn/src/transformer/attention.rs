//! Grouped-query attention over per-sequence caches.

use super::cache::SequenceCache;
use super::linear::Linear;
use super::norm::RmsNorm;
use super::rope::Angles;
use tch::{Device, Kind, TchError, Tensor};

/// The attention of one layer.
pub(crate) struct Attention {
    pub(crate) query: Linear,
    pub(crate) key: Linear,
    pub(crate) value: Linear,
    pub(crate) output: Linear,
    /// Normalisation of the whole query and key rows, before they are cut into heads (OLMoE).
    pub(crate) norms: Option<(RmsNorm, RmsNorm)>,
    pub(crate) clip: Option<f64>,
    pub(crate) heads: i64,
    pub(crate) kv_heads: i64,
    pub(crate) head_dim: i64,
    /// A token sees itself and the `window` - 1 before it.
    pub(crate) window: Option<i64>,
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
    ) -> Result<Tensor, TchError> {
        let rows = x.size()[0];
        let mut query = self.query.forward(x)?;
        let mut key = self.key.forward(x)?;
        let mut value = self.value.forward(x)?;
        if let Some((query_norm, key_norm)) = &self.norms {
            query = query_norm.forward(&query)?;
            key = key_norm.forward(&key)?;
        }
        if let Some(clip) = self.clip {
            query = query.f_clamp(-clip, clip)?;
            key = key.f_clamp(-clip, clip)?;
            value = value.f_clamp(-clip, clip)?;
        }
        let query = angles.rotate(&query.f_view([rows, self.heads, self.head_dim])?)?;
        let key = angles.rotate(&key.f_view([rows, self.kv_heads, self.head_dim])?)?;
        let value = value.f_view([rows, self.kv_heads, self.head_dim])?;
        let mut outputs = Vec::with_capacity(spans.len());
        for span in spans {
            let part = |x: &Tensor| x.f_narrow(0, span.first, span.rows)?.f_transpose(0, 1);
            let past = span.cache.length();
            // The first position that any row of the span can see.
            let from = self.window.map_or(0, |window| (past + 1 - window).max(0));
            let (keys, values) = span.cache.extend(layer, &part(&key)?, &part(&value)?, from)?;
            outputs.push(self.attend(&part(&query)?, &keys, &values, past - from)?);
        }
        self.output.forward(&Tensor::f_cat(&outputs, 0)?)
    }

    /// `query`: heads x rows x dim; `keys`, `values`: kv heads x positions x dim, of which `past`
    /// lie before the first row. Returns rows x (heads dim).
    fn attend(&self, query: &Tensor, keys: &Tensor, values: &Tensor, past: i64) -> Result<Tensor, TchError> {
        let rows = query.size()[1];
        let positions = keys.size()[1];
        let group = self.heads / self.kv_heads;
        let width = self.heads * self.head_dim;
        if rows == 1 {
            // One row sees all that is given: the heads that share keys become rows, so that
            // keys and values need not be repeated for them.
            let query = query.f_reshape([1, self.kv_heads, group, self.head_dim])?;
            let output = dot_product(&query, keys, values, None, false)?;
            return output.f_reshape([1, width]);
        }
        let repeated = |x: &Tensor| {
            if group == 1 {
                Ok(x.shallow_clone())
            } else {
                x.f_repeat_interleave_self_int(group, 0, None)
            }
        };
        let (keys, values) = (repeated(keys)?, repeated(values)?);
        let query = query.f_unsqueeze(0)?;
        let narrow = self.window.is_some_and(|window| positions > window);
        let output = if past == 0 && !narrow {
            dot_product(&query, &keys, &values, None, true)?
        } else {
            let mask = self.mask(rows, positions, past, query.device())?;
            dot_product(&query, &keys, &values, Some(mask), false)?
        };
        output.f_squeeze_dim(0)?.f_transpose(0, 1)?.f_reshape([rows, width])
    }

    /// Which position each row sees: itself and what lies before it, as far as the window reaches.
    fn mask(&self, rows: i64, positions: i64, past: i64, device: Device) -> Result<Tensor, TchError> {
        let seen = Tensor::f_ones([rows, positions], (Kind::Bool, device))?.f_tril(past)?;
        match self.window {
            None => Ok(seen),
            Some(window) => seen.f_triu(past + 1 - window),
        }
    }
}

/// softmax(q k' / sqrt(dim)) v; the batch dimension of keys and values is added.
fn dot_product(
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    mask: Option<Tensor>,
    causal: bool,
) -> Result<Tensor, TchError> {
    let (keys, values) = (keys.f_unsqueeze(0)?, values.f_unsqueeze(0)?);
    Tensor::f_scaled_dot_product_attention(query, &keys, &values, mask, 0.0, causal, None, false)
}
