//! Shapes of attention, and pages of the KV cache.

use std::ops::Range;

use crate::kv_cache::{CacheFormat, Int8Head, PAGE_POSITIONS, WriteInt8};
use crate::{Dtype, KernelError, by_vectors};

/// Sizes and facts of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Element type of queries, keys, values and results.
    pub dtype: Dtype,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Query heads that share a head of keys and values.
    pub group: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Values are the first elements of keys.
    pub latent: bool,
    /// Factor of scores.
    pub scale: f64,
    /// A token sees itself and the `window` - 1 before it; everything before it where there is none.
    pub window: Option<usize>,
    /// Form of keys and values in pages.
    pub cache: CacheFormat,
}

impl AttentionShape {
    /// Elements of a value that are stored beside the key.
    pub const fn stored_values(&self) -> usize {
        if self.latent { 0 } else { self.value_dim }
    }

    /// Bytes of a page.
    pub const fn page_bytes(&self) -> usize {
        let head = self.int8_head();
        self.kv_heads
            * match self.cache {
                CacheFormat::Plain => head.floats() * self.dtype.bytes(),
                CacheFormat::Int8 => head.bytes(),
            }
    }

    /// Sizes of a head's part of an int8 page.
    pub(crate) const fn int8_head(&self) -> Int8Head {
        Int8Head { key_dim: self.key_dim, values: self.stored_values() }
    }

    /// Query heads.
    pub const fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    /// Positions that query row `row` of a head sees, `past` positions before the first token.
    #[inline(always)]
    pub(crate) fn seen(&self, past: usize, row: usize) -> Range<usize> {
        let end = past + row / self.group + 1;
        self.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    /// Writes the key (heads x key elements) and the value (heads x value elements; nothing where they are latent) of one position to its page.
    ///
    /// # Errors
    /// [`KernelError::Length`] where a length is not what the shape says, or `position` is beyond the page.
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
            by_vectors(WriteInt8 { head, dtype, page, position, key, value });
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

/// Writes elements of `BYTES` bytes to column `position` of a matrix of pages' width.
fn scatter<const BYTES: usize>(keys: &mut [u8], position: usize, key: &[u8]) {
    let columns = keys.as_chunks_mut::<BYTES>().0.iter_mut().skip(position).step_by(PAGE_POSITIONS);
    for (to, from) in columns.zip(key.as_chunks::<BYTES>().0) {
        *to = *from;
    }
}
