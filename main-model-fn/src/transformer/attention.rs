//! The attention of one layer, from the normed rows to what is added to them.

use super::ForwardError;
use crate::backend::{Backend, BackendError, ResidentPart};

/// Either kind of attention.
pub(super) enum Attention<B: Backend> {
    Grouped(GroupedQueryAttention<B>),
    Latent(LatentAttention<B>),
}

/// Grouped-query attention (Ainslie et al., arXiv 2305.13245), multi-head and multi-query included.
pub(super) struct GroupedQueryAttention<B: Backend> {
    /// Queries, keys and values, one after the other.
    pub(super) projection: B::Linear,
    pub(super) output: B::Linear,
    /// Normalisation of the whole query and key rows, before they are cut into heads (OLMoE).
    pub(super) norms: Option<(B::Norm, B::Norm)>,
    pub(super) clip: Option<f64>,
    /// One element for each head (gpt-oss).
    pub(super) sinks: Option<B::Vector>,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). The cache holds what the paper promises
/// and no more: per token the normalised latent and one rotated key part for all heads.
pub(super) struct LatentAttention<B: Backend> {
    /// hidden -> queries (or their latent), then the keys' and values' latent and the rotated key part.
    pub(super) projection: B::Linear,
    /// Elements of the first of these three.
    pub(super) query_dim: usize,
    /// Where queries come through a latent of their own: its norm, and from it to the queries.
    pub(super) query: Option<(B::Norm, B::Linear)>,
    pub(super) latent_norm: B::Norm,
    /// Between the latents and the heads.
    pub(super) heads: B::Heads,
    pub(super) output: B::Linear,
    pub(super) latent_dim: usize,
    pub(super) nope_dim: usize,
    pub(super) rope_dim: usize,
}

impl<B: Backend> Attention<B> {
    /// Bytes of its weights.
    pub(super) fn weight_bytes(&self) -> usize {
        match self {
            Self::Grouped(attention) => {
                let norms = attention.norms.as_ref().map_or(0, |(query, key)| query.bytes() + key.bytes());
                let sinks = attention.sinks.as_ref().map_or(0, |_| attention.heads * size_of::<f32>());
                attention.projection.bytes() + attention.output.bytes() + norms + sinks
            }
            Self::Latent(attention) => {
                let query = attention.query.as_ref().map_or(0, |(norm, query)| norm.bytes() + query.bytes());
                let outer = attention.projection.bytes() + attention.output.bytes();
                outer + query + attention.latent_norm.bytes() + attention.heads.bytes()
            }
        }
    }
}

/// Context that the rows of an iteration attend with.
pub(super) struct AttentionContext<'a, B: Backend> {
    pub(super) ops: &'a B,
    pub(super) pages: &'a mut B::Pages,
    /// `None`: nothing is rotated.
    pub(super) angles: Option<&'a B::Angles>,
    pub(super) spans: &'a B::Spans,
}

impl<B: Backend> AttentionContext<'_, B> {
    /// Rotates every head of queries and keys, which have `head_dims` elements.
    fn rotate(&self, both: [B::Tensor; 2], head_dims: [usize; 2]) -> Result<[B::Tensor; 2], BackendError> {
        match self.angles {
            Some(angles) => self.ops.rotate_both(angles, both, head_dims),
            None => Ok(both),
        }
    }
}

impl<B: Backend> Attention<B> {
    /// `x`: rows x hidden, the rows of all spans one after the other.
    pub(super) fn forward(
        &self,
        layer: usize,
        x: &B::Tensor,
        at: &mut AttentionContext<'_, B>,
    ) -> Result<B::Tensor, ForwardError> {
        match self {
            Self::Grouped(attention) => attention.forward(layer, x, at),
            Self::Latent(attention) => attention.forward(layer, x, at),
        }
    }
}

impl<B: Backend> GroupedQueryAttention<B> {
    fn forward(
        &self,
        layer: usize,
        x: &B::Tensor,
        at: &mut AttentionContext<'_, B>,
    ) -> Result<B::Tensor, ForwardError> {
        let ops = at.ops;
        let key_width = self.kv_heads * self.head_dim;
        let projected = ops.linear(&self.projection, x)?;
        let widths = [self.heads * self.head_dim, key_width, key_width];
        let [mut query, mut key, mut value] = ops.split(projected, widths)?;
        if let Some((query_norm, key_norm)) = &self.norms {
            query = ops.norm(query_norm, &query)?;
            key = ops.norm(key_norm, &key)?;
        }
        if let Some(clip) = self.clip {
            query = ops.clamp(query, clip)?;
            key = ops.clamp(key, clip)?;
            value = ops.clamp(value, clip)?;
        }
        let [query, key] = at.rotate([query, key], [self.head_dim; 2])?;
        let mixed = ops.attend(at.pages, layer, [query, key, value], self.sinks.as_ref(), at.spans)?;
        Ok(ops.linear(&self.output, &mixed)?)
    }
}

impl<B: Backend> LatentAttention<B> {
    fn forward(
        &self,
        layer: usize,
        x: &B::Tensor,
        at: &mut AttentionContext<'_, B>,
    ) -> Result<B::Tensor, ForwardError> {
        let ops = at.ops;
        let projected = ops.linear(&self.projection, x)?;
        let widths = [self.query_dim, self.latent_dim, self.rope_dim];
        let [mut query, latent, key] = ops.split(projected, widths)?;
        if let Some((norm, up)) = &self.query {
            query = ops.linear(up, &ops.norm(norm, &query)?)?;
        }
        let head_dims = [self.nope_dim + self.rope_dim, self.rope_dim];
        let [query, key] = at.rotate([query, key], head_dims)?;
        let latent = ops.norm(&self.latent_norm, &latent)?;
        let mixed = ops.attend_latent(at.pages, layer, &self.heads, [query, latent, key], at.spans)?;
        Ok(ops.linear(&self.output, &mixed)?)
    }
}
