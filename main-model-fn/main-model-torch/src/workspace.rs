//! Workspace: device memory of iterations beside weights and KV cache, and the shares that bound it.
//!
//! | share | bound |
//! | --- | --- |
//! | keys and values gathered for one attention call | [`GATHERED_BYTES`], or those of the longest sequence |
//! | the mask of one attention call, and its parts while it is made | 2 x [`MASK_BYTES`], or 2 x those of [`KERNEL_ROWS`] rows |
//! | masks that a decode iteration keeps for all layers | [`DECODE_MASKS_BYTES`] |
//! | masks that blocks of prefills keep for all layers | [`PREPARED_BLOCKS`] x [`PREFILL_MASKS_BYTES`] |
//! | indices of gathered entries that blocks of prefills keep | [`INDEX_BYTES`], or [`PREPARED_BLOCKS`] x those of the longest sequence |
//! | queries and attention outputs of a block | [`QUERY_BYTES`], or [`QUERY_COPIES`] x those of [`BLOCK_ROWS`] rows |
//! | hidden states, logits | [`REST_BYTES`] |

use remoe_kernels::AttentionShape;

/// Workspace for contexts and heads that need no larger share.
const LEAST_BYTES: usize = 512 << 20;

/// Keys and values that are gathered for a call with several spans.
pub(crate) const GATHERED_BYTES: usize = 128 << 20;
/// Largest mask. Longer spans are attended to in blocks of rows, each with a mask of its own.
pub(crate) const MASK_BYTES: usize = 32 << 20;
/// Masks of a decode iteration that all layers share. Others are made again for each layer.
pub(crate) const DECODE_MASKS_BYTES: usize = 16 << 20;
/// Masks of a block of a prefill that all layers share. Others are made again for each layer.
pub(crate) const PREFILL_MASKS_BYTES: usize = 2 << 20;
/// Blocks whose spans are kept at the same time: 4 prefills with 8 blocks each.
const PREPARED_BLOCKS: usize = 32;
/// Rows of a block of LibTorch's memory-efficient attention divide by this. A lone row in the last block reads a wrong
/// mask where heads share keys (pytorch issue 191937, fixed after 2.11).
pub(crate) const KERNEL_ROWS: usize = 32;
/// Rows of the longest block of a prefill.
const BLOCK_ROWS: usize = 512;
/// Tensors of a block with the size of its queries that exist at the same time: latent attention has five.
const QUERY_COPIES: usize = 5;
const QUERY_BYTES: usize = 64 << 20;
/// Bytes of a position's entry index (64 bits) and number (32 bits) in prepared spans.
const POSITION_INDEX_BYTES: usize = 12;
const INDEX_BYTES: usize = 48 << 20;
const REST_BYTES: usize = 128 << 20;

const _: () = assert!(
    GATHERED_BYTES
        + 2 * MASK_BYTES
        + DECODE_MASKS_BYTES
        + PREPARED_BLOCKS * PREFILL_MASKS_BYTES
        + INDEX_BYTES
        + QUERY_BYTES
        + REST_BYTES
        <= LEAST_BYTES
);

/// Returns the bytes that iterations over layers of these `shapes` take, with sequences of up to `positions`.
pub(crate) fn workspace_bytes<'a>(
    shapes: impl Iterator<Item = &'a AttentionShape>,
    positions: usize,
) -> usize {
    let beyond = |share: usize, bytes: usize| bytes.saturating_sub(share);
    let beyond_shares = shapes.map(|shape| {
        let element_bytes = shape.dtype.bytes();
        let gathered = positions.saturating_mul(entry_bytes(shape));
        let mask = positions.saturating_mul(KERNEL_ROWS * element_bytes);
        let queries = QUERY_COPIES * BLOCK_ROWS * shape.heads() * shape.key_dim * element_bytes;
        let indices = positions.saturating_mul(PREPARED_BLOCKS * POSITION_INDEX_BYTES);
        beyond(GATHERED_BYTES, gathered)
            + 2 * beyond(MASK_BYTES, mask)
            + beyond(INDEX_BYTES, indices)
            + beyond(QUERY_BYTES, queries)
    });
    LEAST_BYTES + beyond_shares.max().unwrap_or(0)
}

/// Returns the bytes of one position's keys and values in one layer.
pub(crate) fn entry_bytes(shape: &AttentionShape) -> usize {
    shape.page_bytes() / remoe_kernels::PAGE_POSITIONS
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoe_kernels::{CacheFormat, Dtype};

    #[test]
    fn workspace_grows_with_context_and_heads() {
        let small = AttentionShape {
            dtype: Dtype::Bf16,
            kv_heads: 4,
            group: 8,
            key_dim: 128,
            value_dim: 128,
            latent: false,
            scale: 1.0,
            window: None,
            cache: CacheFormat::Plain,
        };
        let bytes = |shape: AttentionShape, positions| workspace_bytes([shape].iter(), positions) >> 20;
        assert_eq!(bytes(small, 32 << 10), 512);
        // 2 KiB a position: 256 MiB, half of which the least workspace has.
        assert_eq!(bytes(small, 128 << 10), 512 + 128);
        // DeepSeek-V3: five times 512 rows of 128 heads with 576 elements.
        let latent = AttentionShape { kv_heads: 1, group: 128, key_dim: 576, latent: true, ..small };
        assert_eq!(bytes(latent, 4096), 512 + 5 * 72 - 64);
        assert_eq!(bytes(small, 1 << 20), 512 + (2048 - 128) + 2 * (64 - 32) + (384 - 48));
    }
}
