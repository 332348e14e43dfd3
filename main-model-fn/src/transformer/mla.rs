//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
//!
//! The cache holds what the paper promises and no more: per token the normalised latent and one
//! rotated key part for all heads. Several rows at once expand the latents to keys and values; a
//! single row works on the latents themselves, with the up-projections absorbed into query and
//! output, so that decoding reads the cache once and expands nothing. The single rows of all sequences
//! go through the up-projections together.

use super::attention::{Span, Visibility, attend, dot_product};
use super::error::ForwardError;
use super::heads::HeadProjections;
use super::linear::Linear;
use super::norm::RmsNorm;
use super::rope::Angles;
use tch::{TchError, Tensor};

/// Projections and facts of one layer.
pub(crate) struct LatentAttention {
    /// hidden -> queries (or their latent), then the keys' and values' latent and the rotated key
    /// part, one after the other.
    pub(crate) projection: Linear,
    /// Where queries come through a latent of their own.
    pub(crate) query: Option<LatentQuery>,
    pub(crate) latent_norm: RmsNorm,
    /// From the latents to the heads.
    pub(crate) projections: HeadProjections,
    pub(crate) output: Linear,
    pub(crate) heads: i64,
    pub(crate) latent_dim: i64,
    pub(crate) nope_dim: i64,
    pub(crate) rope_dim: i64,
    pub(crate) scale: f64,
}

/// From the queries' latent to the queries.
pub(crate) struct LatentQuery {
    pub(crate) norm: RmsNorm,
    pub(crate) up: Linear,
}

impl LatentAttention {
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
        let compressed_dim = self.latent_dim + self.rope_dim;
        let query_dim = projected.size()[1] - compressed_dim;
        let query = projected.f_narrow(1, 0, query_dim)?;
        let query = match &self.query {
            None => query,
            Some(LatentQuery { norm, up }) => up.forward(&norm.forward(&query)?)?,
        };
        let query = query.f_view([rows, self.heads, self.nope_dim + self.rope_dim])?;
        let plain = query.f_narrow(-1, 0, self.nope_dim)?;
        let rotated = angles.rotate(&query.f_narrow(-1, self.nope_dim, self.rope_dim)?)?;
        let compressed = projected.f_narrow(1, query_dim, compressed_dim)?;
        let latent = self.latent_norm.forward(&compressed.f_narrow(-1, 0, self.latent_dim)?)?;
        let key_part = compressed.f_narrow(-1, self.latent_dim, self.rope_dim)?.f_unsqueeze(1)?;
        let key_part = angles.rotate(&key_part)?;
        // 1 x rows x (latent and rotated part): what the cache holds of a token.
        let entries = Tensor::f_cat(&[latent.f_unsqueeze(1)?, key_part], -1)?.f_transpose(0, 1)?;
        let nothing = entries.f_narrow(-1, 0, 0)?;
        let single: Vec<i64> = spans.iter().filter(|span| span.rows == 1).map(|span| span.first).collect();
        let absorbed = self.absorbed_queries(&plain, &rotated, &single)?;
        let mut outputs = Vec::with_capacity(spans.len());
        let mut mixed = Vec::with_capacity(single.len());
        for span in spans.iter_mut() {
            let new = entries.f_narrow(1, span.first, span.rows)?;
            let past = span.cache.length();
            let values = nothing.f_narrow(1, span.first, span.rows)?;
            let (entries, _) = span.cache.extend(layer, &new, &values, 0)?;
            match (&absorbed, span.rows) {
                (Some(queries), 1) => {
                    let query = queries.f_narrow(1, mixed.len() as i64, 1)?;
                    mixed.push(self.attend_absorbed(&query, &entries)?);
                }
                _ => {
                    let heads_first = |x: &Tensor| x.f_narrow(0, span.first, span.rows)?.f_transpose(0, 1);
                    let (plain, rotated) = (heads_first(&plain)?, heads_first(&rotated)?);
                    outputs.push((span.first, self.attend_expanded(&plain, &rotated, &entries, past)?));
                }
            }
        }
        if !mixed.is_empty() {
            let values = self.projections.release(&Tensor::f_cat(&mixed, 1)?)?;
            let rows = values.f_transpose(0, 1)?.f_reshape([single.len() as i64, -1])?;
            for (row, &first) in (0..).zip(&single) {
                outputs.push((first, rows.f_narrow(0, row, 1)?));
            }
        }
        outputs.sort_by_key(|(first, _)| *first);
        let outputs: Vec<Tensor> = outputs.into_iter().map(|(_, output)| output).collect();
        self.output.forward(&Tensor::f_cat(&outputs, 0)?)
    }

    /// The queries of the rows `single` with the keys' up-projection absorbed: heads x rows x (latent and
    /// rotated part); none without such rows. `plain`, `rotated`: rows x heads x dim.
    fn absorbed_queries(
        &self,
        plain: &Tensor,
        rotated: &Tensor,
        single: &[i64],
    ) -> Result<Option<Tensor>, ForwardError> {
        if single.is_empty() {
            return Ok(None);
        }
        let rows = Tensor::f_from_slice(single)?.f_to_device(plain.device())?;
        let heads_first = |x: &Tensor| x.f_index_select(0, &rows)?.f_transpose(0, 1);
        let absorbed = self.projections.absorb(&heads_first(plain)?)?;
        Ok(Some(Tensor::f_cat(&[absorbed, heads_first(rotated)?], -1)?))
    }

    /// What a row's heads mix of the latents, heads x 1 x latent. `query`: heads x 1 x (latent and rotated
    /// part); `entries`: 1 x positions x (latent and rotated part).
    fn attend_absorbed(&self, query: &Tensor, entries: &Tensor) -> Result<Tensor, TchError> {
        // All heads share the entries: they become the rows of one head.
        let query = query.f_transpose(0, 1)?.f_unsqueeze(0)?;
        let latents = entries.f_narrow(-1, 0, self.latent_dim)?;
        let mixed = dot_product(&query, entries, &latents, self.scale, None, false)?;
        mixed.f_reshape([self.heads, 1, self.latent_dim])
    }

    /// `plain`, `rotated`: heads x rows x dim.
    fn attend_expanded(
        &self,
        plain: &Tensor,
        rotated: &Tensor,
        entries: &Tensor,
        past: i64,
    ) -> Result<Tensor, ForwardError> {
        let positions = entries.size()[1];
        let latents = entries.f_narrow(-1, 0, self.latent_dim)?;
        let shared = entries.f_narrow(-1, self.latent_dim, self.rope_dim)?;
        let shared = shared.f_expand([self.heads, positions, self.rope_dim], false)?;
        let latents = latents.f_squeeze_dim(0)?;
        let keys = Tensor::f_cat(&[self.projections.keys(&latents)?, shared], -1)?;
        let values = self.projections.values(&latents)?;
        let query = Tensor::f_cat(&[plain, rotated], -1)?;
        Ok(attend(&query, &keys, &values, self.scale, &Visibility { past, window: None })?)
    }
}
