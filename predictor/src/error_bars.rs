//! Errors of predictions, measured on held-out prompts.

use crate::divergence;
use crate::shares::UsageShares;
use serde::{Deserialize, Serialize};

/// Quantiles of the divergence in [`ErrorBars`].
pub const QUANTILES: [f64; 3] = [0.5, 0.9, 0.95];
/// Least number of held-out prompts per class, so that a 95th percentile is meaningful.
pub const MIN_CLASS_PROMPTS: usize = 40;
/// Lower bound of a predicted sum in ratios, as a fraction of an equal share: ratios to smaller sums say nothing.
const MIN_SHARE_FRACTION: f64 = 0.01;

/// Errors of one method on held-out prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorBars {
    /// Number of held-out prompts.
    pub prompts: usize,
    /// Mean Jensen-Shannon divergence over layers and prompts, in nats.
    pub js_mean: f64,
    /// [`QUANTILES`] of the divergence in each layer, in nats.
    pub js_quantiles: Vec<[f64; QUANTILES.len()]>,
    /// For each layer, at index m: the 95th percentile over prompts of (true / predicted) summed share of the m
    /// experts that are predicted to be used least, at least 1. Index 0 is 1. `prediction_p95` of the planner takes
    /// it unchanged.
    pub least_used_p95: Vec<Vec<f64>>,
}

/// Held-out prompt with its prediction.
#[derive(Debug, Clone, PartialEq)]
pub struct ErrorCase {
    /// Disagreement of the predictor's parts: mean Jensen-Shannon divergence over layers, in nats.
    pub disagreement: f64,
    /// Predicted shares.
    pub prediction: UsageShares,
    /// True shares.
    pub truth: UsageShares,
}

/// Errors for a range of disagreement between the parts of a predictor: errors grow with it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorClass {
    /// Largest disagreement in the class: mean Jensen-Shannon divergence over layers, in nats. The last class also
    /// covers larger ones.
    pub disagreement: f64,
    /// Errors on the held-out prompts of the class.
    pub errors: ErrorBars,
}

/// Splits `cases` into `classes` classes of equal size by ascending disagreement. Returns none if a class would have
/// fewer than [`MIN_CLASS_PROMPTS`] cases.
#[must_use]
pub fn error_classes(mut cases: Vec<ErrorCase>, classes: usize) -> Vec<ErrorClass> {
    if classes == 0 || cases.len() < classes * MIN_CLASS_PROMPTS {
        return Vec::new();
    }
    cases.sort_by(|a, b| a.disagreement.total_cmp(&b.disagreement));
    let class_of = |cases: &[ErrorCase]| {
        let (predictions, truths): (Vec<_>, Vec<_>) =
            cases.iter().map(|case| (case.prediction.clone(), case.truth.clone())).unzip();
        let disagreement = cases.last().map_or(0.0, |case| case.disagreement);
        ErrorClass { disagreement, errors: ErrorBars::measure(&predictions, &truths) }
    };
    let ends = (0..=classes).map(|class| class * cases.len() / classes).collect::<Vec<_>>();
    ends.windows(2).map(|ends| class_of(&cases[ends[0]..ends[1]])).collect()
}

impl ErrorBars {
    /// Measures the errors of predictions against the true shares, at least one of each.
    #[must_use]
    pub fn measure(predictions: &[UsageShares], truths: &[UsageShares]) -> Self {
        let (layers, experts) =
            predictions.first().map_or((0, 0), |shares| (shares.layers(), shares.experts()));
        let mut divergences = vec![Vec::new(); layers];
        let mut ratios = vec![vec![Vec::new(); experts + 1]; layers];
        for (prediction, truth) in predictions.iter().zip(truths) {
            let each = divergence::per_layer(prediction, truth);
            divergences.iter_mut().zip(each).for_each(|(list, one)| list.push(one));
            for ((predicted, true_shares), ratios) in prediction.rows().zip(truth.rows()).zip(&mut ratios) {
                for (list, ratio) in ratios.iter_mut().zip(least_used_ratios(predicted, true_shares)) {
                    list.push(ratio);
                }
            }
        }
        let all: f64 = divergences.iter().flatten().sum();
        let count = divergences.iter().map(Vec::len).sum::<usize>().max(1);
        Self {
            prompts: predictions.len().min(truths.len()),
            js_mean: all / count as f64,
            js_quantiles: divergences.iter_mut().map(|list| QUANTILES.map(|q| quantile(list, q))).collect(),
            least_used_p95: ratios
                .iter_mut()
                .map(|layer| layer.iter_mut().map(|list| quantile(list, 0.95).max(1.0)).collect())
                .collect(),
        }
    }
}

/// Returns, at index m, the ratio of true to predicted share of the m least predicted experts, ties to the lower id.
fn least_used_ratios(predicted: &[f32], truth: &[f32]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..predicted.len()).collect();
    order.sort_by(|&a, &b| predicted[a].total_cmp(&predicted[b]).then(a.cmp(&b)));
    let (mut predicted_sum, mut true_sum) = (0.0, 0.0);
    let mut ratios = vec![1.0];
    for (count, expert) in (1_u32..).zip(order) {
        let least = MIN_SHARE_FRACTION * f64::from(count) / predicted.len() as f64;
        predicted_sum += f64::from(predicted[expert]);
        true_sum += f64::from(truth[expert]);
        ratios.push(true_sum / predicted_sum.max(least));
    }
    ratios
}

/// Returns the smallest value that at least the fraction `q` of `values` do not exceed, or 0 without values. Sorts
/// `values`.
pub fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (q * values.len() as f64).ceil() as usize;
    values.get(rank.max(1) - 1).copied().unwrap_or(0.0)
}
