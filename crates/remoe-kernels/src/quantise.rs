//! Weights and rows as integers: what a group of 32 elements becomes.
//!
//! A weight is `scale * q`, a bfloat16 scale for each group of 32 consecutive weights of a row, and an integer `q`:
//!
//! - int8: the scale is the largest magnitude of the group / 127, rounded to bfloat16, and `q`, between -127 and 127,
//!   is the integer nearest to `weight * (1 / scale)`.
//! - int4: `q` is between -8 and 7. The weight of the largest magnitude, with its sign, is divided by each of
//!   [`INT4_REACHES`] in turn, and of these scales, rounded to bfloat16, the one with the least sum of squared errors
//!   is taken (of equals, the first).
//! - mxfp4: the weight is the power of two whose exponent is 2 less than that of the largest magnitude, times half of
//!   one of [`E2M1`] with a sign: the nearest, at most 6 (OCP Microscaling Formats 1.0, 6.3). `q` is twice that, and
//!   the scale half the power of two. Weights that are MXFP4 already stay what they are.
//!
//! A row that is multiplied with such weights becomes integers as well, each group by itself: `x = scale * q`, a
//! float32 scale of the largest magnitude / 127, `q` nearest to `x * (127 / largest magnitude)`. Ties go to even
//! everywhere. A group whose largest magnitude is below 2^-100 becomes zeros, one with an infinity or a NaN gets the
//! scale NaN. A row's last group is filled up with zeros.
//!
//! Everything here is a function of 32 numbers, written once, in scalar operations whose results no float mode of
//! [`crate::paths::float_mode`] changes: no operand and no result that matters is denormal.

use crate::numerics::{NAN_BITS, from_bf16, to_bf16};
use crate::{Dtype, WeightFormat};

/// Elements of K that share a scale.
pub const GROUP: usize = 32;

/// Largest magnitude of an 8-bit integer.
const INT8_REACH: f32 = 127.0;
/// Values that the weight of the largest magnitude may take as a 4-bit integer: beyond -8 it is cut off, so that the
/// others are nearer.
const INT4_REACHES: [f32; 6] = [-8.0, -7.5, -7.0, -8.5, -9.0, 7.0];
/// Twice the magnitudes of e2m1, by their codes; 8 more is the code of the negative one.
pub const E2M1: [i8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
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
    /// Contribution of the offset of stored weights to a dot product with these integers, negated.
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
            WeightFormat::Plain | WeightFormat::Fp8 => zeros(0.0),
            WeightFormat::Mxfp4 => {
                // Powers of two: of the exponent, 2 less for the largest of e2m1 and 1 for its doubling.
                let scale = f32::from_bits((magnitude.to_bits() & 0x7f80_0000) - (3 << 23));
                let factor = 1.0 / scale;
                Self { values: narrowed(group, |x| e2m1(x * factor)), scale: to_bf16(scale) }
            }
            WeightFormat::Int8 => Self::scaled(group, to_bf16(magnitude / INT8_REACH), -127.0, 127.0),
            WeightFormat::Int4 => {
                // The first of those with the largest magnitude.
                let extreme = group.iter().copied().find(|x| x.abs() == magnitude).unwrap_or(magnitude);
                let scales = INT4_REACHES.map(|reach| to_bf16(extreme / reach));
                // In units of the magnitude's power of two, so that no square is denormal or infinite.
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

    /// `group` by a scale, with integers between `lowest` and `highest`.
    #[inline(always)]
    fn scaled(group: &[f32; GROUP], scale: u16, lowest: f32, highest: f32) -> Self {
        let factor = 1.0 / from_bf16(scale);
        Self { values: narrowed(group, |x| nearest((x * factor).clamp(lowest, highest))), scale }
    }

    /// The words of a packed column: four integers with their offset each, or two times four in the first half of them;
    /// of MXFP4 their codes.
    #[inline(always)]
    pub(crate) fn stored(&self, format: WeightFormat) -> [u32; GROUP / 4] {
        let mut bytes = [0; GROUP];
        for (byte, &value) in bytes.iter_mut().zip(&self.values) {
            *byte = match format {
                WeightFormat::Mxfp4 => code(value),
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

    /// The group whose words and scale these are: the reverse of [`stored`](Self::stored).
    #[inline(always)]
    pub(crate) fn of_stored(words: [u32; GROUP / 4], scale: u16, format: WeightFormat) -> Self {
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
                    let size = E2M1[usize::from(code & 7)];
                    if code & 8 == 0 { size } else { -size }
                }
            }
        });
        Self { values, scale }
    }

    /// Writes what the first elements stand for, as many as `to` has room for, rounded to `dtype`. Products of an
    /// integer and a bfloat16 are exact in float32.
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

    /// The number that element `k` stands for.
    pub(crate) fn value(&self, k: usize) -> f32 {
        f32::from(self.values[k]) * from_bf16(self.scale)
    }
}

/// Small integers of a group's numbers: two loops, each of which is made with vectors.
#[inline(always)]
fn narrowed(group: &[f32; GROUP], integer: impl Fn(f32) -> i32) -> [i8; GROUP] {
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

/// Returns the value among twice the magnitudes of e2m1 that is nearest to `x`, ties to even codes, with the sign of
/// `x`.
#[inline(always)]
fn e2m1(x: f32) -> i32 {
    let size = x.abs();
    let ahead = [size > 0.5, size >= 1.5, size > 2.5, size >= 3.5, size > 5.0, size >= 7.0, size > 10.0];
    // What each further magnitude adds to the one before.
    let steps = [1, 1, 1, 1, 2, 2, 4];
    let mut value = 0;
    for (ahead, step) in ahead.into_iter().zip(steps) {
        value += i32::from(ahead) * step;
    }
    if x < 0.0 { -value } else { value }
}

/// The code of one of twice the numbers of e2m1: what [`E2M1`] leaves out is not counted.
#[inline(always)]
fn code(value: i8) -> u8 {
    let size = value.unsigned_abs();
    let magnitude = size - u8::from(size > 4) - u8::from(size > 6) - 3 * u8::from(size > 8);
    magnitude | value as u8 >> 4 & 8
}

/// Sums of squared errors of `group` times `unit` as int4, of each scale. Every sum is in the order of the group; those
/// of all scales are made side by side, so that none waits for another.
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

/// The weights of a row as `format` keeps them: what their integers and scales stand for.
#[must_use]
pub fn kept(row: &[f32], format: WeightFormat) -> Vec<f32> {
    if !format.has_integers() {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use serde::Deserialize;

    /// Published code's quantisation of weights as int4 (`tests/fixtures/int4.py`); weights, scales and halves are bits
    /// of bfloat16, values of float32.
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

        /// Returns the start, the number of weights and the scale of every group.
        fn groups(&self) -> impl Iterator<Item = (usize, usize, u16)> {
            let per_row = self.columns.div_ceil(GROUP);
            self.scales.iter().enumerate().map(move |(index, &scale)| {
                let column = index % per_row * GROUP;
                (index / per_row * self.columns + column, GROUP.min(self.columns - column), scale)
            })
        }
    }

    /// The number of element `k` of a packed column, read as the kernels read it.
    fn unpacked(words: [u32; GROUP / 4], k: usize) -> i8 {
        let half = GROUP / 2;
        let word = words[k % half / 4];
        let nibble = word >> (8 * (k % 4) + 4 * (k / half)) & 15;
        nibble as i8 - WeightFormat::Int4.offset() as i8
    }

    #[test]
    fn integers_and_scales_mean_what_published_code_makes_of_them() {
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
                    // Numbers that are not normal become zero where something is rounded to bfloat16.
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

    /// Weights of a checkpoint that was made of such integers are kept as they are.
    #[test]
    fn what_published_code_made_int4_stays_what_it_is() {
        let mut small = 0;
        for reference in Reference::all() {
            for (first, count, _) in reference.groups() {
                let values: Vec<f32> =
                    reference.values[first..first + count].iter().map(|&bits| f32::from_bits(bits)).collect();
                let most = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let expected = if most < LEAST { vec![0.0; count] } else { values.clone() };
                assert_eq!(kept(&values, WeightFormat::Int4), expected, "{}, {first}", reference.name);
                small += usize::from(most > 0.0 && most < LEAST);
            }
        }
        assert!(small > 6, "{small}");
    }

    /// Other scales are tried than the one of published code, and the best is taken.
    #[test]
    fn less_is_lost_than_by_the_scale_of_published_code() {
        for name in ["normal", "uniform"] {
            let reference = Reference::all().into_iter().find(|reference| reference.name == name).unwrap();
            let weights: Vec<f32> = reference.weights.iter().map(|&bits| from_bf16(bits)).collect();
            let ours: Vec<f32> =
                weights.chunks(reference.columns).flat_map(|row| kept(row, WeightFormat::Int4)).collect();
            let theirs: Vec<f32> = reference.values.iter().map(|&bits| f32::from_bits(bits)).collect();
            let lost = |values: &[f32]| {
                let squares = |(x, y): (&f32, &f32)| f64::from(x - y).powi(2);
                weights.iter().zip(values).map(squares).sum::<f64>().sqrt()
                    / weights.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
            };
            println!("{name}: {:.4} lost, {:.4} by the published scale", lost(&ours), lost(&theirs));
            assert!(lost(&ours) < lost(&theirs), "{name}");
        }
    }
}
