//! Keys and values of one head in a page of the KV cache as int8.
//!
//! A head's part of an int8 page holds integers of keys `[key elements][positions]`, integers of values
//! `[positions][value elements]`, scales of keys `[groups][positions]`, scales of values `[positions][groups]`, scales as
//! bfloat16.
//!
//! # Numerics
//!
//! The elements of a head at one position are cut into groups of [`CACHE_GROUP`]. A group is rounded when its position is
//! written, by its own elements alone: its scale is its largest magnitude / 127, rounded to bfloat16, and 0 below 2^-100;
//! an element is the integer nearest to element / scale (ties to even), -127 to 127. Attention computes with the float32
//! products of integer and scale, in the order of [`crate::attention`]. A group that is not finite becomes NaN.
//!
//! Scales that several positions share would save 1 % more at most, but a position's bits would depend on those written
//! after it.

use crate::numerics::{from_bf16, to_bf16};
use crate::{Dtype, Loops, elements};

/// Positions of a page.
pub const PAGE_POSITIONS: usize = 32;

/// Elements of a head at one position that share a scale.
pub const CACHE_GROUP: usize = 64;

/// Form of keys and values in the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheFormat {
    /// Element type of queries and results.
    #[default]
    Plain,
    /// Integers of 8 bits with a scale for each group of a head's elements.
    Int8,
}

/// Bytes of a scale.
const SCALE: usize = 2;

/// Scale of a group whose elements are not all finite.
const NOT_FINITE: u16 = 0x7fc0;

/// Smallest scale; groups with a smaller one count as zeros.
const LEAST_SCALE: f32 = f32::from_bits((127 - 100) << 23);

/// Sizes of a head's part of an int8 page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int8Head {
    /// Elements of a key.
    pub(crate) key_dim: usize,
    /// Elements of a value that are stored beside the key.
    pub(crate) values: usize,
}

impl Int8Head {
    const fn keys(self) -> usize {
        self.key_dim * PAGE_POSITIONS
    }

    const fn key_scales(self) -> usize {
        self.key_dim.div_ceil(CACHE_GROUP) * PAGE_POSITIONS * SCALE
    }

    const fn value_scales(self) -> usize {
        self.values.div_ceil(CACHE_GROUP) * PAGE_POSITIONS * SCALE
    }

    /// Bytes of the part.
    pub(crate) const fn bytes(self) -> usize {
        self.floats() + self.key_scales() + self.value_scales()
    }

    /// Elements of the part: floats that they are widened to.
    pub(crate) const fn floats(self) -> usize {
        (self.key_dim + self.values) * PAGE_POSITIONS
    }

    /// Part of head `head` of a page.
    #[inline(always)]
    pub(crate) fn part(self, page: &[u8], head: usize) -> &[u8] {
        &page[head * self.bytes()..][..self.bytes()]
    }

    /// Integers of keys and of values, then scales of keys and of values of a part.
    #[inline(always)]
    pub(crate) fn split(self, part: &[u8]) -> [&[u8]; 4] {
        let (keys, rest) = part.split_at(self.keys());
        let (values, rest) = rest.split_at(self.values * PAGE_POSITIONS);
        let (key_scales, value_scales) = rest.split_at(self.key_scales());
        [keys, values, key_scales, value_scales]
    }
}

/// Rounds and writes one position's key and value, heads one after the other, to an int8 page.
pub(crate) struct WriteInt8<'a> {
    pub(crate) head: Int8Head,
    pub(crate) dtype: Dtype,
    pub(crate) page: &'a mut [u8],
    /// Position within the page.
    pub(crate) position: usize,
    pub(crate) key: &'a [u8],
    pub(crate) value: &'a [u8],
}

impl Loops for WriteInt8<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { head, dtype, page, position, key, value } = self;
        let (bytes, dim) = (dtype.bytes(), head.values);
        let (key_bytes, value_bytes) = (head.key_dim * bytes, dim * bytes);
        for (at, part) in page.chunks_exact_mut(head.bytes()).enumerate() {
            let (keys, rest) = part.split_at_mut(head.keys());
            let (values, rest) = rest.split_at_mut(dim * PAGE_POSITIONS);
            let (key_scales, value_scales) = rest.split_at_mut(head.key_scales());
            let key = &key[at * key_bytes..][..key_bytes];
            for (group, elements) in key.chunks(CACHE_GROUP * bytes).enumerate() {
                let (integers, scale) = rounded(dtype, elements);
                let column = keys[group * CACHE_GROUP * PAGE_POSITIONS..].iter_mut().skip(position);
                let column = column.step_by(PAGE_POSITIONS).take(elements.len() / bytes);
                column.zip(integers).for_each(|(to, integer)| *to = integer as u8);
                key_scales.as_chunks_mut::<SCALE>().0[group * PAGE_POSITIONS + position] =
                    scale.to_le_bytes();
            }
            let value = &value[at * value_bytes..][..value_bytes];
            let (row, groups) = (&mut values[position * dim..][..dim], dim.div_ceil(CACHE_GROUP));
            let groups = &mut value_scales.as_chunks_mut::<SCALE>().0[position * groups..][..groups];
            let parts = value.chunks(CACHE_GROUP * bytes).zip(row.chunks_mut(CACHE_GROUP));
            for ((elements, row), stored) in parts.zip(groups) {
                let (integers, scale) = rounded(dtype, elements);
                row.iter_mut().zip(integers).for_each(|(to, integer)| *to = integer as u8);
                *stored = scale.to_le_bytes();
            }
        }
    }
}

/// Returns the integers and the scale of a group of elements.
#[inline(always)]
fn rounded(dtype: Dtype, group: &[u8]) -> ([i8; CACHE_GROUP], u16) {
    /// Added to and taken from a small number, it rounds to an integer, ties to even.
    const ROUND: f32 = 12_582_912.0;
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
        return ([0; CACHE_GROUP], NOT_FINITE);
    }
    if scale < LEAST_SCALE {
        return ([0; CACHE_GROUP], 0);
    }
    let mut integers = [0; CACHE_GROUP];
    for (integer, value) in integers.iter_mut().zip(values) {
        *integer = ((value / scale).clamp(-127.0, 127.0) + ROUND - ROUND) as i8;
    }
    (integers, stored)
}
