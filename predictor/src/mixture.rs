//! Several predictions become one, each with its weight per layer.

use crate::error::PredictError;
use crate::shares::Shares;
use crate::vector::add_scaled;
use serde::{Deserialize, Serialize};

/// Rounds of expectation-maximisation; weights have settled to three digits long before.
const ROUNDS: usize = 100;

/// Weights of some predictors, [layers, parts]; those of a layer sum to 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mixture {
    weights: Vec<Vec<f32>>,
}

impl Mixture {
    /// Every part alike.
    #[must_use]
    pub fn equal(layers: usize, parts: usize) -> Self {
        Self { weights: vec![vec![1.0 / parts as f32; parts]; layers] }
    }

    /// The weights under which the true shares are likeliest: expectation-maximisation of the
    /// cross-entropy, which is convex in the weights. Each case is what the parts predicted, and the truth.
    #[must_use]
    pub fn fit<const PARTS: usize>(layers: usize, cases: &[([Shares; PARTS], Shares)]) -> Self {
        let parts = PARTS;
        let mut fitted = Self::equal(layers, parts);
        if cases.is_empty() {
            return fitted;
        }
        for (layer, weights) in fitted.weights.iter_mut().enumerate() {
            for _ in 0..ROUNDS {
                let mut gained = vec![0.0_f64; parts];
                for (predictions, truth) in cases {
                    let truth = layer_of(truth, layer);
                    for (expert, &share) in truth.iter().enumerate().filter(|(_, share)| **share > 0.0) {
                        let of_part = |(weight, shares): (&f32, &Shares)| {
                            f64::from(weight * layer_of(shares, layer).get(expert).copied().unwrap_or(0.0))
                        };
                        let each: Vec<f64> = weights.iter().zip(predictions).map(of_part).collect();
                        let sum: f64 = each.iter().sum();
                        if sum > 0.0 {
                            gained
                                .iter_mut()
                                .zip(each)
                                .for_each(|(gained, one)| *gained += f64::from(share) * one / sum);
                        }
                    }
                }
                let total: f64 = gained.iter().sum();
                if total > 0.0 {
                    *weights = gained.iter().map(|gained| (gained / total) as f32).collect();
                }
            }
        }
        fitted
    }

    /// The weights, [layers][parts].
    #[must_use]
    pub fn weights(&self) -> &[Vec<f32>] {
        &self.weights
    }

    /// The weighted sum of `predictions`, one per part.
    ///
    /// # Errors
    /// The predictions are not as many, or not as large, as the weights.
    pub fn combine(&self, predictions: &[Shares]) -> Result<Shares, PredictError> {
        let experts = predictions.first().map_or(1, Shares::experts);
        let mut sum = vec![0.0; self.weights.len() * experts];
        for (layer, (weights, target)) in self.weights.iter().zip(sum.chunks_exact_mut(experts)).enumerate() {
            PredictError::require_size("a layer of the mixture", weights.len(), predictions.len())?;
            for (weight, shares) in weights.iter().zip(predictions) {
                PredictError::require_size("a prediction", self.weights.len(), shares.layers())?;
                add_scaled(target, *weight, layer_of(shares, layer));
            }
        }
        Shares::from_weights(experts, sum)
    }
}

fn layer_of(shares: &Shares, layer: usize) -> &[f32] {
    shares.rows().nth(layer).unwrap_or_default()
}
