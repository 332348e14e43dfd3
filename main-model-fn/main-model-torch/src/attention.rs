//! Attention of all spans together by LibTorch's scaled dot product, over keys and values gathered from the slabs.
//!
//! Queries that share keys and values are arranged so that these are never repeated in memory ([`Arrangement`]). What
//! spans there are changes sizes, not the number of calls.

use crate::heads::HeadProjections;
use crate::library::Tensor;
use crate::pages::TorchPages;
use crate::spans::{Chunk, TorchSpans, View};
use main_model_fn::backend::{BackendError, ResidentPart};

/// Up-projections and sizes of one layer's latent attention.
pub struct LatentHeads {
    pub(crate) projections: HeadProjections,
    pub(crate) heads: i64,
    pub(crate) nope_dim: i64,
    pub(crate) rope_dim: i64,
    pub(crate) latent_dim: i64,
}

impl ResidentPart for LatentHeads {
    fn bytes(&self) -> usize {
        self.projections.bytes()
    }
}

/// Sizes of a layer's attention.
#[derive(Clone, Copy)]
struct AttentionSizes {
    kv_heads: i64,
    /// Queries for each of them.
    group: i64,
    key_dim: i64,
    value_dim: i64,
    /// First element of an entry's values.
    values_from: i64,
    scale: f64,
}

/// Most queries of one head in a decode step where all share keys: more heads keep more of the device busy.
const HEAD_ROWS: i64 = 16;

/// How queries become batch x heads x rows x elements, so that each meets its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arrangement {
    /// One row of each span: the queries that share keys are the rows of a head.
    Decode,
    /// As `Decode`, where all queries share keys: they are divided into so many heads.
    DecodeShared(i64),
    /// Several rows of one span: keys' heads are the batch, the queries that share them its heads.
    One,
    /// Several rows of several spans: all rows of the queries that share keys are the rows of a head.
    Several,
    /// Several rows where all queries share keys: each is a head.
    Shared,
}

impl Arrangement {
    fn of(chunk: &Chunk, sizes: &AttentionSizes) -> Self {
        match (chunk.rows, sizes.kv_heads, chunk.spans) {
            (1, 1, _) => {
                // Never one row for each of several heads: see `KERNEL_ROWS` of the spans.
                let rows = (2..=HEAD_ROWS).rev().find(|rows| sizes.group % rows == 0);
                Self::DecodeShared(sizes.group / rows.unwrap_or(sizes.group))
            }
            (1, ..) => Self::Decode,
            (_, 1, _) => Self::Shared,
            (_, _, 1) => Self::One,
            _ => Self::Several,
        }
    }

    /// Arranges `x`, (spans and rows) x (heads x elements).
    fn queries(self, x: &Tensor, chunk: &Chunk, sizes: &AttentionSizes) -> Result<Tensor, BackendError> {
        let AttentionSizes { kv_heads, group, key_dim, .. } = *sizes;
        let Chunk { spans, rows, .. } = *chunk;
        match self {
            Self::Decode => x.reshape(&[spans, kv_heads, group, key_dim]),
            Self::DecodeShared(heads) => x.reshape(&[spans, heads, group / heads, key_dim]),
            Self::One => x.reshape(&[rows, kv_heads, group, key_dim])?.permute(&[1, 2, 0, 3]),
            Self::Several => {
                let x = x.reshape(&[spans, rows, kv_heads, group, key_dim])?.permute(&[0, 2, 1, 3, 4])?;
                x.reshape(&[spans, kv_heads, rows * group, key_dim])
            }
            Self::Shared => x.reshape(&[spans, rows, group, key_dim])?.transpose(1, 2),
        }
    }

    /// Arranges keys or values, `x`: (spans and positions) x (heads x `dim`).
    fn shared(
        self,
        x: &Tensor,
        chunk: &Chunk,
        sizes: &AttentionSizes,
        dim: i64,
    ) -> Result<Tensor, BackendError> {
        let x = x.reshape(&[chunk.spans, chunk.positions, sizes.kv_heads, dim])?;
        match self {
            Self::Decode | Self::Several => x.transpose(1, 2),
            Self::DecodeShared(heads) => {
                x.transpose(1, 2)?.expand(&[chunk.spans, heads, chunk.positions, dim])
            }
            Self::Shared => x.transpose(1, 2)?.expand(&[chunk.spans, sizes.group, chunk.positions, dim]),
            Self::One => {
                let heads_first = x.permute(&[2, 0, 1, 3])?;
                heads_first.expand(&[sizes.kv_heads, sizes.group, chunk.positions, dim])
            }
        }
    }

    /// Brings outputs back to (spans and rows) x (heads x elements).
    fn outputs(self, x: &Tensor, chunk: &Chunk, sizes: &AttentionSizes) -> Result<Tensor, BackendError> {
        let AttentionSizes { kv_heads, group, value_dim, .. } = *sizes;
        let Chunk { spans, rows, .. } = *chunk;
        let rows_first = match self {
            Self::Decode | Self::DecodeShared(_) => x.alias(),
            Self::One => x.permute(&[2, 0, 1, 3])?,
            Self::Several => {
                x.reshape(&[spans, kv_heads, rows, group, value_dim])?.permute(&[0, 2, 1, 3, 4])?
            }
            Self::Shared => x.transpose(1, 2)?,
        };
        rows_first.reshape(&[spans * rows, kv_heads * group * value_dim])
    }

    /// Arranges one number for each head so that it meets the rows' of [`Self::queries`], whose sizes but the last are
    /// those of the second result.
    fn heads(
        self,
        x: &Tensor,
        chunk: &Chunk,
        sizes: &AttentionSizes,
    ) -> Result<(Tensor, Vec<i64>), BackendError> {
        let AttentionSizes { kv_heads, group, .. } = *sizes;
        let Chunk { spans, rows, .. } = *chunk;
        Ok(match self {
            Self::Decode => (x.reshape(&[1, kv_heads, group])?, vec![spans, kv_heads, group]),
            Self::DecodeShared(heads) => {
                (x.reshape(&[1, heads, group / heads])?, vec![spans, heads, group / heads])
            }
            Self::One => (x.reshape(&[kv_heads, group, 1])?, vec![kv_heads, group, rows]),
            Self::Several => (x.reshape(&[1, kv_heads, 1, group])?, vec![spans, kv_heads, rows, group]),
            Self::Shared => (x.reshape(&[1, group, 1])?, vec![spans, group, rows]),
        })
    }
}

/// Grouped-query attention. Query, key and value: rows x (heads x elements); `sinks`: heads, float32.
pub(crate) fn grouped(
    pages: &TorchPages,
    layer: usize,
    [query, key, value]: &[Tensor; 3],
    sinks: Option<&Tensor>,
    spans: &TorchSpans,
) -> Result<Tensor, BackendError> {
    let (placed, slab, [keys, values]) = pages.slab(layer)?;
    let shape = placed.paged.shape;
    let view = spans.view(&shape, placed.paged.page_table)?;
    slab.narrow(1, 0, keys)?.index_copy_(0, &view.written, key)?;
    slab.narrow(1, keys, values)?.index_copy_(0, &view.written, value)?;
    let sizes = AttentionSizes {
        kv_heads: shape.kv_heads as i64,
        group: shape.group as i64,
        key_dim: shape.key_dim as i64,
        value_dim: shape.value_dim as i64,
        values_from: keys,
        scale: shape.scale,
    };
    attend(view, &sizes, query, slab, sinks)
}

/// Returns rows x (heads x value elements) of `query`, rows x (heads x key elements), over the entries of `slab`.
fn attend(
    view: &View,
    sizes: &AttentionSizes,
    query: &Tensor,
    slab: &Tensor,
    sinks: Option<&Tensor>,
) -> Result<Tensor, BackendError> {
    let mut outputs = Vec::with_capacity(view.chunks.len());
    for chunk in &view.chunks {
        let arrangement = Arrangement::of(chunk, sizes);
        let query = arrangement.queries(&chunk.queries.of(query)?, chunk, sizes)?;
        let gathered = slab.index_select(0, &chunk.entries)?;
        let part = |from: i64, dim: i64| {
            let part = gathered.narrow(1, from, sizes.kv_heads * dim)?;
            arrangement.shared(&part, chunk, sizes, dim)
        };
        let (keys, values) = (part(0, sizes.key_dim)?, part(sizes.values_from, sizes.value_dim)?);
        let mask = chunk.mask.as_ref();
        let output = match sinks {
            None => Tensor::attend([&query, &keys, &values], mask, sizes.scale)?,
            Some(sinks) => {
                // A sink is one more position with this score and no value: it takes its part of the weights.
                let (output, sum) = Tensor::attend_with_sum([&query, &keys, &values], mask, sizes.scale)?;
                let (sinks, size) = arrangement.heads(sinks, chunk, sizes)?;
                let size_of_sum = [sum.size(), vec![1]].concat();
                let kept = sum.reshape(&size)?.sub(&sinks)?.sigmoid()?;
                output.mul(&kept.reshape(&size_of_sum)?.to_kind(output.kind())?)?
            }
        };
        let output = arrangement.outputs(&output, chunk, sizes)?;
        outputs.push(match &chunk.kept {
            None => output,
            Some(kept) => output.index_select(0, kept)?,
        });
    }
    match (outputs.as_slice(), &view.order) {
        ([output], None) => Ok(output.alias()),
        (outputs, None) => Tensor::cat(&outputs.iter().collect::<Vec<_>>(), 0),
        (outputs, Some(order)) => Tensor::cat(&outputs.iter().collect::<Vec<_>>(), 0)?.index_select(0, order),
    }
}

impl LatentHeads {
    /// Latent attention on the latents themselves (absorbed): no key or value of a head is ever expanded. `query`: rows
    /// x heads x (nope and rotated elements), `latent`: rows x latent, `key`: rows x rotated elements.
    pub(crate) fn attend(
        &self,
        pages: &TorchPages,
        layer: usize,
        [query, latent, key]: &[Tensor; 3],
        spans: &TorchSpans,
    ) -> Result<Tensor, BackendError> {
        let (placed, slab, _) = pages.slab(layer)?;
        let shape = placed.paged.shape;
        let view = spans.view(&shape, placed.paged.page_table)?;
        let rows = query.size()[0];
        slab.narrow(1, 0, self.latent_dim)?.index_copy_(0, &view.written, latent)?;
        slab.narrow(1, self.latent_dim, self.rope_dim)?.index_copy_(0, &view.written, key)?;
        let query = query.reshape(&[rows, self.heads, self.nope_dim + self.rope_dim])?;
        let plain = query.narrow(-1, 0, self.nope_dim)?.transpose(0, 1)?;
        let rotated = query.narrow(-1, self.nope_dim, self.rope_dim)?;
        let absorbed = self.projections.absorb(&plain)?.transpose(0, 1)?;
        let width = self.latent_dim + self.rope_dim;
        let query = Tensor::cat(&[&absorbed, &rotated], -1)?.reshape(&[rows, self.heads * width])?;
        let sizes = AttentionSizes {
            kv_heads: 1,
            group: self.heads,
            key_dim: width,
            value_dim: self.latent_dim,
            values_from: 0,
            scale: shape.scale,
        };
        let mixed = attend(view, &sizes, &query, slab, None)?;
        let mixed = mixed.reshape(&[rows, self.heads, self.latent_dim])?.transpose(0, 1)?;
        self.projections.release(&mixed)?.transpose(0, 1)?.reshape(&[rows, -1])
    }
}
