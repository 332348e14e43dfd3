//! Attention of all spans together by LibTorch's scaled dot product, over keys and values gathered from the slabs.
//!
//! Queries that share keys and values are arranged so that keys and values are never repeated in memory
//! ([`QueryLayout`]). The number of spans changes sizes of tensors, not the number of calls.

use crate::heads::HeadProjections;
use crate::library::Tensor;
use crate::pages::TorchPages;
use crate::spans::{AttentionCall, AttentionPlan, TorchSpans};
use main_model_fn::backend::{BackendError, ResidentPart};

/// Up-projections and sizes of one layer's latent attention.
pub struct LatentHeads {
    pub(crate) projections: HeadProjections,
    pub(crate) heads: i64,
    /// Elements of a head's query that are not rotated.
    pub(crate) nope_dim: i64,
    /// Elements of a head's query that are rotated.
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
    /// Query heads that share a head of keys and values.
    group: i64,
    key_dim: i64,
    value_dim: i64,
    /// Index of the first value element in a KV cache entry.
    value_offset: i64,
    scale: f64,
}

/// Most query rows of one head in a decode iteration if all query heads share keys. More heads keep more of the device
/// busy.
const HEAD_ROWS: i64 = 16;

/// Arrangement of queries as batch x heads x rows x elements beside the keys of their heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueryLayout {
    /// One row of each span. Queries that share keys are rows of a head.
    Decode,
    /// One row of each span, all query heads share keys. Queries are divided into so many heads.
    DecodeSharedKeys(i64),
    /// Several rows of one span. The batch dimension has the heads of keys, the head dimension has queries that share keys.
    OneSpan,
    /// Several rows of several spans. All rows of queries that share keys are rows of a head.
    SeveralSpans,
    /// Several rows, all query heads share keys. Each query head is a head.
    SharedKeys,
}

impl QueryLayout {
    fn new(call: &AttentionCall, sizes: &AttentionSizes) -> Self {
        match (call.rows, sizes.kv_heads, call.spans) {
            (1, 1, _) => {
                // Not one row for each of several heads: see `KERNEL_ROWS`.
                let rows = (2..=HEAD_ROWS).rev().find(|rows| sizes.group % rows == 0);
                Self::DecodeSharedKeys(sizes.group / rows.unwrap_or(sizes.group))
            }
            (1, ..) => Self::Decode,
            (_, 1, _) => Self::SharedKeys,
            (_, _, 1) => Self::OneSpan,
            _ => Self::SeveralSpans,
        }
    }

    /// Arranges queries, `x`: (spans x rows) x (heads x elements).
    fn arrange_queries(
        self,
        x: &Tensor,
        call: &AttentionCall,
        sizes: &AttentionSizes,
    ) -> Result<Tensor, BackendError> {
        let AttentionSizes { kv_heads, group, key_dim, .. } = *sizes;
        let AttentionCall { spans, rows, .. } = *call;
        match self {
            Self::Decode => x.reshape(&[spans, kv_heads, group, key_dim]),
            Self::DecodeSharedKeys(heads) => x.reshape(&[spans, heads, group / heads, key_dim]),
            Self::OneSpan => x.reshape(&[rows, kv_heads, group, key_dim])?.permute(&[1, 2, 0, 3]),
            Self::SeveralSpans => {
                let x = x.reshape(&[spans, rows, kv_heads, group, key_dim])?.permute(&[0, 2, 1, 3, 4])?;
                x.reshape(&[spans, kv_heads, rows * group, key_dim])
            }
            Self::SharedKeys => x.reshape(&[spans, rows, group, key_dim])?.transpose(1, 2),
        }
    }

    /// Arranges keys or values, `x`: (spans x positions) x (heads x `dim`).
    fn arrange_keys(
        self,
        x: &Tensor,
        call: &AttentionCall,
        sizes: &AttentionSizes,
        dim: i64,
    ) -> Result<Tensor, BackendError> {
        let x = x.reshape(&[call.spans, call.positions, sizes.kv_heads, dim])?;
        match self {
            Self::Decode | Self::SeveralSpans => x.transpose(1, 2),
            Self::DecodeSharedKeys(heads) => {
                x.transpose(1, 2)?.expand(&[call.spans, heads, call.positions, dim])
            }
            Self::SharedKeys => x.transpose(1, 2)?.expand(&[call.spans, sizes.group, call.positions, dim]),
            Self::OneSpan => {
                let heads_first = x.permute(&[2, 0, 1, 3])?;
                heads_first.expand(&[sizes.kv_heads, sizes.group, call.positions, dim])
            }
        }
    }

    /// Returns attention outputs as (spans x rows) x (heads x elements).
    fn restore_outputs(
        self,
        x: &Tensor,
        call: &AttentionCall,
        sizes: &AttentionSizes,
    ) -> Result<Tensor, BackendError> {
        let AttentionSizes { kv_heads, group, value_dim, .. } = *sizes;
        let AttentionCall { spans, rows, .. } = *call;
        let rows_first = match self {
            Self::Decode | Self::DecodeSharedKeys(_) => x.alias(),
            Self::OneSpan => x.permute(&[2, 0, 1, 3])?,
            Self::SeveralSpans => {
                x.reshape(&[spans, kv_heads, rows, group, value_dim])?.permute(&[0, 2, 1, 3, 4])?
            }
            Self::SharedKeys => x.transpose(1, 2)?,
        };
        rows_first.reshape(&[spans * rows, kv_heads * group * value_dim])
    }

    /// Arranges `x`, one number for each query head, so that it broadcasts over arranged queries. Also returns the sizes of
    /// arranged queries without the last.
    fn arrange_head_values(
        self,
        x: &Tensor,
        call: &AttentionCall,
        sizes: &AttentionSizes,
    ) -> Result<(Tensor, Vec<i64>), BackendError> {
        let AttentionSizes { kv_heads, group, .. } = *sizes;
        let AttentionCall { spans, rows, .. } = *call;
        Ok(match self {
            Self::Decode => (x.reshape(&[1, kv_heads, group])?, vec![spans, kv_heads, group]),
            Self::DecodeSharedKeys(heads) => {
                (x.reshape(&[1, heads, group / heads])?, vec![spans, heads, group / heads])
            }
            Self::OneSpan => (x.reshape(&[kv_heads, group, 1])?, vec![kv_heads, group, rows]),
            Self::SeveralSpans => (x.reshape(&[1, kv_heads, 1, group])?, vec![spans, kv_heads, rows, group]),
            Self::SharedKeys => (x.reshape(&[1, group, 1])?, vec![spans, group, rows]),
        })
    }
}

/// Grouped-query attention. Writes keys and values of the rows to the KV cache first. `query`, `key` and `value`: rows x
/// (heads x elements); `sinks`: heads, float32.
pub(crate) fn attend_grouped(
    pages: &TorchPages,
    layer: usize,
    [query, key, value]: &[Tensor; 3],
    sinks: Option<&Tensor>,
    spans: &TorchSpans,
) -> Result<Tensor, BackendError> {
    let (slab_layer, slab, [keys, values]) = pages.slab(layer)?;
    let shape = slab_layer.paged.shape;
    let plan = spans.plan(&shape, slab_layer.paged.page_table)?;
    slab.narrow(1, 0, keys)?.index_copy_(0, &plan.written_entries, key)?;
    slab.narrow(1, keys, values)?.index_copy_(0, &plan.written_entries, value)?;
    let sizes = AttentionSizes {
        kv_heads: shape.kv_heads as i64,
        group: shape.group as i64,
        key_dim: shape.key_dim as i64,
        value_dim: shape.value_dim as i64,
        value_offset: keys,
        scale: shape.scale,
    };
    attend_gathered(plan, &sizes, query, slab, sinks)
}

/// Attends to the KV cache entries that `plan` gathers from `slab`. `query`: rows x (heads x key elements). Returns rows x
/// (heads x value elements).
fn attend_gathered(
    plan: &AttentionPlan,
    sizes: &AttentionSizes,
    query: &Tensor,
    slab: &Tensor,
    sinks: Option<&Tensor>,
) -> Result<Tensor, BackendError> {
    let mut outputs = Vec::with_capacity(plan.calls.len());
    for call in &plan.calls {
        let layout = QueryLayout::new(call, sizes);
        let query = layout.arrange_queries(&call.query_rows.select(query)?, call, sizes)?;
        let gathered = slab.index_select(0, &call.gathered_entries)?;
        let part = |offset: i64, dim: i64| {
            let part = gathered.narrow(1, offset, sizes.kv_heads * dim)?;
            layout.arrange_keys(&part, call, sizes, dim)
        };
        let (keys, values) = (part(0, sizes.key_dim)?, part(sizes.value_offset, sizes.value_dim)?);
        let operands = [&query, &keys, &values];
        let output = match sinks {
            None => {
                let results = attend_in_blocks(call, operands, |operands, mask| {
                    Ok([Tensor::attend(operands, mask, sizes.scale)?])
                });
                let [output] = results?;
                output
            }
            Some(sinks) => {
                // A sink is one more position with this score and no value, which takes its share of the weights.
                let results = attend_in_blocks(call, operands, |operands, mask| {
                    let (output, log_sum) = Tensor::attend_with_log_sum(operands, mask, sizes.scale)?;
                    Ok([output, log_sum])
                });
                let [output, log_sum] = results?;
                let (sinks, size) = layout.arrange_head_values(sinks, call, sizes)?;
                let size_of_share = [log_sum.size(), vec![1]].concat();
                let share = log_sum.reshape(&size)?.sub(&sinks)?.sigmoid()?;
                output.mul(&share.reshape(&size_of_share)?.to_kind(output.kind())?)?
            }
        };
        let output = layout.restore_outputs(&output, call, sizes)?;
        outputs.push(match &call.valid_rows {
            None => output,
            Some(valid_rows) => output.index_select(0, valid_rows)?,
        });
    }
    match (outputs.as_slice(), &plan.output_order) {
        ([output], None) => Ok(output.alias()),
        (outputs, None) => Tensor::cat(&outputs.iter().collect::<Vec<_>>(), 0),
        (outputs, Some(order)) => Tensor::cat(&outputs.iter().collect::<Vec<_>>(), 0)?.index_select(0, order),
    }
}

/// Attends with the masks of `call`: in one call of `attend`, or in one for each block of rows. Joins results of blocks by
/// rows.
fn attend_in_blocks<const N: usize>(
    call: &AttentionCall,
    [query, keys, values]: [&Tensor; 3],
    attend: impl Fn([&Tensor; 3], Option<&Tensor>) -> Result<[Tensor; N], BackendError>,
) -> Result<[Tensor; N], BackendError> {
    let Some(masks) = &call.masks else { return attend([query, keys, values], None) };
    if masks.blocks().len() == 1 {
        return attend([query, keys, values], Some(&masks.mask(0)?));
    }
    let mut results: [Vec<Tensor>; N] = std::array::from_fn(|_| Vec::new());
    for (index, rows) in masks.blocks() {
        // Only a call with one span has several blocks, and layouts of one span have rows in the third dimension.
        let query = query.narrow(2, rows.start, rows.end - rows.start)?;
        let of_block = attend([&query, keys, values], Some(&masks.mask(index)?))?;
        results.iter_mut().zip(of_block).for_each(|(results, result)| results.push(result));
    }
    let mut joined = Vec::with_capacity(N);
    for result in &results {
        joined.push(Tensor::cat(&result.iter().collect::<Vec<_>>(), 2)?);
    }
    let actual = joined.len();
    joined.try_into().map_err(|_| BackendError::Shape { what: "results of attention", actual, expected: N })
}

impl LatentHeads {
    /// Latent attention in the absorbed form: keys and values of heads are never expanded (arXiv 2405.04434, section 2.1).
    /// `query`: rows x heads x (plain, then rotated elements); `latent`: rows x latent; `key`: rows x rotated elements.
    pub(crate) fn attend(
        &self,
        pages: &TorchPages,
        layer: usize,
        [query, latent, key]: &[Tensor; 3],
        spans: &TorchSpans,
    ) -> Result<Tensor, BackendError> {
        let (slab_layer, slab, _) = pages.slab(layer)?;
        let shape = slab_layer.paged.shape;
        let plan = spans.plan(&shape, slab_layer.paged.page_table)?;
        let rows = query.size()[0];
        slab.narrow(1, 0, self.latent_dim)?.index_copy_(0, &plan.written_entries, latent)?;
        slab.narrow(1, self.latent_dim, self.rope_dim)?.index_copy_(0, &plan.written_entries, key)?;
        let query = query.reshape(&[rows, self.heads, self.nope_dim + self.rope_dim])?;
        let plain = query.narrow(-1, 0, self.nope_dim)?.transpose(0, 1)?;
        let rotated = query.narrow(-1, self.nope_dim, self.rope_dim)?;
        let absorbed = self.projections.absorb_keys(&plain)?.transpose(0, 1)?;
        let width = self.latent_dim + self.rope_dim;
        let query = Tensor::cat(&[&absorbed, &rotated], -1)?.reshape(&[rows, self.heads * width])?;
        let sizes = AttentionSizes {
            kv_heads: 1,
            group: self.heads,
            key_dim: width,
            value_dim: self.latent_dim,
            value_offset: 0,
            scale: shape.scale,
        };
        let mixed = attend_gathered(plan, &sizes, &query, slab, None)?;
        let mixed = mixed.reshape(&[rows, self.heads, self.latent_dim])?.transpose(0, 1)?;
        self.projections.expand_values(&mixed)?.transpose(0, 1)?.reshape(&[rows, -1])
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
