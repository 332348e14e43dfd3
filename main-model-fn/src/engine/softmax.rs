//! How likely tokens are, up to a factor: e^((logit - best) / temperature) of each, and their sum. Pure.
//!
//! Whatever draws or scores tokens uses these numbers. They are made of additions and multiplications
//! only, so that a seed means the same on every machine, and the compiler computes several at a time: as many as
//! the processor's vectors hold.
//! The exponential is Cephes' `expf` (S. L. Moshier), within 2e-7 of the true one.

use remoe_kernels::{VectorisedWork, run_vectorised};

/// Tokens that are looked at together: a block whose likeliest token does not matter is passed over.
pub(super) const BLOCK: usize = 256;

/// Sums that go on side by side within a block.
const LANES: usize = 8;

/// Exponents below this count as minus infinity. All tokens of the largest vocabulary (2^20) together
/// weigh less there than the last bit of a random number.
const NEGLIGIBLE: f32 = -51.0;

/// e^x for `x` from [`NEGLIGIBLE`] to 0, 0 below, and 0 for NaN.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Adding it leaves the nearest whole number in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts, the first with zeros at its end.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    let matters = x >= NEGLIGIBLE;
    let x = if matters { x } else { 0.0 };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let rest = x - whole * LN_2[0] - whole * LN_2[1];
    let mut sum = 1.987_569_1e-4_f32;
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        sum = sum * rest + coefficient;
    }
    let fraction = sum * rest * rest + rest + 1.0;
    // The whole number becomes the exponent's bits.
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    if matters { fraction * power } else { 0.0 }
}

/// The largest of `logits`; NaN is none, and without any it is minus infinity.
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

/// The weights of some tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weights {
    /// The largest logit.
    best: f32,
    temperature: f32,
    /// Smaller weights count as 0.
    least: f32,
}

impl Weights {
    /// Weights relative to a token of logit `best`, whose weight is exactly 1; those below `least` are 0.
    pub(super) fn new(best: f32, temperature: f32, least: f32) -> Self {
        Self { best, temperature, least }
    }

    /// The weight of a token.
    #[inline(always)]
    pub(super) fn of(&self, logit: f32) -> f32 {
        let weight = exp((logit - self.best) / self.temperature);
        if weight >= self.least { weight } else { 0.0 }
    }

    /// The sum over each block's logits, whose largest are `maxima`.
    pub(super) fn sums(&self, logits: &[f32], maxima: &[f32]) -> Vec<f64> {
        run_vectorised(SoftmaxSums { weights: self, logits, maxima })
    }

    /// The sum over one block's logits, of which `largest` is the largest.
    #[inline(always)]
    fn sum(&self, block: &[f32], largest: f32) -> f64 {
        // Where it weighs nothing, none of a smaller logit does.
        if self.of(largest) == 0.0 {
            return 0.0;
        }
        let mut lanes = [0.0_f64; LANES];
        let (whole, rest) = block.as_chunks::<LANES>();
        for chunk in whole {
            for (lane, &logit) in lanes.iter_mut().zip(chunk) {
                *lane += f64::from(self.of(logit));
            }
        }
        lanes.iter().sum::<f64>() + rest.iter().map(|&logit| f64::from(self.of(logit))).sum::<f64>()
    }
}

/// The largest logit of each block.
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
    fn the_exponential_is_close_exact_at_zero_and_nothing_far_away() {
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
    fn sums_are_those_of_the_single_weights() {
        let logits: Vec<f32> = (0..1003).map(|index| ((index * 7919) % 1003) as f32 / 20.0 - 30.0).collect();
        let best = largest(&logits);
        assert_eq!(best, logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        assert_eq!(largest(&[f32::NAN, -3.0, f32::NEG_INFINITY]), -3.0);
        for (temperature, least) in [(1.0, 0.0), (0.1, 0.0), (1.5, 0.05)] {
            let weights = Weights::new(best, temperature, least);
            let plain: f64 = logits
                .iter()
                .map(|&logit| (f64::from(logit - best) / f64::from(temperature)).exp())
                .filter(|&weight| weight >= f64::from(least))
                .sum();
            let sums = weights.sums(&logits, &maxima(&logits));
            let sum: f64 = sums.iter().sum();
            assert!((sum / plain - 1.0).abs() < 1e-5, "{sum} {plain}");
            // To the last bit, whatever vectors this processor has.
            let one_by_one: Vec<f64> =
                logits.chunks(BLOCK).map(|block| weights.sum(block, largest(block))).collect();
            assert_eq!(sums, one_by_one);
        }
    }
}
