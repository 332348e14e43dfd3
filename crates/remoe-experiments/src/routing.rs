//! Requests whose routing is drawn, for models without recorded routing.

use crate::scenario::{ExpertShares, SimulatedRequest};
use crate::shape::Shape;
use fastrand::Rng;
use serde::Serialize;

/// How unevenly experts are used, and how far single requests are from the mean of all.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Routing {
    /// The i-th busiest expert of a layer has a share proportional to i to the power of minus this; 0:
    /// all alike. The busiest quarter of 16 experts does 50 % of the work at 0.7, and 42 to 52 % on the
    /// demo model for prompts of one kind (its card).
    pub skew: f64,
    /// A request's share of an expert is the mean's times a factor drawn from 1/spread to spread (uniform
    /// in the logarithm), normalised; 1: every request is the mean.
    pub spread: f64,
    /// Seed of the draws; the same seed draws the same requests.
    pub seed: u64,
}

impl Default for Routing {
    fn default() -> Self {
        Self { skew: 0.7, spread: 2.0, seed: 0 }
    }
}

impl Routing {
    /// `count` requests of `input_tokens` each. All are predicted to be the mean; prefill and decode of
    /// a request have the same shares.
    #[must_use]
    pub fn requests(&self, shape: &Shape, count: usize, input_tokens: f64) -> Vec<SimulatedRequest> {
        let mut random = Rng::with_seed(self.seed);
        let mean: ExpertShares =
            (0..shape.moe_layers()).map(|_| self.mean(shape.facts.experts, &mut random)).collect();
        let requests = (0..count).map(|_| {
            let shares: ExpertShares = mean.iter().map(|row| self.drawn(row, &mut random)).collect();
            SimulatedRequest {
                input_tokens,
                predicted: mean.clone(),
                prefill: shares.clone(),
                decode: shares,
            }
        });
        requests.collect()
    }

    /// Shares of one layer, the busiest expert anywhere.
    pub(crate) fn mean(&self, experts: usize, random: &mut Rng) -> Vec<f64> {
        let mut weights: Vec<f64> = (1..=experts).map(|rank| (rank as f64).powf(-self.skew)).collect();
        random.shuffle(&mut weights);
        normalised(weights)
    }

    /// Shares of one request whose class has the shares `mean`.
    pub(crate) fn drawn(&self, mean: &[f64], random: &mut Rng) -> Vec<f64> {
        let factor = |random: &mut Rng| self.spread.powf(2.0 * random.f64() - 1.0);
        normalised(mean.iter().map(|share| share * factor(random)).collect())
    }
}

fn normalised(weights: Vec<f64>) -> Vec<f64> {
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_quarter_does_half_of_the_work() {
        let mut shares = Routing::default().mean(16, &mut Rng::with_seed(1));
        shares.sort_by(|a, b| b.total_cmp(a));
        let busiest: f64 = shares[..4].iter().sum();
        assert!((busiest - 0.5).abs() < 0.01, "{busiest}");
    }

    #[test]
    fn shares_sum_to_one_and_follow_the_seed() {
        let shape = Shape::gpt2_moe();
        let [first, second, other] =
            [0, 0, 1].map(|seed| Routing { seed, ..Routing::default() }.requests(&shape, 3, 100.0));
        assert_eq!(first, second);
        assert_ne!(first, other);
        let rows = first.iter().flat_map(|request| request.prefill.iter().chain(&request.predicted));
        rows.for_each(|row| assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{row:?}"));
        let even = Routing { skew: 0.0, spread: 1.0, seed: 0 }.requests(&shape, 1, 100.0);
        assert!(even[0].prefill.iter().flatten().all(|share| (share - 0.125).abs() < 1e-12));
    }
}
