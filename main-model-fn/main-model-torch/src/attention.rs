//! Attention by LibTorch's scaled dot product, sequence by sequence, over keys and values gathered from their pages.

use crate::heads::HeadProjections;
use crate::library::{Device, Kind, Tensor};
use crate::pages::TorchPages;
use main_model_fn::backend::{BackendError, Held, Span};
use remoe_kernels::AttentionShape;
use std::sync::Arc;

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
    fn mask(&self, rows: i64, positions: i64, device: &Arc<Device>) -> Result<Option<Tensor>, BackendError> {
        let narrow = self.window.is_some_and(|window| positions > window);
        if self.past == 0 && !narrow {
            return Ok(None);
        }
        let seen = Tensor::ones(device, &[rows, positions], Kind::Bool)?.tril(self.past)?;
        match self.window {
            None => Ok(Some(seen)),
            Some(window) => Ok(Some(seen.triu(self.past + 1 - window)?)),
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
) -> Result<Tensor, BackendError> {
    let shape = pages.layers[layer].paged.shape;
    let rows = query.size()[0];
    let dim = shape.key_dim as i64;
    let heads = |x: &Tensor, heads: usize| x.reshape(&[rows, heads as i64, dim]);
    let (query, key, value) =
        (heads(query, shape.heads())?, heads(key, shape.kv_heads)?, heads(value, shape.kv_heads)?);
    let mut outputs = Vec::with_capacity(spans.len());
    for span in spans {
        let part = |x: &Tensor| x.narrow(0, span.first as i64, span.rows as i64)?.transpose(0, 1);
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
    Tensor::cat(&outputs.iter().collect::<Vec<_>>(), 0)
}

/// `query`: heads x rows x dim; `keys`, `values`: kv heads x positions x dim, of which `past` lie before the first
/// row. Returns rows x (heads dim).
fn attend_grouped(
    shape: &AttentionShape,
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    past: i64,
) -> Result<Tensor, BackendError> {
    let (kv_heads, group, dim) = (shape.kv_heads as i64, shape.group as i64, shape.key_dim as i64);
    if query.size()[1] == 1 {
        // One row sees all that is given: the heads that share keys become rows, so that
        // keys and values need not be repeated for them.
        let query = query.reshape(&[1, kv_heads, group, dim])?;
        let output = dot_product(&query, keys, values, shape.scale, None, false)?;
        return output.reshape(&[1, kv_heads * group * dim]);
    }
    let repeated = |x: &Tensor| match group {
        1 => Ok(x.alias()),
        _ => x.repeat_interleave(group, 0),
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
) -> Result<Tensor, BackendError> {
    let (heads, rows, positions) = (query.size()[0], query.size()[1], keys_values[0].size()[1]);
    let extended = |x: &Tensor| {
        let repeated = x.repeat_interleave(shape.group as i64, 0)?;
        Tensor::cat(&[&repeated, &repeated.narrow(1, 0, 1)?.mul_scalar(0.0)?], 1)
    };
    let (keys, values) = (extended(keys_values[0])?, extended(keys_values[1])?);
    let seen = Tensor::ones(query.device(), &[rows, positions], Kind::Bool)?.tril(past)?;
    let seen = match shape.window {
        None => seen,
        Some(window) => seen.triu(past + 1 - window as i64)?,
    };
    let scores = Tensor::zeros(query.device(), &[rows, positions], query.kind())?
        .masked_fill(&seen.logical_not()?, f64::NEG_INFINITY)?;
    let scores = scores.unsqueeze(0)?.expand(&[heads, rows, positions])?;
    let sinks = sinks.reshape(&[heads, 1, 1])?.expand(&[heads, rows, 1])?;
    let mask = Tensor::cat(&[&scores, &sinks], -1)?.unsqueeze(0)?;
    let output = dot_product(&query.unsqueeze(0)?, &keys, &values, shape.scale, Some(mask), false)?;
    output.squeeze_dim(0)?.transpose(0, 1)?.reshape(&[rows, -1])
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
        let query = query.reshape(&[rows, self.heads, self.nope_dim + self.rope_dim])?;
        let plain = query.narrow(-1, 0, self.nope_dim)?;
        let rotated = query.narrow(-1, self.nope_dim, self.rope_dim)?;
        // 1 x rows x (latent and rotated part): what the cache holds of a token.
        let entries = Tensor::cat(&[latent, key], -1)?.unsqueeze(0)?;
        let nothing = entries.narrow(-1, 0, 0)?;
        let single: Vec<i64> =
            spans.iter().filter(|span| span.rows == 1).map(|span| span.first as i64).collect();
        let absorbed = self.absorbed_queries(&plain, &rotated, &single)?;
        let mut outputs = Vec::with_capacity(spans.len());
        let mut mixed = Vec::with_capacity(single.len());
        for span in spans {
            let own = |x: &Tensor| x.narrow(1, span.first as i64, span.rows as i64);
            let (new, values) = (own(&entries)?, own(&nothing)?);
            let (entries, _) = pages.extend(layer, &span.tables, span.past, &new, &values, 0)?;
            match (&absorbed, span.rows) {
                (Some(queries), 1) => {
                    let query = queries.narrow(1, mixed.len() as i64, 1)?;
                    mixed.push(self.attend_absorbed(&query, &entries, scale)?);
                }
                _ => {
                    let heads_first =
                        |x: &Tensor| x.narrow(0, span.first as i64, span.rows as i64)?.transpose(0, 1);
                    let (plain, rotated) = (heads_first(&plain)?, heads_first(&rotated)?);
                    let past = span.past as i64;
                    let output = self.attend_expanded(&plain, &rotated, &entries, past, scale)?;
                    outputs.push((span.first as i64, output));
                }
            }
        }
        if !mixed.is_empty() {
            let values = self.projections.release(&Tensor::cat(&mixed.iter().collect::<Vec<_>>(), 1)?)?;
            let rows = values.transpose(0, 1)?.reshape(&[single.len() as i64, -1])?;
            for (row, &first) in (0..).zip(&single) {
                outputs.push((first, rows.narrow(0, row, 1)?));
            }
        }
        outputs.sort_by_key(|(first, _)| *first);
        let outputs: Vec<Tensor> = outputs.into_iter().map(|(_, output)| output).collect();
        Tensor::cat(&outputs.iter().collect::<Vec<_>>(), 0)
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
        let rows = Tensor::from_slice(plain.device(), single)?;
        let heads_first = |x: &Tensor| x.index_select(0, &rows)?.transpose(0, 1);
        let absorbed = self.projections.absorb(&heads_first(plain)?)?;
        Ok(Some(Tensor::cat(&[&absorbed, &heads_first(rotated)?], -1)?))
    }

    /// Returns the latents as a row's heads mix them, heads x 1 x latent. `query`: heads x 1 x (latent and rotated
    /// part); `entries`: 1 x positions x (latent and rotated part).
    fn attend_absorbed(&self, query: &Tensor, entries: &Tensor, scale: f64) -> Result<Tensor, BackendError> {
        // All heads share the entries: they become the rows of one head.
        let query = query.transpose(0, 1)?.unsqueeze(0)?;
        let latents = entries.narrow(-1, 0, self.latent_dim)?;
        let mixed = dot_product(&query, entries, &latents, scale, None, false)?;
        mixed.reshape(&[self.heads, 1, self.latent_dim])
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
        let latents = entries.narrow(-1, 0, self.latent_dim)?.squeeze_dim(0)?;
        let shared = entries.narrow(-1, self.latent_dim, self.rope_dim)?;
        let shared = shared.expand(&[self.heads, positions, self.rope_dim])?;
        let keys = Tensor::cat(&[&self.projections.keys(&latents)?, &shared], -1)?;
        let values = self.projections.values(&latents)?;
        let query = Tensor::cat(&[plain, rotated], -1)?;
        attend(&query, &keys, &values, scale, &Visibility { past, window: None })
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
) -> Result<Tensor, BackendError> {
    let rows = query.size()[1];
    let mask = visibility.mask(rows, keys.size()[1], query.device())?;
    let causal = mask.is_none();
    let output = dot_product(&query.unsqueeze(0)?, keys, values, scale, mask, causal)?;
    output.squeeze_dim(0)?.transpose(0, 1)?.reshape(&[rows, -1])
}

/// Scaled dot-product attention; the batch dimension of keys and values is added.
fn dot_product(
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    scale: f64,
    mask: Option<Tensor>,
    causal: bool,
) -> Result<Tensor, BackendError> {
    let (keys, values) = (keys.unsqueeze(0)?, values.unsqueeze(0)?);
    Tensor::attend([query, &keys, &values], mask.as_ref(), causal, scale)
}
