//! Attention of one layer: from normed rows to the rows that are added to the residual stream.

use super::ForwardError;
use crate::backend::{Backend, BackendError, ResidentPart};

/// Attention of one layer.
pub(super) enum Attention<B: Backend> {
    Grouped(GroupedQueryAttention<B>),
    Latent(LatentAttention<B>),
}

/// Grouped-query attention (Ainslie et al., arXiv 2305.13245), including multi-head and multi-query attention.
pub(super) struct GroupedQueryAttention<B: Backend> {
    /// Query, key and value projections, stacked.
    pub(super) projection: B::Linear,
    pub(super) output: B::Linear,
    /// Norms of the whole query and key rows, before they are split into heads (OLMoE).
    pub(super) norms: Option<(B::Norm, B::Norm)>,
    /// Bound of queries, keys and values.
    pub(super) clip: Option<f64>,
    /// Attention sink logit of each head (gpt-oss).
    pub(super) sinks: Option<B::Vector>,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
///
/// As in the paper, the KV cache holds per token the normed latent and one rotated key for all heads, nothing else.
pub(super) struct LatentAttention<B: Backend> {
    /// Stacked projections of a hidden state: to queries or their latent, to the keys' and values' latent, to the rotated
    /// key.
    pub(super) projection: B::Linear,
    /// Outputs of the first of these projections.
    pub(super) query_dim: usize,
    /// Norm of the queries' latent and projection from it to the queries, if queries have a latent.
    pub(super) query: Option<(B::Norm, B::Linear)>,
    pub(super) latent_norm: B::Norm,
    /// Projections from the latent to each head's keys and values.
    pub(super) up_projections: B::UpProjections,
    pub(super) output: B::Linear,
    pub(super) latent_dim: usize,
    pub(super) nope_dim: usize,
    pub(super) rope_dim: usize,
}

impl<B: Backend> Attention<B> {
    /// Returns the bytes of the weights.
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
                outer + query + attention.latent_norm.bytes() + attention.up_projections.bytes()
            }
        }
    }
}

/// State of an iteration that attention needs in addition to the rows.
pub(super) struct AttentionContext<'a, B: Backend> {
    pub(super) ops: &'a B,
    pub(super) pages: &'a mut B::Pages,
    /// `None` if the model has no rotary embedding.
    pub(super) angles: Option<&'a B::Angles>,
    pub(super) spans: &'a B::PreparedSpans,
}

impl<B: Backend> AttentionContext<'_, B> {
    /// Rotates every head of `tensors`, queries and keys, whose heads have `head_dims` elements.
    fn rotate(&self, tensors: [B::Tensor; 2], head_dims: [usize; 2]) -> Result<[B::Tensor; 2], BackendError> {
        match self.angles {
            Some(angles) => self.ops.rotate_pair(angles, tensors, head_dims),
            None => Ok(tensors),
        }
    }
}

impl<B: Backend> Attention<B> {
    /// Computes attention of `x`: rows x hidden, the rows of all spans concatenated.
    pub(super) fn forward(
        &self,
        layer: usize,
        x: &B::Tensor,
        context: &mut AttentionContext<'_, B>,
    ) -> Result<B::Tensor, ForwardError> {
        match self {
            Self::Grouped(attention) => attention.forward(layer, x, context),
            Self::Latent(attention) => attention.forward(layer, x, context),
        }
    }
}

impl<B: Backend> GroupedQueryAttention<B> {
    fn forward(
        &self,
        layer: usize,
        x: &B::Tensor,
        context: &mut AttentionContext<'_, B>,
    ) -> Result<B::Tensor, ForwardError> {
        let ops = context.ops;
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
        let [query, key] = context.rotate([query, key], [self.head_dim; 2])?;
        let sinks = self.sinks.as_ref();
        let attended = ops.attend(context.pages, layer, [query, key, value], sinks, context.spans)?;
        Ok(ops.linear(&self.output, &attended)?)
    }
}

impl<B: Backend> LatentAttention<B> {
    fn forward(
        &self,
        layer: usize,
        x: &B::Tensor,
        context: &mut AttentionContext<'_, B>,
    ) -> Result<B::Tensor, ForwardError> {
        let ops = context.ops;
        let projected = ops.linear(&self.projection, x)?;
        let widths = [self.query_dim, self.latent_dim, self.rope_dim];
        let [mut query, latent, key] = ops.split(projected, widths)?;
        if let Some((norm, up)) = &self.query {
            query = ops.linear(up, &ops.norm(norm, &query)?)?;
        }
        let head_dims = [self.nope_dim + self.rope_dim, self.rope_dim];
        let [query, key] = context.rotate([query, key], head_dims)?;
        let latent = ops.norm(&self.latent_norm, &latent)?;
        let inputs = [query, latent, key];
        let attended =
            ops.attend_latent(context.pages, layer, &self.up_projections, inputs, context.spans)?;
        Ok(ops.linear(&self.output, &attended)?)
    }
}
