//! Grouped-query attention (Ainslie et al., arXiv 2305.13245), multi-head and multi-query included.

use super::attention::{Span, Visibility, attend, dot_product};
use super::error::ForwardError;
use super::linear::Linear;
use super::norm::RmsNorm;
use super::rope::Angles;
use tch::{TchError, Tensor};

/// Projections and facts of one layer.
pub(crate) struct GroupedQueryAttention {
    /// Queries, keys and values, one after the other.
    pub(crate) projection: Linear,
    pub(crate) output: Linear,
    /// Normalisation of the whole query and key rows, before they are cut into heads (OLMoE).
    pub(crate) norms: Option<(RmsNorm, RmsNorm)>,
    pub(crate) clip: Option<f64>,
    pub(crate) heads: i64,
    pub(crate) kv_heads: i64,
    pub(crate) head_dim: i64,
    pub(crate) scale: f64,
    pub(crate) window: Option<i64>,
}

impl GroupedQueryAttention {
    /// See [`super::attention::Attention::forward`].
    pub(crate) fn forward(
        &self,
        layer: usize,
        x: &Tensor,
        angles: &Angles,
        spans: &mut [Span<'_>],
    ) -> Result<Tensor, ForwardError> {
        let rows = x.size()[0];
        let projected = self.projection.forward(x)?;
        let (query_width, key_width) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut query = projected.f_narrow(1, 0, query_width)?;
        let mut key = projected.f_narrow(1, query_width, key_width)?;
        let mut value = projected.f_narrow(1, query_width + key_width, key_width)?;
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
        let group = self.heads / self.kv_heads;
        if query.size()[1] == 1 {
            // One row sees all that is given: the heads that share keys become rows, so that
            // keys and values need not be repeated for them.
            let query = query.f_reshape([1, self.kv_heads, group, self.head_dim])?;
            let output = dot_product(&query, keys, values, self.scale, None, false)?;
            return output.f_reshape([1, self.heads * self.head_dim]);
        }
        let repeated = |x: &Tensor| match group {
            1 => Ok(x.shallow_clone()),
            _ => x.f_repeat_interleave_self_int(group, 0, None),
        };
        let visibility = Visibility { past, window: self.window };
        attend(query, &repeated(keys)?, &repeated(values)?, self.scale, &visibility)
    }
}
