//! Weighted combination of several predictions, with weights per layer.

use crate::error::PredictError;
use crate::shares::UsageShares;
use crate::vector::add_scaled;
use serde::{Deserialize, Serialize};

/// Rounds of expectation-maximisation; weights settle to three digits long before.
const ROUNDS: usize = 100;

/// Weights of several predictors, [layers, parts]. Each layer's sum to 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mixture {
    weights: Vec<Vec<f32>>,
}

impl Mixture {
    /// Returns equal weights.
    #[must_use]
    pub fn equal(layers: usize, parts: usize) -> Self {
        Self { weights: vec![vec![1.0 / parts as f32; parts]; layers] }
    }

    /// Fits the weights that maximise the likelihood of the true shares, by expectation-maximisation of the
    /// cross-entropy, which is convex in the weights. Each case has the predictions of the parts and the true shares.
    #[must_use]
    pub fn fit<const PARTS: usize>(layers: usize, cases: &[([UsageShares; PARTS], UsageShares)]) -> Self {
        let parts = PARTS;
        let mut fitted = Self::equal(layers, parts);
        if cases.is_empty() {
            return fitted;
        }
        for (layer, weights) in fitted.weights.iter_mut().enumerate() {
            for _ in 0..ROUNDS {
                let mut responsibilities = vec![0.0_f64; parts];
                for (predictions, truth) in cases {
                    let truth = layer_row(truth, layer);
                    for (expert, &share) in truth.iter().enumerate().filter(|(_, share)| **share > 0.0) {
                        let contribution = |(weight, shares): (&f32, &UsageShares)| {
                            f64::from(weight * layer_row(shares, layer).get(expert).copied().unwrap_or(0.0))
                        };
                        let contributions: Vec<f64> =
                            weights.iter().zip(predictions).map(contribution).collect();
                        let sum: f64 = contributions.iter().sum();
                        if sum > 0.0 {
                            responsibilities.iter_mut().zip(contributions).for_each(
                                |(responsibilities, one)| *responsibilities += f64::from(share) * one / sum,
                            );
                        }
                    }
                }
                let total: f64 = responsibilities.iter().sum();
                if total > 0.0 {
                    *weights = responsibilities
                        .iter()
                        .map(|responsibilities| (responsibilities / total) as f32)
                        .collect();
                }
            }
        }
        fitted
    }

    /// Returns the weights, [layers][parts].
    #[must_use]
    pub fn weights(&self) -> &[Vec<f32>] {
        &self.weights
    }

    /// Returns the weighted sum of `predictions`, one per part.
    ///
    /// # Errors
    /// The number or the shape of the predictions does not match the weights.
    pub fn combine(&self, predictions: &[UsageShares]) -> Result<UsageShares, PredictError> {
        let experts = predictions.first().map_or(1, UsageShares::experts);
        let mut sum = vec![0.0; self.weights.len() * experts];
        for (layer, (weights, target)) in self.weights.iter().zip(sum.chunks_exact_mut(experts)).enumerate() {
            PredictError::require_size("a layer of the mixture", weights.len(), predictions.len())?;
            for (weight, shares) in weights.iter().zip(predictions) {
                PredictError::require_size("a prediction", self.weights.len(), shares.layers())?;
                add_scaled(target, *weight, layer_row(shares, layer));
            }
        }
        UsageShares::from_weights(experts, sum)
    }
}

fn layer_row(shares: &UsageShares, layer: usize) -> &[f32] {
    shares.rows().nth(layer).unwrap_or_default()
}
