//! Shapes of attention, and pages of the KV cache.

use std::ops::Range;

use crate::kv_cache::{CacheFormat, Int8HeadLayout, Int8PositionWriter, PAGE_POSITIONS};
use crate::{Dtype, KernelError, run_vectorised};

/// Sizes of one layer's attention, and how it is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Element type of queries, keys, values and results.
    pub dtype: Dtype,
    /// KV heads.
    pub kv_heads: usize,
    /// Query heads that share one KV head (grouped-query attention).
    pub group: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Multi-head latent attention: values are the first elements of keys.
    pub latent: bool,
    /// Factor by which scores are multiplied.
    pub scale: f64,
    /// Sliding window: a token attends to itself and the `window` - 1 tokens before it. Without one, to all before it.
    pub window: Option<usize>,
    /// Format of keys and values in the KV cache.
    pub cache: CacheFormat,
}

impl AttentionShape {
    /// Elements of a value that are stored besides the key: none in a latent cache.
    pub const fn stored_values(&self) -> usize {
        if self.latent { 0 } else { self.value_dim }
    }

    /// Bytes of a page.
    pub const fn page_bytes(&self) -> usize {
        let head = self.int8_head();
        self.kv_heads
            * match self.cache {
                CacheFormat::Plain => head.elements() * self.dtype.bytes(),
                CacheFormat::Int8 => head.bytes(),
            }
    }

    /// Layout of one KV head's part of an int8 page.
    pub(crate) const fn int8_head(&self) -> Int8HeadLayout {
        Int8HeadLayout { key_dim: self.key_dim, value_dim: self.stored_values() }
    }

    /// Number of query heads.
    pub const fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    /// Returns the positions that query row `row` of a KV head attends to, with `past` positions before the first token.
    #[inline(always)]
    pub(crate) fn visible(&self, past: usize, row: usize) -> Range<usize> {
        let end = past + row / self.group + 1;
        self.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    /// Writes one position's key `[KV heads][key elements]` and value `[KV heads][value elements]` to its page.
    ///
    /// `position` counts within the page. In a latent cache `value` is empty.
    ///
    /// # Errors
    /// [`KernelError::Length`] if a length contradicts the shape, or `position` is beyond the page.
    pub fn write(
        &self,
        page: &mut [u8],
        position: usize,
        key: &[u8],
        value: &[u8],
    ) -> Result<(), KernelError> {
        let bytes = self.dtype.bytes();
        let expect = |what, actual, expected| match actual == expected {
            true => Ok(()),
            false => Err(KernelError::Length { what, actual, expected }),
        };
        expect("page", page.len(), self.page_bytes())?;
        expect("key", key.len(), self.kv_heads * self.key_dim * bytes)?;
        expect("value", value.len(), self.kv_heads * self.stored_values() * bytes)?;
        if position >= PAGE_POSITIONS {
            return Err(KernelError::Length {
                what: "positions",
                actual: position + 1,
                expected: PAGE_POSITIONS,
            });
        }
        if self.cache == CacheFormat::Int8 {
            let (head, dtype) = (self.int8_head(), self.dtype);
            run_vectorised(Int8PositionWriter { head, dtype, page, position, key, value });
            return Ok(());
        }
        let (keys, values) = page.split_at_mut(self.kv_heads * self.key_dim * PAGE_POSITIONS * bytes);
        match self.dtype {
            Dtype::Bf16 => scatter::<2>(keys, position, key),
            Dtype::F32 => scatter::<4>(keys, position, key),
        }
        let row = self.stored_values() * bytes;
        if row > 0 {
            for (head, value) in value.chunks_exact(row).enumerate() {
                values[(head * PAGE_POSITIONS + position) * row..][..row].copy_from_slice(value);
            }
        }
        Ok(())
    }
}

/// Writes a key's elements of `BYTES` bytes each to column `position` of `keys`, `[key elements][PAGE_POSITIONS]`.
fn scatter<const BYTES: usize>(keys: &mut [u8], position: usize, key: &[u8]) {
    let columns = keys.as_chunks_mut::<BYTES>().0.iter_mut().skip(position).step_by(PAGE_POSITIONS);
    for (to, from) in columns.zip(key.as_chunks::<BYTES>().0) {
        *to = *from;
    }
}
