//! Operations on single rows: plain Rust, whose float32 arithmetic is the same on every processor. They are written
//! so that the compiler can use vectors, and inlined so that it uses the processor's ([`remoe_kernels::Loops`]); what is summed is
//! summed in 16 lanes.

use remoe_kernels::Dtype;
use remoe_kernels::numerics::{round_bf16, to_bf16};

const LANES: usize = 16;

/// Reads a row.
#[inline(always)]
pub(super) fn widen(dtype: Dtype, from: &[u8], to: &mut [f32]) {
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

/// Writes a row, rounded.
#[inline(always)]
pub(super) fn narrow(dtype: Dtype, from: &[f32], to: &mut [u8]) {
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

/// The nearest value that `dtype` has.
#[inline(always)]
pub(super) fn rounded(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::Bf16 => round_bf16(x),
    }
}

/// The mean of what `of` makes of the elements.
#[inline(always)]
fn mean(x: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += of(*x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += of(*x);
    }
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0] / x.len() as f32
}

/// `(x - mean(x)) / deviation(x) * weight + bias`.
#[inline(always)]
pub(super) fn layer_norm(x: &mut [f32], weight: &[f32], bias: &[f32], epsilon: f32) {
    let middle = mean(x, |x| x);
    let factor = 1.0 / (mean(x, |x| (x - middle) * (x - middle)) + epsilon).sqrt();
    for ((x, weight), bias) in x.iter_mut().zip(weight).zip(bias) {
        *x = (*x - middle) * factor * weight + bias;
    }
}

/// `x / rms(x)`, rounded, times `weight`.
#[inline(always)]
pub(super) fn norm(dtype: Dtype, x: &mut [f32], weight: &[f32], epsilon: f32) {
    let factor = 1.0 / (mean(x, |x| x * x) + epsilon).sqrt();
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = rounded(dtype, *x * factor) * weight;
    }
}

/// `x + y` in place of `x`; `elements` is room for the row.
#[inline(always)]
pub(super) fn sum(dtype: Dtype, x: &mut [u8], y: &[u8], elements: &mut [f32]) {
    match dtype {
        Dtype::F32 => {
            for (x, y) in x.as_chunks_mut().0.iter_mut().zip(y.as_chunks().0) {
                *x = (f32::from_le_bytes(*x) + f32::from_le_bytes(*y)).to_le_bytes();
            }
        }
        Dtype::Bf16 => {
            widen(dtype, x, elements);
            for (x, y) in elements.iter_mut().zip(y.as_chunks().0) {
                *x += f32::from_bits(u32::from(u16::from_le_bytes(*y)) << 16);
            }
            narrow(dtype, elements, x);
        }
    }
}

/// `x + y`.
#[inline(always)]
pub(super) fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Rotates pairs that are half a head apart. Products are rounded before they are added.
#[inline(always)]
pub(super) fn rotate_halves(dtype: Dtype, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = x.split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let (old_a, old_b) = (*a, *b);
        *a = rounded(dtype, old_a * cos) + rounded(dtype, -old_b * sin);
        *b = rounded(dtype, old_b * cos) + rounded(dtype, old_a * sin);
    }
}

/// Rotates neighbours. Products are rounded before they are added.
#[inline(always)]
pub(super) fn rotate_pairs(dtype: Dtype, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (([a, b], cos), sin) in x.as_chunks_mut().0.iter_mut().zip(cos).zip(sin) {
        let (old_a, old_b) = (*a, *b);
        *a = rounded(dtype, old_a * cos) - rounded(dtype, old_b * sin);
        *b = rounded(dtype, old_a * sin) + rounded(dtype, old_b * cos);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_norm_has_length_one_and_rounds_twice() {
        let mut x: Vec<f32> = (0..37).map(|i| i as f32 - 11.0).collect();
        norm(Dtype::F32, &mut x, &[1.0; 37], 0.0);
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 37.0;
        assert!((mean - 1.0).abs() < 1e-6, "{mean}");
        // 1 / rms is 0.98.. of both; rounded before the weight, 1.01 times that is another number.
        let mut x = [1.0_f32, 1.03];
        let factor = 1.0 / ((1.0 + 1.03_f32 * 1.03) / 2.0).sqrt();
        norm(Dtype::Bf16, &mut x, &[1.01, 1.01], 0.0);
        assert_eq!(x[0], round_bf16(factor) * 1.01);
    }

    #[test]
    fn rotations_keep_lengths() {
        let (sin, cos) = (0.3_f32.sin(), 0.3_f32.cos());
        let mut halves = [1.0, 2.0, 3.0, 4.0];
        rotate_halves(Dtype::F32, &mut halves, &[cos; 2], &[sin; 2]);
        assert_eq!(halves[0], 1.0 * cos + -3.0 * sin);
        assert_eq!(halves[2], 3.0 * cos + 1.0 * sin);
        let mut pairs = [1.0, 3.0, 2.0, 4.0];
        rotate_pairs(Dtype::F32, &mut pairs, &[cos; 2], &[sin; 2]);
        assert_eq!([pairs[0], pairs[2], pairs[1], pairs[3]], halves);
    }
}
