//! How far predictions have been off, on prompts that nothing was fitted to.

use crate::divergence;
use crate::shares::Shares;
use serde::{Deserialize, Serialize};

/// The quantiles that are kept.
pub const QUANTILES: [f64; 3] = [0.5, 0.9, 0.95];
/// Held-out prompts that a 95th percentile is taken of, at least.
pub const LEAST_IN_CLASS: usize = 40;
/// Predicted sums below this part of an even share are taken as that: a ratio to next to nothing says
/// nothing.
const LEAST_PART: f64 = 0.01;

/// Errors of one predictor on held-out prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorBars {
    /// Held-out prompts.
    pub prompts: usize,
    /// Mean Jensen-Shannon divergence over layers and prompts, in nats.
    pub js_mean: f64,
    /// Per layer, the [`QUANTILES`] of the divergence.
    pub js_quantiles: Vec<[f64; QUANTILES.len()]>,
    /// Per layer, at index m: the 95th percentile over prompts of (true / predicted) summed share of the
    /// m experts that are predicted to be used least, at least 1; index 0 is 1. The planner's
    /// `prediction_p95` takes it as it is.
    pub least_used_p95: Vec<Vec<f64>>,
}

/// Errors by how far apart the parts of a predictor are about a prompt: where two ways of telling disagree,
/// predictions are further off.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorClass {
    /// The largest disagreement in the class: Jensen-Shannon divergence in nats, mean over layers. Those beyond
    /// the last class belong to it.
    pub disagreement: f64,
    /// Errors on the held-out prompts of the class.
    pub errors: ErrorBars,
}

/// `classes` of as many held-out prompts each, by ascending disagreement; `cases` are disagreement, prediction
/// and truth. None where there are fewer than [`LEAST_IN_CLASS`] for each.
#[must_use]
pub fn error_classes(mut cases: Vec<(f64, Shares, Shares)>, classes: usize) -> Vec<ErrorClass> {
    if classes == 0 || cases.len() < classes * LEAST_IN_CLASS {
        return Vec::new();
    }
    cases.sort_by(|a, b| a.0.total_cmp(&b.0));
    let of_class = |cases: &[(f64, Shares, Shares)]| {
        let (predictions, truths): (Vec<_>, Vec<_>) =
            cases.iter().map(|(_, p, t)| (p.clone(), t.clone())).unzip();
        let disagreement = cases.last().map_or(0.0, |case| case.0);
        ErrorClass { disagreement, errors: ErrorBars::of(&predictions, &truths) }
    };
    let ends = (0..=classes).map(|class| class * cases.len() / classes).collect::<Vec<_>>();
    ends.windows(2).map(|ends| of_class(&cases[ends[0]..ends[1]])).collect()
}

impl ErrorBars {
    /// From predictions and what came true, at least one of each.
    #[must_use]
    pub fn of(predictions: &[Shares], truths: &[Shares]) -> Self {
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

/// At index m the ratio of true to predicted share of the m least predicted experts, ties to the lower id.
fn least_used_ratios(predicted: &[f32], truth: &[f32]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..predicted.len()).collect();
    order.sort_by(|&a, &b| predicted[a].total_cmp(&predicted[b]).then(a.cmp(&b)));
    let mut sums = (0.0, 0.0);
    let mut ratios = vec![1.0];
    for (count, expert) in (1_u32..).zip(order) {
        let least = LEAST_PART * f64::from(count) / predicted.len() as f64;
        sums = (sums.0 + f64::from(predicted[expert]), sums.1 + f64::from(truth[expert]));
        ratios.push(sums.1 / sums.0.max(least));
    }
    ratios
}

/// The smallest value that at least `q` of all do not exceed; 0 of none.
pub fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (q * values.len() as f64).ceil() as usize;
    values.get(rank.max(1) - 1).copied().unwrap_or(0.0)
}
