//! Operations on single rows, in plain Rust: float32 arithmetic has the same bits on every processor. Sums are computed
//! in 16 lanes.
//!
//! Loops are written so that the compiler can vectorise them: no branch on the data, no checked arithmetic, and no
//! closure that it would compile separately. Every function is `inline(always)`, so that it is compiled with its caller's
//! target features ([`crate::VectorisedWork`]).

use crate::Dtype;
use crate::numerics::{from_bf16, round_bf16, to_bf16};

const LANES: usize = 16;

/// Widens a row of `dtype` elements to float32.
#[inline(always)]
pub(crate) fn widen(dtype: Dtype, from: &[u8], to: &mut [f32]) {
    match dtype {
        Dtype::F32 => {
            for (to, from) in to.iter_mut().zip(from.as_chunks().0) {
                *to = f32::from_le_bytes(*from);
            }
        }
        Dtype::Bf16 => {
            for (to, from) in to.iter_mut().zip(from.as_chunks().0) {
                *to = f32::from_bits(u32::from(u16::from_le_bytes(*from)) << 16);
            }
        }
    }
}

/// Rounds a row to `dtype` elements and writes it.
#[inline(always)]
pub(crate) fn narrow(dtype: Dtype, from: &[f32], to: &mut [u8]) {
    match dtype {
        Dtype::F32 => {
            for (from, to) in from.iter().zip(to.as_chunks_mut().0) {
                *to = from.to_le_bytes();
            }
        }
        Dtype::Bf16 => {
            for (from, to) in from.iter().zip(to.as_chunks_mut().0) {
                *to = to_bf16(*from).to_le_bytes();
            }
        }
    }
}

/// Rounds `x` to the nearest bfloat16 if `BF16`, else returns it.
#[inline(always)]
fn round_if<const BF16: bool>(x: f32) -> f32 {
    if BF16 { round_bf16(x) } else { x }
}

/// Computes the mean of the elements.
#[inline(always)]
fn mean(x: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x;
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += x;
    }
    sum_lanes(lanes) / x.len() as f32
}

/// Computes the mean of `(x - centre)^2`.
#[inline(always)]
fn mean_square(x: &[f32], centre: f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += (x - centre) * (x - centre);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += (x - centre) * (x - centre);
    }
    sum_lanes(lanes) / x.len() as f32
}

/// Sums the lanes, by adding the upper half to the lower one repeatedly.
#[inline(always)]
fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
}

/// Layer normalisation: `(x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias`.
#[inline(always)]
pub(crate) fn layer_norm(x: &mut [f32], weight: &[f32], bias: &[f32], epsilon: f32) {
    let centre = mean(x);
    let factor = 1.0 / (mean_square(x, centre) + epsilon).sqrt();
    for ((x, weight), bias) in x.iter_mut().zip(weight).zip(bias) {
        *x = (*x - centre) * factor * weight + bias;
    }
}

/// RMS normalisation: `x / sqrt(mean(x^2) + epsilon)`, rounded if `BF16`, times `weight`.
#[inline(always)]
pub(crate) fn rms_norm<const BF16: bool>(x: &mut [f32], weight: &[f32], epsilon: f32) {
    // `x - 0` has the bits of `x`, so that this is the mean of `x^2`.
    let factor = 1.0 / (mean_square(x, 0.0) + epsilon).sqrt();
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = round_if::<BF16>(*x * factor) * weight;
    }
}

/// Adds `y` to `x`, both rows of `dtype` elements.
#[inline(always)]
pub(crate) fn add_rows(dtype: Dtype, x: &mut [u8], y: &[u8]) {
    match dtype {
        Dtype::F32 => {
            for (x, y) in x.as_chunks_mut().0.iter_mut().zip(y.as_chunks().0) {
                *x = (f32::from_le_bytes(*x) + f32::from_le_bytes(*y)).to_le_bytes();
            }
        }
        Dtype::Bf16 => {
            for (x, y) in x.as_chunks_mut().0.iter_mut().zip(y.as_chunks().0) {
                let sum = from_bf16(u16::from_le_bytes(*x)) + from_bf16(u16::from_le_bytes(*y));
                *x = to_bf16(sum).to_le_bytes();
            }
        }
    }
}

/// Adds `y` to `x`.
#[inline(always)]
pub(crate) fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Clamps the elements to `-bound ..= bound`; NaN stays NaN.
#[inline(always)]
pub(crate) fn clamp(x: &mut [f32], bound: f32) {
    for x in x {
        *x = if *x < -bound { -bound } else { *x };
        *x = if *x > bound { bound } else { *x };
    }
}

/// Multiplies the elements by `factor`.
#[inline(always)]
pub(crate) fn scale(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}

/// Rotates pairs of elements that are `cos.len()` apart. If `BF16`, products are rounded before they are added.
#[inline(always)]
pub(crate) fn rotate_halves<const BF16: bool>(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = x.split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let (old_a, old_b) = (*a, *b);
        *a = round_if::<BF16>(old_a * cos) + round_if::<BF16>(-old_b * sin);
        *b = round_if::<BF16>(old_b * cos) + round_if::<BF16>(old_a * sin);
    }
}

/// Rotates pairs of neighbouring elements. If `BF16`, products are rounded before they are added.
#[inline(always)]
pub(crate) fn rotate_pairs<const BF16: bool>(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (([a, b], cos), sin) in x.as_chunks_mut().0.iter_mut().zip(cos).zip(sin) {
        let (old_a, old_b) = (*a, *b);
        *a = round_if::<BF16>(old_a * cos) - round_if::<BF16>(old_b * sin);
        *b = round_if::<BF16>(old_a * sin) + round_if::<BF16>(old_b * cos);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalised_rows_have_unit_length_and_round_twice() {
        let mut x: Vec<f32> = (0..37).map(|i| i as f32 - 11.0).collect();
        rms_norm::<false>(&mut x, &[1.0; 37], 0.0);
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 37.0;
        assert!((mean - 1.0).abs() < 1e-6, "{mean}");
        // 1 / rms is 0.98.. of both; rounded before the weight, 1.01 times that is another number.
        let mut x = [1.0_f32, 1.03];
        let factor = 1.0 / ((1.0 + 1.03_f32 * 1.03) / 2.0).sqrt();
        rms_norm::<true>(&mut x, &[1.01, 1.01], 0.0);
        assert_eq!(x[0], round_bf16(factor) * 1.01);
    }

    #[test]
    fn rotations_keep_lengths() {
        let (sin, cos) = (0.3_f32.sin(), 0.3_f32.cos());
        let mut halves = [1.0, 2.0, 3.0, 4.0];
        rotate_halves::<false>(&mut halves, &[cos; 2], &[sin; 2]);
        assert_eq!(halves[0], 1.0 * cos + -3.0 * sin);
        assert_eq!(halves[2], 3.0 * cos + 1.0 * sin);
        let mut pairs = [1.0, 3.0, 2.0, 4.0];
        rotate_pairs::<false>(&mut pairs, &[cos; 2], &[sin; 2]);
        assert_eq!([pairs[0], pairs[2], pairs[1], pairs[3]], halves);
    }
}
