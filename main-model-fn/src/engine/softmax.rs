//! Unnormalised softmax weights of tokens: e^((logit - best) / temperature), and their sums.
//!
//! All sampling and scoring uses these numbers. They consist of additions and multiplications only, so that a seed gives
//! the same tokens on every machine, and the compiler vectorises them.
//! The exponential is Cephes' `expf` (S. L. Moshier), accurate to 2e-7.

use remoe_kernels::{VectorisedWork, run_vectorised};

/// Tokens per block. Blocks without relevant tokens are skipped.
pub(super) const BLOCK: usize = 256;

/// Independent partial sums within a block, so that the compiler can vectorise them.
const LANES: usize = 8;

/// Smallest exponent with a weight above 0. Below it, all tokens of the largest vocabulary (2^20) together weigh less
/// than the last bit of a random number.
const MIN_EXPONENT: f32 = -51.0;

/// Computes e^x for `x` from [`MIN_EXPONENT`] to 0. Returns 0 for smaller `x` and for NaN.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Adding this number leaves the nearest integer in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts; the first ends with zeros, so that its products are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    let is_relevant = x >= MIN_EXPONENT;
    let x = if is_relevant { x } else { 0.0 };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let rest = x - whole * LN_2[0] - whole * LN_2[1];
    let mut sum = 1.987_569_1e-4_f32;
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        sum = sum * rest + coefficient;
    }
    let fraction = sum * rest * rest + rest + 1.0;
    // Moves the integer into the exponent bits.
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    if is_relevant { fraction * power } else { 0.0 }
}

/// Returns the largest of `logits`, ignoring NaN; minus infinity if there is none.
#[inline(always)]
pub(super) fn largest(logits: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = logits.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |best, &logit| if logit > best { logit } else { best })
}

/// Function from logits to weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weights {
    /// The largest logit.
    best: f32,
    temperature: f32,
    /// Smallest weight that counts; smaller ones are 0.
    min_weight: f32,
}

impl Weights {
    /// Creates weights relative to the logit `best`, whose weight is exactly 1. Weights below `min_weight` are 0.
    pub(super) fn new(best: f32, temperature: f32, min_weight: f32) -> Self {
        Self { best, temperature, min_weight }
    }

    /// Returns the weight of a logit.
    #[inline(always)]
    pub(super) fn weight(&self, logit: f32) -> f32 {
        let weight = exp((logit - self.best) / self.temperature);
        if weight >= self.min_weight { weight } else { 0.0 }
    }

    /// Returns the sum of weights of each block. `maxima`: largest logit of each block.
    pub(super) fn sums(&self, logits: &[f32], maxima: &[f32]) -> Vec<f64> {
        run_vectorised(SoftmaxSums { weights: self, logits, maxima })
    }

    /// Returns the sum of weights of one block with this `largest` logit.
    #[inline(always)]
    fn sum(&self, block: &[f32], largest: f32) -> f64 {
        // If the largest logit weighs nothing, no other does.
        if self.weight(largest) == 0.0 {
            return 0.0;
        }
        let mut lanes = [0.0_f64; LANES];
        let (whole, rest) = block.as_chunks::<LANES>();
        for chunk in whole {
            for (lane, &logit) in lanes.iter_mut().zip(chunk) {
                *lane += f64::from(self.weight(logit));
            }
        }
        lanes.iter().sum::<f64>() + rest.iter().map(|&logit| f64::from(self.weight(logit))).sum::<f64>()
    }
}

/// Returns the largest logit of each block.
pub(super) fn maxima(logits: &[f32]) -> Vec<f32> {
    run_vectorised(Maxima(logits))
}

struct Maxima<'a>(&'a [f32]);

impl VectorisedWork for Maxima<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run(self) -> Vec<f32> {
        self.0.chunks(BLOCK).map(largest).collect()
    }
}

struct SoftmaxSums<'a> {
    weights: &'a Weights,
    logits: &'a [f32],
    maxima: &'a [f32],
}

impl VectorisedWork for SoftmaxSums<'_> {
    type Output = Vec<f64>;

    #[inline(always)]
    fn run(self) -> Vec<f64> {
        let mut sums = Vec::with_capacity(self.maxima.len());
        for (block, &largest) in self.logits.chunks(BLOCK).zip(self.maxima) {
            sums.push(self.weights.sum(block, largest));
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_is_accurate_exact_at_zero_and_zero_far_below() {
        assert_eq!(exp(0.0), 1.0);
        for step in 0..=510_000 {
            let x = -(step as f32) / 10_000.0;
            let (found, expected) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((found / expected - 1.0).abs() < 2e-7, "e^{x} is {expected}, not {found}");
        }
        for x in [-51.1, -1e30, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(exp(x), 0.0, "e^{x}");
        }
    }

    #[test]
    fn block_sums_are_the_sums_of_single_weights() {
        let logits: Vec<f32> = (0..1003).map(|index| ((index * 7919) % 1003) as f32 / 20.0 - 30.0).collect();
        let best = largest(&logits);
        assert_eq!(best, logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        assert_eq!(largest(&[f32::NAN, -3.0, f32::NEG_INFINITY]), -3.0);
        for (temperature, min_weight) in [(1.0, 0.0), (0.1, 0.0), (1.5, 0.05)] {
            let weights = Weights::new(best, temperature, min_weight);
            let plain: f64 = logits
                .iter()
                .map(|&logit| (f64::from(logit - best) / f64::from(temperature)).exp())
                .filter(|&weight| weight >= f64::from(min_weight))
                .sum();
            let sums = weights.sums(&logits, &maxima(&logits));
            let sum: f64 = sums.iter().sum();
            assert!((sum / plain - 1.0).abs() < 1e-5, "{sum} {plain}");
            // Equal to the last bit with and without vector instructions.
            let one_by_one: Vec<f64> =
                logits.chunks(BLOCK).map(|block| weights.sum(block, largest(block))).collect();
            assert_eq!(sums, one_by_one);
        }
    }
}
