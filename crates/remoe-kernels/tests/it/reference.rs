//! Comparison with float64, within an error bound that follows from the order of accumulation: each fused multiply-add
//! rounds once.

use crate::common;

use common::{Data, Expert, SplitMix64, bits, forward, pool, to_bytes};
use remoe_kernels::{Activation, Dtype, ExpertMatrix};

/// Unit roundoff of float32 and of bfloat16.
const U32: f64 = 1.0 / (1u64 << 24) as f64;
const U16: f64 = 1.0 / (1u64 << 8) as f64;

/// Exact value and the largest error of a computed one.
#[derive(Clone, Copy)]
struct Near {
    value: f64,
    error: f64,
}

impl Near {
    fn rounded(self, unit: f64) -> Self {
        Self { value: self.value, error: self.error + unit * (self.value.abs() + self.error) }
    }

    /// Bounds a dot product that takes a fused multiply-add per element.
    fn dot(x: &[Self], w: &[f32]) -> Self {
        let n = x.len() as f64 + 1.0;
        let mut sum = Self { value: 0.0, error: 0.0 };
        let mut magnitude = 0.0;
        for (x, &w) in x.iter().zip(w) {
            let w = f64::from(w);
            sum.value += x.value * w;
            sum.error += x.error * w.abs();
            magnitude += (x.value.abs() + x.error) * w.abs();
        }
        sum.error += n * U32 / (1.0 - n * U32) * magnitude;
        sum
    }

    fn times(self, other: Self) -> Self {
        let value = self.value * other.value;
        let error =
            self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error;
        Self { value, error }.rounded(U32)
    }

    fn biased(self, expert: &Expert, matrix: ExpertMatrix, n: usize, unit: f64) -> Self {
        let Some(bias) = expert.biases[matrix as usize].get(n) else { return self };
        Self { value: self.value + f64::from(*bias), ..self }.rounded(U32).rounded(unit)
    }

    /// Returns the factor of an activation.
    fn factor(self, activation: Activation) -> Self {
        match activation {
            Activation::ClampedSwiglu => {
                Self { value: self.value.clamp(-7.0, 7.0) + 1.0, ..self }.rounded(U32)
            }
            _ => self,
        }
    }

    /// Bounds the result of an activation. No activation is steeper than 1.13, and its own operations err by a few units
    /// of roundoff. An error of three units in an exponent is multiplied by the exponent's size.
    fn activated(self, activation: Activation) -> Self {
        let x = self.value;
        let (value, exponent) = match activation {
            Activation::Relu => (x.max(0.0), 0.0),
            Activation::Silu => (x / (1.0 + (-x).exp()), x),
            Activation::ClampedSwiglu => {
                (x.min(7.0) / (1.0 + (-1.702 * x.min(7.0)).exp()), 1.702 * x.min(7.0))
            }
            Activation::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                (0.5 * x * (1.0 + inner.tanh()), 2.0 * inner)
            }
        };
        let own = (6.0 + 3.0 * exponent.abs()) * U32 * value.abs();
        Self { value, error: 1.13 * self.error + own + f64::from(f32::MIN_POSITIVE) }
    }
}

fn row(expert: &Expert, x: &[f32]) -> Vec<Near> {
    let shape = expert.shape;
    let (hidden, width) = (shape.hidden(), shape.width());
    let unit = if shape.dtype() == Dtype::Bf16 { U16 } else { 0.0 };
    let x: Vec<Near> = x.iter().map(|&x| Near { value: f64::from(x), error: 0.0 }).collect();
    let h: Vec<Near> = (0..width)
        .map(|n| {
            let gate = Near::dot(&x, &expert.gate[n * hidden..][..hidden]).rounded(unit);
            let up = Near::dot(&x, &expert.up[n * hidden..][..hidden]).rounded(unit);
            let gate = gate.biased(expert, ExpertMatrix::Gate, n, unit);
            let up = up.biased(expert, ExpertMatrix::Up, n, unit).factor(shape.activation());
            gate.activated(shape.activation()).rounded(unit).times(up.rounded(unit)).rounded(unit)
        })
        .collect();
    let down = |n: usize| Near::dot(&h, &expert.down[n * width..][..width]).rounded(unit);
    (0..hidden).map(|n| down(n).biased(expert, ExpertMatrix::Down, n, unit)).collect()
}

#[test]
fn results_are_within_the_bound_of_the_order() {
    let mut random = SplitMix64(11);
    let pool = pool(2, None);
    for (hidden, width) in [(64, 32), (41, 7), (256, 96), (777, 130)] {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for activation in
                [Activation::Silu, Activation::GeluTanh, Activation::Relu, Activation::ClampedSwiglu]
            {
                let expert = Expert::new(&mut random, Data::Ordinary, hidden, width, dtype, activation);
                let rows = 7;
                let inputs = Data::Ordinary.vector(&mut random, rows * hidden, dtype);
                let index: Vec<u32> = (0..rows as u32).collect();
                let output = forward(&pool, &expert.packed, &to_bytes(&inputs, dtype), &index);
                let output = bits(&output, dtype);
                let shift = if dtype == Dtype::Bf16 { 16 } else { 0 };
                let (mut largest_error, mut largest_value) = (0.0f64, 0.0f64);
                for (x, out) in inputs.chunks_exact(hidden).zip(output.chunks_exact(hidden)) {
                    for (near, &out) in row(&expert, x).iter().zip(out) {
                        let out = f64::from(f32::from_bits(out << shift));
                        let error = (out - near.value).abs();
                        assert!(
                            error <= near.error,
                            "{dtype} {activation:?} {hidden}x{width}: {out} instead of {}, off by {error:e}, allowed {:e}",
                            near.value,
                            near.error
                        );
                        largest_error = largest_error.max(error);
                        largest_value = largest_value.max(near.value.abs());
                    }
                }
                // The bounds are generous, so the typical error is checked as well.
                let typical = if dtype == Dtype::Bf16 { 2e-2 } else { 1e-5 };
                assert!(
                    largest_error <= typical * largest_value,
                    "{dtype} {largest_error:e} of {largest_value:e}"
                );
            }
        }
    }
}
