//! Weights and rows as integers: what a group of 32 elements becomes.
//!
//! A weight is `scale * q`, a bfloat16 scale for each group of 32 consecutive weights of a row, and an integer `q`:
//!
//! - int8: the scale is the largest magnitude of the group / 127, rounded to bfloat16, and `q`, between -127 and 127, is the integer nearest to `weight * (1 / scale)`.
//! - int4: `q` is between -8 and 7. The weight of the largest magnitude, with its sign, is divided by each of [`INT4_REACHES`] in turn, and of these scales, rounded to bfloat16, the one with the least sum of squared errors is taken (of equals, the first).
//!
//! A row that is multiplied with such weights becomes integers as well, each group by itself: `x = scale * q`, a float32 scale of the largest magnitude / 127, `q` nearest to `x * (127 / largest magnitude)`. Ties go to even everywhere. A group whose largest magnitude is below 2^-100 becomes zeros, one with an infinity or a NaN gets the scale NaN. A row's
//! last group is filled up with zeros.
//!
//! Everything here is a function of 32 numbers, written once, in scalar operations whose results no float mode of [`crate::paths::float_mode`] changes: no operand and no result that matters is denormal.

use crate::WeightFormat;
use crate::numerics::{NAN_BITS, from_bf16, to_bf16};

/// Elements of K that share a scale.
pub const GROUP: usize = 32;

/// Largest magnitude of an 8-bit integer.
const INT8_REACH: f32 = 127.0;
/// What the weight of the largest magnitude may become as a 4-bit integer: beyond -8 it is cut off, so that the others are nearer.
const INT4_REACHES: [f32; 6] = [-8.0, -7.5, -7.0, -8.5, -9.0, 7.0];
/// Groups below this are zeros: 2^-100.
const LEAST: f32 = f32::from_bits((127 - 100) << 23);
/// Adding it rounds to an integer, which the sum's low bits are: 1.5 * 2^23.
const ROUNDER: f32 = 12_582_912.0;

/// A group of a row's elements: what a dot product of a group reads, with any alignment.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct RowGroup {
    /// The integers.
    pub(crate) values: [i8; GROUP],
    pub(crate) scale: f32,
    /// What the offset of stored weights adds to a dot product with these integers, negated.
    pub(crate) correction: i32,
}

/// Bytes of a row of `elements` as integers.
pub(crate) const fn row_bytes(elements: usize) -> usize {
    (elements.div_ceil(GROUP) * size_of::<RowGroup>()).next_multiple_of(64)
}

/// The integer nearest to `x`, which is between -2^21 and 2^21.
#[inline(always)]
fn nearest(x: f32) -> i32 {
    (x + ROUNDER).to_bits() as i32 - ROUNDER.to_bits() as i32
}

/// The largest magnitude's bits. As integers, so that infinity and NaN are above everything else.
#[inline(always)]
fn magnitude_bits(group: &[f32; GROUP]) -> u32 {
    let mut bits = 0;
    for x in group {
        bits = bits.max(x.to_bits() & 0x7fff_ffff);
    }
    bits
}

impl RowGroup {
    /// `values` as integers that will meet weights of `format`.
    #[inline(always)]
    pub(crate) fn of(group: &[f32; GROUP], format: WeightFormat) -> Self {
        let magnitude = f32::from_bits(magnitude_bits(group));
        let mut values = [0; GROUP];
        if !magnitude.is_finite() {
            return Self { values, scale: f32::from_bits(NAN_BITS), correction: 0 };
        }
        if magnitude < LEAST {
            return Self { values, scale: 0.0, correction: 0 };
        }
        let factor = INT8_REACH / magnitude;
        let mut sum = 0;
        for (value, x) in values.iter_mut().zip(group) {
            let integer = nearest(x * factor);
            *value = integer as i8;
            sum += integer;
        }
        Self { values, scale: magnitude / INT8_REACH, correction: -format.offset() * sum }
    }
}

/// Writes a row of whole elements, which `element` gives, as integers to `to`.
///
/// # Safety
/// `to` has room for [`row_bytes`] of `elements`.
pub(crate) unsafe fn write_row(
    elements: usize,
    element: impl Fn(usize) -> f32,
    format: WeightFormat,
    to: *mut u8,
) {
    for group in 0..elements.div_ceil(GROUP) {
        let first = group * GROUP;
        let values = std::array::from_fn(|k| if first + k < elements { element(first + k) } else { 0.0 });
        // SAFETY: the caller's promise.
        unsafe { to.cast::<RowGroup>().add(group).write_unaligned(RowGroup::of(&values, format)) };
    }
}

/// A group of weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct WeightGroup {
    /// The integers, without their offset.
    pub(crate) values: [i8; GROUP],
    /// bfloat16.
    pub(crate) scale: u16,
}

impl WeightGroup {
    /// `group` in `format`, which has integers.
    pub(crate) fn of(group: &[f32; GROUP], format: WeightFormat) -> Self {
        let magnitude = f32::from_bits(magnitude_bits(group));
        let zeros = |scale| Self { values: [0; GROUP], scale: to_bf16(scale) };
        if !magnitude.is_finite() {
            return zeros(f32::from_bits(NAN_BITS));
        }
        if magnitude < LEAST {
            return zeros(0.0);
        }
        match format {
            WeightFormat::Plain => zeros(0.0),
            WeightFormat::Int8 => Self::scaled(group, to_bf16(magnitude / INT8_REACH), -127, 127).0,
            WeightFormat::Int4 => {
                // The first of those with the largest magnitude.
                let extreme = group.iter().copied().find(|x| x.abs() == magnitude).unwrap_or(magnitude);
                let [first, others @ ..] = INT4_REACHES;
                let with = |reach| Self::scaled(group, to_bf16(extreme / reach), -8, 7);
                others
                    .into_iter()
                    .map(with)
                    .fold(with(first), |best, other| if other.1 < best.1 { other } else { best })
                    .0
            }
        }
    }

    /// `group` by a scale, with integers between `lowest` and `highest`, and the sum of its squared errors in units of the scale.
    #[inline(always)]
    fn scaled(group: &[f32; GROUP], scale: u16, lowest: i32, highest: i32) -> (Self, f32) {
        let factor = 1.0 / from_bf16(scale);
        let size = from_bf16(scale);
        let mut values = [0; GROUP];
        let mut error = 0.0;
        for (value, x) in values.iter_mut().zip(group) {
            let scaled = x * factor;
            let integer = nearest(scaled).clamp(lowest, highest);
            *value = integer as i8;
            let difference = (scaled - integer as f32) * size;
            error += difference * difference;
        }
        (Self { values, scale }, error)
    }

    /// Word `line` of a packed column: four integers with their offset, or two times four.
    pub(crate) fn stored(&self, line: usize, format: WeightFormat) -> u32 {
        let quad = |index: usize| {
            let bytes =
                std::array::from_fn(|k| (i32::from(self.values[4 * index + k]) + format.offset()) as u8);
            u32::from_le_bytes(bytes)
        };
        match format {
            WeightFormat::Plain | WeightFormat::Int8 => quad(line),
            WeightFormat::Int4 => quad(line) | quad(GROUP / 8 + line) << 4,
        }
    }

    /// The number that element `k` stands for.
    pub(crate) fn value(&self, k: usize) -> f32 {
        f32::from(self.values[k]) * from_bf16(self.scale)
    }
}

/// The weights of a row as `format` keeps them: what their integers and scales stand for.
#[must_use]
pub fn kept(row: &[f32], format: WeightFormat) -> Vec<f32> {
    if format == WeightFormat::Plain {
        return row.to_vec();
    }
    let mut kept = Vec::with_capacity(row.len());
    for part in row.chunks(GROUP) {
        let mut values = [0.0; GROUP];
        values[..part.len()].copy_from_slice(part);
        let group = WeightGroup::of(&values, format);
        kept.extend((0..part.len()).map(|k| group.value(k)));
    }
    kept
}
