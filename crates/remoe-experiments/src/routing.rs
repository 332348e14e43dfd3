//! Random routing of requests, for models without recorded routing.

use crate::scenario::{ExpertShares, SimulatedRequest};
use crate::shape::Shape;
use fastrand::Rng;
use serde::Serialize;

/// Distribution of random routing: skew of the mean, and spread of single requests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Routing {
    /// Exponent of the mean: the i-th busiest expert of a layer has a share proportional to i^-skew. 0 is uniform.
    ///
    /// At 0.7 the busiest quarter of 16 experts does 50 % of the work; on the demo model it does 42 to 52 % for prompts of
    /// one kind (its card).
    pub skew: f64,
    /// Spread of requests: a request's share of an expert is the mean times a log-uniform random factor from 1/spread to
    /// spread, normalised. At 1 every request has the mean shares.
    pub spread: f64,
    /// Random seed.
    pub seed: u64,
}

impl Default for Routing {
    fn default() -> Self {
        Self { skew: 0.7, spread: 2.0, seed: 0 }
    }
}

impl Routing {
    /// Draws `count` requests of `input_tokens` each.
    ///
    /// The mean is predicted for all of them. Prefill and decode of a request have the same shares.
    #[must_use]
    pub fn requests(&self, shape: &Shape, count: usize, input_tokens: f64) -> Vec<SimulatedRequest> {
        let mut random = Rng::with_seed(self.seed);
        let mean: ExpertShares =
            (0..shape.moe_layers()).map(|_| self.mean(shape.facts.experts, &mut random)).collect();
        let requests = (0..count).map(|_| {
            let shares: ExpertShares = mean.iter().map(|row| self.draw(row, &mut random)).collect();
            SimulatedRequest {
                input_tokens,
                predicted: mean.clone(),
                prefill: shares.clone(),
                decode: shares,
            }
        });
        requests.collect()
    }

    /// Draws the mean shares of one layer, with the experts in random order.
    pub(crate) fn mean(&self, experts: usize, random: &mut Rng) -> Vec<f64> {
        let mut weights: Vec<f64> = (1..=experts).map(|rank| (rank as f64).powf(-self.skew)).collect();
        random.shuffle(&mut weights);
        normalised(weights)
    }

    /// Draws the shares of one request around `mean`.
    pub(crate) fn draw(&self, mean: &[f64], random: &mut Rng) -> Vec<f64> {
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
    fn busiest_quarter_of_experts_does_half_of_the_work() {
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
