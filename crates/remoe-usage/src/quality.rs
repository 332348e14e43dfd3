//! Quality of predictions by phase, as means in which older requests weigh less.

use crate::calibration::UsageCalibration;
use remoe_predictor::{ByPhase, Phase, UsageShares, divergence};

/// Number of later requests after which a request's weight has halved.
const HALF_LIFE: f64 = 64.0;

/// Prediction quality of one phase. With a weight of 0, there is no data yet.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PhaseQuality {
    /// Decayed number of requests.
    pub weight: f64,
    /// Mean Jensen-Shannon divergence of predicted and actual shares over layers, in nats.
    pub divergence: f64,
    /// Recall of the hot half: of the work on the half of each layer's experts that is used most, the share on
    /// experts predicted to be in it.
    pub hot_recall: f64,
    /// Share of all work on the half of the experts predicted to be used least.
    pub cold_share: f64,
    /// Share of (request, layer) pairs whose divergence was within the error bar.
    pub coverage: f64,
    /// Decayed number of requests with error bars.
    pub requests_with_bars: f64,
    /// Predicted and observed work by layer group and expert set.
    pub calibration: UsageCalibration,
    /// Quality of the first, the middle and the last third of the layers: tokens decide the routing in early layers,
    /// topics in late ones. `None` for a third without layers.
    pub thirds: [Option<LayerThirdQuality>; 3],
}

/// Prediction quality of a third of the layers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LayerThirdQuality {
    /// As [`PhaseQuality::divergence`].
    pub divergence: f64,
    /// As [`PhaseQuality::hot_recall`].
    pub hot_recall: f64,
    /// As [`PhaseQuality::cold_share`].
    pub cold_share: f64,
    /// As [`PhaseQuality::coverage`].
    pub coverage: f64,
}

/// Comparison of two predictions of the same requests: by the trained predictor and by an alternative, the tenant's
/// own history or the shared prior.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct ErrorComparison {
    /// Decayed number of requests.
    weight: f64,
    /// Mean divergence of the trained predictor, in nats.
    trained: f64,
    /// Mean divergence of the alternative, in nats.
    alternative: f64,
}

/// Decayed number of requests from which on a comparison counts.
const MIN_COMPARISON_REQUESTS: f64 = 4.0;

impl ErrorComparison {
    /// Adds the divergence of both predictions from the actual usage.
    pub(crate) fn record(&mut self, trained: &UsageShares, alternative: &UsageShares, truth: &UsageShares) {
        self.weight = self.weight * decay() + 1.0;
        update_mean(&mut self.trained, self.weight, divergence::mean(trained, truth));
        update_mean(&mut self.alternative, self.weight, divergence::mean(alternative, truth));
    }

    /// Returns the weight of the alternative, from 0 to 1: the error of the trained predictor over the sum of both
    /// errors. Returns 0.5 before the comparison counts.
    pub(crate) fn own_weight(&self) -> f64 {
        if self.weight < MIN_COMPARISON_REQUESTS {
            0.5
        } else {
            self.trained / (self.trained + self.alternative).max(f64::MIN_POSITIVE)
        }
    }

    /// Returns the weight of the alternative, from 0 to 1, by squared errors, so that a far worse alternative has
    /// hardly any. Returns 0 before the comparison counts.
    pub(crate) fn squared_error_weight(&self) -> f64 {
        if self.weight < MIN_COMPARISON_REQUESTS {
            return 0.0;
        }
        let [trained, alternative] = [self.trained, self.alternative].map(|error| error * error);
        trained / (trained + alternative).max(f64::MIN_POSITIVE)
    }
}

/// Prediction quality of both phases, and counts of requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PredictionQuality {
    /// Quality by phase.
    pub phases: ByPhase<PhaseQuality>,
    /// Number of requests whose prediction was compared with their actual usage.
    pub compared: u64,
    /// Number of out-of-distribution requests: the predictors disagreed more than on nearly all held-out prompts.
    pub unfamiliar: u64,
    /// Number of requests learned from other gateways.
    pub shared: u64,
}

impl Default for PredictionQuality {
    fn default() -> Self {
        Self { phases: ByPhase::both(PhaseQuality::default()), compared: 0, unfamiliar: 0, shared: 0 }
    }
}

fn decay() -> f64 {
    0.5_f64.powf(1.0 / HALF_LIFE)
}

/// Moves `mean` towards `value` by 1 / `weight`.
fn update_mean(mean: &mut f64, weight: f64, value: f64) {
    *mean += (value - *mean) / weight;
}

impl PhaseQuality {
    /// Adds a request with its predicted and its actual shares.
    pub(crate) fn record(&mut self, prediction: &UsageShares, truth: &UsageShares) {
        self.weight = self.weight * decay() + 1.0;
        let layers = divergence::per_layer(prediction, truth);
        let (recalls, colds) = hot_and_cold_shares(prediction, truth);
        let weight = self.weight;
        update_mean(&mut self.divergence, weight, mean(&layers));
        update_mean(&mut self.hot_recall, weight, mean(&recalls));
        update_mean(&mut self.cold_share, weight, mean(&colds));
        self.each_third(&layers, |third, value| update_mean(&mut third.divergence, weight, value));
        self.each_third(&recalls, |third, value| update_mean(&mut third.hot_recall, weight, value));
        self.each_third(&colds, |third, value| update_mean(&mut third.cold_share, weight, value));
        self.calibration.update_each(&UsageCalibration::of_request(prediction, truth), |mean, value| {
            update_mean(mean, weight, value);
        });
    }

    /// Adds the coverage of a request: the share of layers whose divergence is within `error_bars`.
    pub(crate) fn record_coverage(
        &mut self,
        prediction: &UsageShares,
        truth: &UsageShares,
        error_bars: &[f64],
    ) {
        let layers = divergence::per_layer(prediction, truth).into_iter().zip(error_bars);
        let within: Vec<f64> = layers.map(|(js, bar)| if js <= *bar { 1.0 } else { 0.0 }).collect();
        self.requests_with_bars = self.requests_with_bars * decay() + 1.0;
        let weight = self.requests_with_bars;
        update_mean(&mut self.coverage, weight, mean(&within));
        self.each_third(&within, |third, value| update_mean(&mut third.coverage, weight, value));
    }

    /// Calls `update` with each non-empty third and the mean of its layers.
    fn each_third(&mut self, layers: &[f64], mut update: impl FnMut(&mut LayerThirdQuality, f64)) {
        for (third, layers) in self.thirds.iter_mut().zip(thirds(layers)) {
            if !layers.is_empty() {
                update(third.get_or_insert_default(), mean(layers));
            }
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Splits the values of layers into thirds, of which some are empty for fewer than three layers.
fn thirds(layers: &[f64]) -> [&[f64]; 3] {
    let (first, rest) = layers.split_at(layers.len().div_ceil(3));
    let (middle, last) = rest.split_at(rest.len().div_ceil(2));
    [first, middle, last]
}

/// Returns the recall of the hot half and the work on the predicted cold half, for each layer.
fn hot_and_cold_shares(prediction: &UsageShares, truth: &UsageShares) -> (Vec<f64>, Vec<f64>) {
    let (mut recalls, mut cold_shares) = (Vec::new(), Vec::new());
    for (predicted, truth) in prediction.rows().zip(truth.rows()) {
        let most_used_half = |row: &[f32]| {
            let mut order: Vec<usize> = (0..row.len()).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
            order.truncate(row.len().div_ceil(2));
            order
        };
        let (predicted_hot, true_hot) = (most_used_half(predicted), most_used_half(truth));
        let share = |expert: &usize| f64::from(truth[*expert]);
        let hot: f64 = true_hot.iter().map(share).sum();
        let found: f64 = true_hot.iter().filter(|expert| predicted_hot.contains(expert)).map(share).sum();
        recalls.push(found / hot.max(f64::MIN_POSITIVE));
        cold_shares.push(1.0 - predicted_hot.iter().map(share).sum::<f64>());
    }
    (recalls, cold_shares)
}

impl PredictionQuality {
    pub(crate) fn get_mut(&mut self, phase: Phase) -> &mut PhaseQuality {
        self.phases.get_mut(phase)
    }
}
