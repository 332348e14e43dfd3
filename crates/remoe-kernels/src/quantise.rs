//! Quantisation of weights and of input rows, in groups of 32 elements.
//!
//! A quantised weight is `scale * q`: a bfloat16 scale for each group of 32 consecutive weights of a row, and an integer
//! `q` for each weight.
//!
//! - int8: the scale is the largest magnitude of the group / 127, rounded to bfloat16. `q` is the integer nearest to
//!   `weight * (1 / scale)`, between -127 and 127.
//! - int4: `q` is between -8 and 7. The weight of the largest magnitude, with its sign, is divided by each of
//!   [`INT4_EXTREMES`] and rounded to bfloat16. Of these scales, the one with the least sum of squared errors is chosen
//!   (the first of equals).
//! - mxfp4 (OCP Microscaling Formats 1.0, 6.3): the shared power of two has an exponent 2 less than that of the largest
//!   magnitude. A weight becomes that power times the nearest number of e2m1, at most 6. Since [`E2M1`] holds doubled
//!   numbers, `q` is twice the number and the scale half the power. Weights that are MXFP4 already keep their value.
//!
//! Input rows are quantised as well, each group independently: `x = scale * q`, with the float32 scale largest magnitude
//! / 127 and `q` nearest to `x * (127 / largest magnitude)`. Ties go to even everywhere. A group whose largest magnitude
//! is below 2^-100 becomes zeros; a group with an infinity or a NaN gets the scale NaN. The last group of a row is
//! padded with zeros.
//!
//! All functions use scalar operations on 32 numbers. No float mode of [`crate::paths::float_mode`] changes their
//! results, because no operand and no relevant result is denormal.

use crate::numerics::{NAN_BITS, from_bf16, to_bf16};
use crate::{Dtype, WeightFormat};

/// Elements of K that share a scale.
pub const GROUP: usize = 32;

/// Largest magnitude of an int8 weight.
const INT8_MAX: f32 = 127.0;
/// Candidate values of the weight of the largest magnitude in int4. Values below -8 are clamped, which makes the other
/// weights more exact.
const INT4_EXTREMES: [f32; 6] = [-8.0, -7.5, -7.0, -8.5, -9.0, 7.0];
/// Twice the magnitudes of e2m1, indexed by their codes. Codes from 8 on are the negative numbers.
pub const E2M1: [i8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
/// Groups with a smaller largest magnitude become zeros: 2^-100.
const MIN_MAGNITUDE: f32 = f32::from_bits((127 - 100) << 23);
/// 1.5 * 2^23: adding it rounds a number to an integer, which the low bits of the sum then hold.
const ROUNDER: f32 = 12_582_912.0;

/// A quantised group of an input row, as dot products read it, with any alignment.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct RowGroup {
    /// Quantised elements `q`.
    pub(crate) values: [i8; GROUP],
    pub(crate) scale: f32,
    /// Compensates the offset of stored weights in a dot product: minus the offset times the sum of `values`.
    pub(crate) correction: i32,
}

/// Bytes of a quantised row of `elements`.
pub(crate) const fn row_bytes(elements: usize) -> usize {
    (elements.div_ceil(GROUP) * size_of::<RowGroup>()).next_multiple_of(64)
}

/// Rounds `x`, between -2^21 and 2^21, to the nearest integer, ties to even.
#[inline(always)]
fn round_to_integer(x: f32) -> i32 {
    (x + ROUNDER).to_bits() as i32 - ROUNDER.to_bits() as i32
}

/// Returns the bits of the largest magnitude. Bits are compared as integers, so that infinity and NaN exceed all numbers.
#[inline(always)]
fn largest_magnitude_bits(group: &[f32; GROUP]) -> u32 {
    let mut bits = 0;
    for x in group {
        bits = bits.max(x.to_bits() & 0x7fff_ffff);
    }
    bits
}

impl RowGroup {
    /// Quantises a group of an input row, for products with weights of `format`.
    #[inline(always)]
    pub(crate) fn quantise(group: &[f32; GROUP], format: WeightFormat) -> Self {
        let magnitude = f32::from_bits(largest_magnitude_bits(group));
        let mut values = [0; GROUP];
        if !magnitude.is_finite() {
            return Self { values, scale: f32::from_bits(NAN_BITS), correction: 0 };
        }
        if magnitude < MIN_MAGNITUDE {
            return Self { values, scale: 0.0, correction: 0 };
        }
        let factor = INT8_MAX / magnitude;
        let mut sum = 0;
        for (value, x) in values.iter_mut().zip(group) {
            let integer = round_to_integer(x * factor);
            *value = integer as i8;
            sum += integer;
        }
        Self { values, scale: magnitude / INT8_MAX, correction: -format.offset() * sum }
    }
}

/// Quantises a row of `elements` elements, which `element` returns by their position, and writes it to `to`.
///
/// # Safety
/// `to` has room for [`row_bytes`] of `elements`.
pub(crate) unsafe fn quantise_row(
    elements: usize,
    element: impl Fn(usize) -> f32,
    format: WeightFormat,
    to: *mut u8,
) {
    for group in 0..elements.div_ceil(GROUP) {
        let first = group * GROUP;
        let values = std::array::from_fn(|k| if first + k < elements { element(first + k) } else { 0.0 });
        // SAFETY: `to` has room for all groups of the row, as the caller guarantees.
        unsafe { to.cast::<RowGroup>().add(group).write_unaligned(RowGroup::quantise(&values, format)) };
    }
}

/// A quantised group of weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct WeightGroup {
    /// Quantised weights `q`, without the offset of their stored form.
    pub(crate) values: [i8; GROUP],
    /// Bits of the bfloat16 scale.
    pub(crate) scale: u16,
}

impl WeightGroup {
    /// Quantises a group of weights to `format`, one of [`WeightFormat::QUANTISED`].
    pub(crate) fn quantise(group: &[f32; GROUP], format: WeightFormat) -> Self {
        let magnitude = f32::from_bits(largest_magnitude_bits(group));
        let zeros = |scale| Self { values: [0; GROUP], scale: to_bf16(scale) };
        if !magnitude.is_finite() {
            return zeros(f32::from_bits(NAN_BITS));
        }
        if magnitude < MIN_MAGNITUDE {
            return zeros(0.0);
        }
        match format {
            WeightFormat::Plain | WeightFormat::Fp8 => zeros(0.0),
            WeightFormat::Mxfp4 => {
                // A power of two. 3 less in the exponent: 2 for the largest number of e2m1, 1 for its doubling.
                let scale = f32::from_bits((magnitude.to_bits() & 0x7f80_0000) - (3 << 23));
                let factor = 1.0 / scale;
                Self { values: map_to_i8(group, |x| round_to_e2m1(x * factor)), scale: to_bf16(scale) }
            }
            WeightFormat::Int8 => Self::scaled(group, to_bf16(magnitude / INT8_MAX), -127.0, 127.0),
            WeightFormat::Int4 => {
                // The first weight with the largest magnitude.
                let extreme = group.iter().copied().find(|x| x.abs() == magnitude).unwrap_or(magnitude);
                let scales = INT4_EXTREMES.map(|value| to_bf16(extreme / value));
                // Errors are in units of the magnitude's power of two, so that no square is denormal or infinite.
                let unit = f32::from_bits((254 - (magnitude.to_bits() >> 23)).max(1) << 23);
                let errors = int4_errors(group, scales.map(from_bf16), unit);
                let (mut scale, mut least) = (scales[0], errors[0]);
                for (other, error) in scales.into_iter().zip(errors) {
                    if error < least {
                        (scale, least) = (other, error);
                    }
                }
                Self::scaled(group, scale, -8.0, 7.0)
            }
        }
    }

    /// Quantises `group` with a scale, to integers between `lowest` and `highest`.
    #[inline(always)]
    fn scaled(group: &[f32; GROUP], scale: u16, lowest: f32, highest: f32) -> Self {
        let factor = 1.0 / from_bf16(scale);
        Self { values: map_to_i8(group, |x| round_to_integer((x * factor).clamp(lowest, highest))), scale }
    }

    /// Returns the words of a packed column. For int8, a word has four integers with their offset. For int4 and mxfp4,
    /// the first half of the words have eight integers or codes each; the other words are zero.
    #[inline(always)]
    pub(crate) fn stored(&self, format: WeightFormat) -> [u32; GROUP / 4] {
        let mut bytes = [0; GROUP];
        for (byte, &value) in bytes.iter_mut().zip(&self.values) {
            *byte = match format {
                WeightFormat::Mxfp4 => e2m1_code(value),
                _ => value.wrapping_add(format.offset() as i8) as u8,
            };
        }
        let quad = |index: usize| u32::from_le_bytes(std::array::from_fn(|k| bytes[4 * index + k]));
        match format {
            WeightFormat::Plain | WeightFormat::Fp8 | WeightFormat::Int8 => std::array::from_fn(quad),
            WeightFormat::Int4 | WeightFormat::Mxfp4 => {
                let half = GROUP / 8;
                std::array::from_fn(|line| if line < half { quad(line) | quad(half + line) << 4 } else { 0 })
            }
        }
    }

    /// Decodes the words of a packed column: the inverse of [`stored`](Self::stored).
    #[inline(always)]
    pub(crate) fn from_stored(words: [u32; GROUP / 4], scale: u16, format: WeightFormat) -> Self {
        let half = GROUP / 2;
        let values = std::array::from_fn(|k| {
            let byte = |word: u32, k: usize| (word >> (8 * (k % 4))) as u8;
            let nibble = || byte(words[k % half / 4], k) >> (4 * (k / half)) & 15;
            match format {
                WeightFormat::Plain | WeightFormat::Fp8 => 0,
                WeightFormat::Int8 => byte(words[k / 4], k).wrapping_sub(128) as i8,
                WeightFormat::Int4 => nibble() as i8 - 8,
                WeightFormat::Mxfp4 => {
                    let code = nibble();
                    let magnitude = E2M1[usize::from(code & 7)];
                    if code & 8 == 0 { magnitude } else { -magnitude }
                }
            }
        });
        Self { values, scale }
    }

    /// Dequantises as many of the first elements as `to` has room for, and rounds them to `dtype`. The product of an
    /// integer and a bfloat16 is exact in float32.
    #[inline(always)]
    pub(crate) fn write(&self, dtype: Dtype, to: &mut [u8]) {
        match dtype {
            Dtype::F32 => {
                for (k, to) in to.as_chunks_mut().0.iter_mut().enumerate() {
                    *to = self.value(k).to_le_bytes();
                }
            }
            Dtype::Bf16 => {
                for (k, to) in to.as_chunks_mut().0.iter_mut().enumerate() {
                    *to = to_bf16(self.value(k)).to_le_bytes();
                }
            }
        }
    }

    /// Dequantises element `k`.
    pub(crate) fn value(&self, k: usize) -> f32 {
        f32::from(self.values[k]) * from_bf16(self.scale)
    }
}

/// Converts each number of a group by `integer`. Two loops, because the compiler vectorises each of them.
#[inline(always)]
fn map_to_i8(group: &[f32; GROUP], integer: impl Fn(f32) -> i32) -> [i8; GROUP] {
    let mut integers = [0; GROUP];
    for (to, x) in integers.iter_mut().zip(group) {
        *to = integer(*x);
    }
    let mut narrowed = [0; GROUP];
    for (to, integer) in narrowed.iter_mut().zip(integers) {
        *to = integer as i8;
    }
    narrowed
}

/// Rounds the magnitude of `x` to the nearest of [`E2M1`], ties to even codes, and keeps the sign.
#[inline(always)]
fn round_to_e2m1(x: f32) -> i32 {
    let size = x.abs();
    // Comparisons with the midpoints of neighbouring magnitudes, and the differences of these magnitudes.
    let exceeds = [size > 0.5, size >= 1.5, size > 2.5, size >= 3.5, size > 5.0, size >= 7.0, size > 10.0];
    let steps = [1, 1, 1, 1, 2, 2, 4];
    let mut value = 0;
    for (exceeds, step) in exceeds.into_iter().zip(steps) {
        value += i32::from(exceeds) * step;
    }
    if x < 0.0 { -value } else { value }
}

/// Returns the e2m1 code of half of `value`, whose magnitude is one of [`E2M1`]: subtracts the integers that the table
/// skips.
#[inline(always)]
fn e2m1_code(value: i8) -> u8 {
    let size = value.unsigned_abs();
    let magnitude = size - u8::from(size > 4) - u8::from(size > 6) - 3 * u8::from(size > 8);
    magnitude | value as u8 >> 4 & 8
}

/// Computes the sum of squared errors of `group` times `unit` as int4, for each scale. Each sum is in the order of the
/// group. The sums of all scales are interleaved, so that they do not depend on each other.
#[inline(always)]
fn int4_errors<const N: usize>(group: &[f32; GROUP], scales: [f32; N], unit: f32) -> [f32; N] {
    let factors = scales.map(|scale| 1.0 / scale);
    let scales = scales.map(|scale| scale * unit);
    let mut errors = [0.0; N];
    for x in group {
        for (error, (factor, scale)) in errors.iter_mut().zip(factors.iter().zip(&scales)) {
            let scaled = x * factor;
            let integer = (scaled.clamp(-8.0, 7.0) + ROUNDER) - ROUNDER;
            let difference = (scaled - integer) * scale;
            *error += difference * difference;
        }
    }
    errors
}

/// Quantises a row of weights to `format` and dequantises it again: the weights with their quantisation errors.
#[must_use]
pub fn quantised_weights(row: &[f32], format: WeightFormat) -> Vec<f32> {
    if !format.has_integers() {
        return row.to_vec();
    }
    let mut weights = Vec::with_capacity(row.len());
    for part in row.chunks(GROUP) {
        let mut values = [0.0; GROUP];
        values[..part.len()].copy_from_slice(part);
        let group = WeightGroup::quantise(&values, format);
        weights.extend((0..part.len()).map(|k| group.value(k)));
    }
    weights
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use serde::Deserialize;

    /// Int4 quantisation by published code (`tests/fixtures/int4.py`). Weights, scales and halves are bits of bfloat16;
    /// values are bits of float32.
    #[derive(Deserialize)]
    struct Reference {
        name: String,
        columns: usize,
        weights: Vec<u16>,
        scales: Vec<u16>,
        integers: Vec<i8>,
        values: Vec<u32>,
        halves: Vec<u16>,
    }

    impl Reference {
        fn all() -> Vec<Self> {
            serde_json::from_str(include_str!("../../../tests/fixtures/int4.json")).unwrap()
        }

        /// Returns the first index, the number of weights and the scale of each group.
        fn groups(&self) -> impl Iterator<Item = (usize, usize, u16)> {
            let per_row = self.columns.div_ceil(GROUP);
            self.scales.iter().enumerate().map(move |(index, &scale)| {
                let column = index % per_row * GROUP;
                (index / per_row * self.columns + column, GROUP.min(self.columns - column), scale)
            })
        }
    }

    /// Reads weight `k` of a packed column as the kernels read it.
    fn unpacked(words: [u32; GROUP / 4], k: usize) -> i8 {
        let half = GROUP / 2;
        let word = words[k % half / 4];
        let nibble = word >> (8 * (k % 4) + 4 * (k / half)) & 15;
        nibble as i8 - WeightFormat::Int4.offset() as i8
    }

    #[test]
    fn int4_groups_dequantise_like_published_code() {
        let (mut groups, mut zeros, mut subnormal) = (0, 0, 0);
        for reference in Reference::all() {
            for (first, count, scale) in reference.groups() {
                let mut values = [0; GROUP];
                values[..count].copy_from_slice(&reference.integers[first..first + count]);
                let group = WeightGroup { values, scale };
                let packed = group.stored(WeightFormat::Int4);
                for k in 0..count {
                    let (value, at) = (group.value(k), first + k);
                    assert_eq!(value.to_bits(), reference.values[at], "{}, {at}", reference.name);
                    // Rounding to bfloat16 flushes denormals to zero.
                    let half = reference.halves[at];
                    let half = if value.is_subnormal() { half & 0x8000 } else { half };
                    assert_eq!(to_bf16(value), half, "{}, {at} in bfloat16", reference.name);
                    assert_eq!(unpacked(packed, k), values[k], "{}, {at} packed", reference.name);
                }
                groups += 1;
                zeros += usize::from(values == [0; GROUP]);
                subnormal += usize::from(scale < 1 << 7);
            }
        }
        assert!(groups > 60 && zeros >= 3 && subnormal >= 6, "{groups} groups, {zeros}, {subnormal}");
    }

    /// A checkpoint of weights that are already int4 keeps their values.
    #[test]
    fn weights_that_are_int4_already_keep_their_values() {
        let mut small = 0;
        for reference in Reference::all() {
            for (first, count, _) in reference.groups() {
                let values: Vec<f32> =
                    reference.values[first..first + count].iter().map(|&bits| f32::from_bits(bits)).collect();
                let most = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let expected = if most < MIN_MAGNITUDE { vec![0.0; count] } else { values.clone() };
                assert_eq!(
                    quantised_weights(&values, WeightFormat::Int4),
                    expected,
                    "{}, {first}",
                    reference.name
                );
                small += usize::from(most > 0.0 && most < MIN_MAGNITUDE);
            }
        }
        assert!(small > 6, "{small}");
    }

    /// The scale with the least error is chosen of several, among them that of published code.
    #[test]
    fn int4_errors_are_below_those_of_published_code() {
        for name in ["normal", "uniform"] {
            let reference = Reference::all().into_iter().find(|reference| reference.name == name).unwrap();
            let weights: Vec<f32> = reference.weights.iter().map(|&bits| from_bf16(bits)).collect();
            let ours: Vec<f32> = weights
                .chunks(reference.columns)
                .flat_map(|row| quantised_weights(row, WeightFormat::Int4))
                .collect();
            let theirs: Vec<f32> = reference.values.iter().map(|&bits| f32::from_bits(bits)).collect();
            let relative_error = |values: &[f32]| {
                let squares = |(x, y): (&f32, &f32)| f64::from(x - y).powi(2);
                weights.iter().zip(values).map(squares).sum::<f64>().sqrt()
                    / weights.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
            };
            println!(
                "{name}: {:.4} lost, {:.4} by the published scale",
                relative_error(&ours),
                relative_error(&theirs)
            );
            assert!(relative_error(&ours) < relative_error(&theirs), "{name}");
        }
    }
}
