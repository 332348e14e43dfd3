//! Attention by LibTorch's scaled dot product, sequence by sequence, over keys and values gathered from their pages.

use crate::error::Refused;
use crate::heads::HeadProjections;
use crate::pages::TorchPages;
use main_model_fn::backend::{BackendError, Held, Span};
use remoe_kernels::AttentionShape;
use tch::{Device, Kind, TchError, Tensor};

/// Up-projections and sizes of one layer's latent attention.
pub struct LatentHeads {
    pub(crate) projections: HeadProjections,
    pub(crate) heads: i64,
    pub(crate) nope_dim: i64,
    pub(crate) rope_dim: i64,
    pub(crate) latent_dim: i64,
}

impl Held for LatentHeads {
    fn bytes(&self) -> usize {
        self.projections.bytes()
    }
}

/// Bounds on what a row sees, in addition to the causal rule.
struct Visibility {
    /// Positions before the first row.
    past: i64,
    /// A token sees itself and the `window` - 1 before it.
    window: Option<i64>,
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

/// Grouped-query attention. Query, key and value: rows x (heads x elements); `sinks`: heads.
pub(crate) fn grouped(
    pages: &mut TorchPages,
    layer: usize,
    [query, key, value]: &[Tensor; 3],
    sinks: Option<&Tensor>,
    spans: &[Span],
) -> Result<Tensor, TchError> {
    let shape = pages.layers[layer].paged.shape;
    let rows = query.size()[0];
    let dim = shape.key_dim as i64;
    let heads = |x: &Tensor, heads: usize| x.f_reshape([rows, heads as i64, dim]);
    let (query, key, value) =
        (heads(query, shape.heads())?, heads(key, shape.kv_heads)?, heads(value, shape.kv_heads)?);
    let mut outputs = Vec::with_capacity(spans.len());
    for span in spans {
        let part = |x: &Tensor| x.f_narrow(0, span.first as i64, span.rows as i64)?.f_transpose(0, 1);
        // The first position that any row of the span can see.
        let from = shape.window.map_or(0, |window| (span.past + 1).saturating_sub(window));
        let (keys, values) =
            pages.extend(layer, &span.tables, span.past, &part(&key)?, &part(&value)?, from)?;
        let past = (span.past - from) as i64;
        outputs.push(match sinks {
            None => attend_grouped(&shape, &part(&query)?, &keys, &values, past)?,
            Some(sinks) => attend_with_sinks(&shape, &part(&query)?, [&keys, &values], sinks, past)?,
        });
    }
    Tensor::f_cat(&outputs, 0)
}

/// `query`: heads x rows x dim; `keys`, `values`: kv heads x positions x dim, of which `past` lie before the first
/// row. Returns rows x (heads dim).
fn attend_grouped(
    shape: &AttentionShape,
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    past: i64,
) -> Result<Tensor, TchError> {
    let (kv_heads, group, dim) = (shape.kv_heads as i64, shape.group as i64, shape.key_dim as i64);
    if query.size()[1] == 1 {
        // One row sees all that is given: the heads that share keys become rows, so that
        // keys and values need not be repeated for them.
        let query = query.f_reshape([1, kv_heads, group, dim])?;
        let output = dot_product(&query, keys, values, shape.scale, None, false)?;
        return output.f_reshape([1, kv_heads * group * dim]);
    }
    let repeated = |x: &Tensor| match group {
        1 => Ok(x.shallow_clone()),
        _ => x.f_repeat_interleave_self_int(group, 0, None),
    };
    let visibility = Visibility { past, window: shape.window.map(|window| window as i64) };
    attend(query, &repeated(keys)?, &repeated(values)?, shape.scale, &visibility)
}

/// As [`attend_grouped`], with `sinks`: one more position, whose key and value are zero and whose score is the sink.
fn attend_with_sinks(
    shape: &AttentionShape,
    query: &Tensor,
    keys_values: [&Tensor; 2],
    sinks: &Tensor,
    past: i64,
) -> Result<Tensor, TchError> {
    let (heads, rows, positions) = (query.size()[0], query.size()[1], keys_values[0].size()[1]);
    let extended = |x: &Tensor| {
        let repeated = x.f_repeat_interleave_self_int(shape.group as i64, 0, None)?;
        Tensor::f_cat(&[&repeated, &repeated.f_narrow(1, 0, 1)?.f_zeros_like()?], 1)
    };
    let (keys, values) = (extended(keys_values[0])?, extended(keys_values[1])?);
    let seen = Tensor::f_ones([rows, positions], (Kind::Bool, query.device()))?.f_tril(past)?;
    let seen = match shape.window {
        None => seen,
        Some(window) => seen.f_triu(past + 1 - window as i64)?,
    };
    let scores = Tensor::f_zeros([rows, positions], (query.f_kind()?, query.device()))?
        .f_masked_fill(&seen.f_logical_not()?, f64::NEG_INFINITY)?;
    let scores = scores.f_unsqueeze(0)?.f_expand([heads, rows, positions], false)?;
    let sinks = sinks.f_reshape([heads, 1, 1])?.f_expand([heads, rows, 1], false)?;
    let mask = Tensor::f_cat(&[scores, sinks], -1)?.f_unsqueeze(0)?;
    let output = dot_product(&query.f_unsqueeze(0)?, &keys, &values, shape.scale, Some(mask), false)?;
    output.f_squeeze_dim(0)?.f_transpose(0, 1)?.f_reshape([rows, -1])
}

impl LatentHeads {
    /// Latent attention. `query`: rows x heads x (nope and rotated elements), `latent`: rows x latent, `key`: rows x
    /// rotated elements. Several rows at once expand the latents to keys and values; the single rows of all
    /// sequences go through the up-projections together and work on the latents themselves.
    pub(crate) fn attend(
        &self,
        pages: &mut TorchPages,
        layer: usize,
        query: &Tensor,
        latent: &Tensor,
        key: &Tensor,
        spans: &[Span],
    ) -> Result<Tensor, BackendError> {
        let scale = pages.layers[layer].paged.shape.scale;
        let rows = query.size()[0];
        let query = query.f_reshape([rows, self.heads, self.nope_dim + self.rope_dim]).told()?;
        let plain = query.f_narrow(-1, 0, self.nope_dim).told()?;
        let rotated = query.f_narrow(-1, self.nope_dim, self.rope_dim).told()?;
        // 1 x rows x (latent and rotated part): what the cache holds of a token.
        let entries = Tensor::f_cat(&[latent, key], -1).told()?.f_unsqueeze(0).told()?;
        let nothing = entries.f_narrow(-1, 0, 0).told()?;
        let single: Vec<i64> =
            spans.iter().filter(|span| span.rows == 1).map(|span| span.first as i64).collect();
        let absorbed = self.absorbed_queries(&plain, &rotated, &single)?;
        let mut outputs = Vec::with_capacity(spans.len());
        let mut mixed = Vec::with_capacity(single.len());
        for span in spans {
            let own = |x: &Tensor| x.f_narrow(1, span.first as i64, span.rows as i64).told();
            let (new, values) = (own(&entries)?, own(&nothing)?);
            let (entries, _) = pages.extend(layer, &span.tables, span.past, &new, &values, 0).told()?;
            match (&absorbed, span.rows) {
                (Some(queries), 1) => {
                    let query = queries.f_narrow(1, mixed.len() as i64, 1).told()?;
                    mixed.push(self.attend_absorbed(&query, &entries, scale).told()?);
                }
                _ => {
                    let heads_first =
                        |x: &Tensor| x.f_narrow(0, span.first as i64, span.rows as i64)?.f_transpose(0, 1);
                    let (plain, rotated) = (heads_first(&plain).told()?, heads_first(&rotated).told()?);
                    let past = span.past as i64;
                    let output = self.attend_expanded(&plain, &rotated, &entries, past, scale)?;
                    outputs.push((span.first as i64, output));
                }
            }
        }
        if !mixed.is_empty() {
            let values = self.projections.release(&Tensor::f_cat(&mixed, 1).told()?)?;
            let rows = values.f_transpose(0, 1).told()?.f_reshape([single.len() as i64, -1]).told()?;
            for (row, &first) in (0..).zip(&single) {
                outputs.push((first, rows.f_narrow(0, row, 1).told()?));
            }
        }
        outputs.sort_by_key(|(first, _)| *first);
        let outputs: Vec<Tensor> = outputs.into_iter().map(|(_, output)| output).collect();
        Tensor::f_cat(&outputs, 0).told()
    }

    /// The queries of the rows `single` with the keys' up-projection absorbed: heads x rows x (latent and
    /// rotated part); none without such rows. `plain`, `rotated`: rows x heads x dim.
    fn absorbed_queries(
        &self,
        plain: &Tensor,
        rotated: &Tensor,
        single: &[i64],
    ) -> Result<Option<Tensor>, BackendError> {
        if single.is_empty() {
            return Ok(None);
        }
        let rows = Tensor::f_from_slice(single).told()?.f_to_device(plain.device()).told()?;
        let heads_first = |x: &Tensor| x.f_index_select(0, &rows)?.f_transpose(0, 1);
        let absorbed = self.projections.absorb(&heads_first(plain).told()?)?;
        Ok(Some(Tensor::f_cat(&[absorbed, heads_first(rotated).told()?], -1).told()?))
    }

    /// Returns the latents as a row's heads mix them, heads x 1 x latent. `query`: heads x 1 x (latent and rotated
    /// part); `entries`: 1 x positions x (latent and rotated part).
    fn attend_absorbed(&self, query: &Tensor, entries: &Tensor, scale: f64) -> Result<Tensor, TchError> {
        // All heads share the entries: they become the rows of one head.
        let query = query.f_transpose(0, 1)?.f_unsqueeze(0)?;
        let latents = entries.f_narrow(-1, 0, self.latent_dim)?;
        let mixed = dot_product(&query, entries, &latents, scale, None, false)?;
        mixed.f_reshape([self.heads, 1, self.latent_dim])
    }

    /// `plain`, `rotated`: heads x rows x dim.
    fn attend_expanded(
        &self,
        plain: &Tensor,
        rotated: &Tensor,
        entries: &Tensor,
        past: i64,
        scale: f64,
    ) -> Result<Tensor, BackendError> {
        let positions = entries.size()[1];
        let latents = entries.f_narrow(-1, 0, self.latent_dim).told()?.f_squeeze_dim(0).told()?;
        let shared = entries.f_narrow(-1, self.latent_dim, self.rope_dim).told()?;
        let shared = shared.f_expand([self.heads, positions, self.rope_dim], false).told()?;
        let keys = Tensor::f_cat(&[self.projections.keys(&latents)?, shared], -1).told()?;
        let values = self.projections.values(&latents)?;
        let query = Tensor::f_cat(&[plain, rotated], -1).told()?;
        attend(&query, &keys, &values, scale, &Visibility { past, window: None }).told()
    }
}

/// softmax(scale q k') v for several rows. `query`: heads x rows x dim; `keys`, `values`: heads x
/// positions x dim. Returns rows x (heads value-dim).
fn attend(
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
fn dot_product(
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
