//! The int8 KV cache: layout of one KV head's part of a page, and quantisation of keys and values.
//!
//! A head's part of an int8 page holds, in this order: key integers `[key elements][positions]`, value integers
//! `[positions][value elements]`, key scales `[groups][positions]` and value scales `[positions][groups]`. Scales are
//! bfloat16.
//!
//! # Numerics
//!
//! The elements of a head at one position are cut into groups of [`CACHE_GROUP`]. A group is quantised when its position
//! is written, and depends on no other group. Its scale is its largest magnitude / 127, rounded to bfloat16; scales
//! below 2^-100 become 0. An element becomes the integer nearest to element / scale (ties to even), -127 to 127. A group
//! that is not finite becomes NaN. Attention computes with the float32 products of integer and scale, in the order of
//! [`crate::attention`].
//!
//! Scales shared by several positions would save at most 1 % of the memory, but a position's bits would then depend on
//! positions written later.

use crate::numerics::{from_bf16, to_bf16};
use crate::{Dtype, VectorisedWork, elements};

/// Positions of a page.
pub const PAGE_POSITIONS: usize = 32;

/// Elements of a head at one position that share a scale.
pub const CACHE_GROUP: usize = 64;

/// Format of keys and values in the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheFormat {
    /// In the element type of queries and results.
    #[default]
    Plain,
    /// As 8-bit integers, with a bfloat16 scale for each group of [`CACHE_GROUP`] elements of a head.
    Int8,
}

const SCALE_BYTES: usize = 2;

/// Scale of a group with an infinity or a NaN: bfloat16 NaN.
const NAN_SCALE: u16 = 0x7fc0;

/// Smallest scale, 2^-100. Groups with a smaller one become zeros.
const MIN_SCALE: f32 = f32::from_bits((127 - 100) << 23);

/// Layout of one KV head's part of an int8 page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int8HeadLayout {
    /// Elements of a key.
    pub(crate) key_dim: usize,
    /// Elements of a value that are stored besides the key.
    pub(crate) value_dim: usize,
}

impl Int8HeadLayout {
    const fn key_bytes(self) -> usize {
        self.key_dim * PAGE_POSITIONS
    }

    const fn key_scale_bytes(self) -> usize {
        self.key_dim.div_ceil(CACHE_GROUP) * PAGE_POSITIONS * SCALE_BYTES
    }

    const fn value_scale_bytes(self) -> usize {
        self.value_dim.div_ceil(CACHE_GROUP) * PAGE_POSITIONS * SCALE_BYTES
    }

    /// Bytes of a head's part, scales included.
    pub(crate) const fn bytes(self) -> usize {
        self.elements() + self.key_scale_bytes() + self.value_scale_bytes()
    }

    /// Elements of keys and values in a head's part.
    pub(crate) const fn elements(self) -> usize {
        (self.key_dim + self.value_dim) * PAGE_POSITIONS
    }

    /// Returns the part of KV head `head` of a page.
    #[inline(always)]
    pub(crate) fn part(self, page: &[u8], head: usize) -> &[u8] {
        &page[head * self.bytes()..][..self.bytes()]
    }

    /// Splits a head's part into key integers, value integers, key scales and value scales.
    #[inline(always)]
    pub(crate) fn split(self, part: &[u8]) -> [&[u8]; 4] {
        let (keys, rest) = part.split_at(self.key_bytes());
        let (values, rest) = rest.split_at(self.value_dim * PAGE_POSITIONS);
        let (key_scales, value_scales) = rest.split_at(self.key_scale_bytes());
        [keys, values, key_scales, value_scales]
    }
}

/// Quantises one position's key and value, of all KV heads, and writes them to an int8 page.
pub(crate) struct Int8PositionWriter<'a> {
    pub(crate) head: Int8HeadLayout,
    pub(crate) dtype: Dtype,
    pub(crate) page: &'a mut [u8],
    /// Position within the page.
    pub(crate) position: usize,
    pub(crate) key: &'a [u8],
    pub(crate) value: &'a [u8],
}

impl VectorisedWork for Int8PositionWriter<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { head, dtype, page, position, key, value } = self;
        let (bytes, dim) = (dtype.bytes(), head.value_dim);
        let (key_bytes, value_bytes) = (head.key_dim * bytes, dim * bytes);
        for (kv_head, part) in page.chunks_exact_mut(head.bytes()).enumerate() {
            let (keys, rest) = part.split_at_mut(head.key_bytes());
            let (values, rest) = rest.split_at_mut(dim * PAGE_POSITIONS);
            let (key_scales, value_scales) = rest.split_at_mut(head.key_scale_bytes());
            let key = &key[kv_head * key_bytes..][..key_bytes];
            for (group, elements) in key.chunks(CACHE_GROUP * bytes).enumerate() {
                let (integers, scale) = quantise_group(dtype, elements);
                let column = keys[group * CACHE_GROUP * PAGE_POSITIONS..].iter_mut().skip(position);
                let column = column.step_by(PAGE_POSITIONS).take(elements.len() / bytes);
                column.zip(integers).for_each(|(to, integer)| *to = integer as u8);
                key_scales.as_chunks_mut::<SCALE_BYTES>().0[group * PAGE_POSITIONS + position] =
                    scale.to_le_bytes();
            }
            let value = &value[kv_head * value_bytes..][..value_bytes];
            let (row, groups) = (&mut values[position * dim..][..dim], dim.div_ceil(CACHE_GROUP));
            let groups = &mut value_scales.as_chunks_mut::<SCALE_BYTES>().0[position * groups..][..groups];
            let parts = value.chunks(CACHE_GROUP * bytes).zip(row.chunks_mut(CACHE_GROUP));
            for ((elements, row), stored) in parts.zip(groups) {
                let (integers, scale) = quantise_group(dtype, elements);
                row.iter_mut().zip(integers).for_each(|(to, integer)| *to = integer as u8);
                *stored = scale.to_le_bytes();
            }
        }
    }
}

/// Quantises a group of at most [`CACHE_GROUP`] elements. Returns its integers and the bits of its bfloat16 scale.
#[inline(always)]
fn quantise_group(dtype: Dtype, group: &[u8]) -> ([i8; CACHE_GROUP], u16) {
    /// 1.5 * 2^23: adding and subtracting it rounds a small number to an integer, ties to even.
    const ROUNDER: f32 = 12_582_912.0;
    let mut values = [0.0; CACHE_GROUP];
    elements::widen(dtype, group, &mut values[..group.len() / dtype.bytes()]);
    let (mut largest, mut is_finite) = (0.0_f32, true);
    for value in values {
        is_finite &= value.is_finite();
        largest = if value.abs() > largest { value.abs() } else { largest };
    }
    let stored = to_bf16(largest / 127.0);
    let scale = from_bf16(stored);
    if !is_finite {
        return ([0; CACHE_GROUP], NAN_SCALE);
    }
    if scale < MIN_SCALE {
        return ([0; CACHE_GROUP], 0);
    }
    let mut integers = [0; CACHE_GROUP];
    for (integer, value) in integers.iter_mut().zip(values) {
        *integer = ((value / scale).clamp(-127.0, 127.0) + ROUNDER - ROUNDER) as i8;
    }
    (integers, stored)
}
