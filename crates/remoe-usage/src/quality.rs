//! How good predictions turn out to be, by phase: means in which older requests weigh less.

use crate::calibration::Calibration;
use remoe_predictor::{ByPhase, Phase, Shares, divergence};

/// A request weighs half as much after so many others.
const HALF_LIFE: f64 = 64.0;

/// Figures of one phase; a weight of 0 says that there are none yet.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PhaseQuality {
    /// Requests to go by.
    pub weight: f64,
    /// Mean Jensen-Shannon divergence of prediction and truth over layers, in nats.
    pub divergence: f64,
    /// Recall of the hot half, the half of each layer's experts that are truly used most: share of its work that fell
    /// on experts predicted to be in it.
    pub hot_recall: f64,
    /// Share of all work that fell on the half that was predicted to be used least.
    pub cold_share: f64,
    /// Parts of requests and layers whose divergence was within the error bar.
    pub covered: f64,
    /// Requests to go by for that.
    pub barred: f64,
    /// Where work was predicted to be, and where it was.
    pub calibration: Calibration,
    /// Figures of the first, the middle and the last third of the layers, which tell what tokens decide from what
    /// topics do. `None` for a third that the model has no layer in.
    pub thirds: [Option<Third>; 3],
}

/// Figures of a third of the layers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Third {
    /// As [`PhaseQuality::divergence`].
    pub divergence: f64,
    /// As [`PhaseQuality::hot_recall`].
    pub hot_recall: f64,
    /// As [`PhaseQuality::cold_share`].
    pub cold_share: f64,
    /// As [`PhaseQuality::covered`].
    pub covered: f64,
}

/// Which of two ways to predict a tenant's requests has been nearer: what was learned before anything ran, or the
/// tenant's own past.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Balance {
    /// Requests to go by.
    weight: f64,
    /// Mean divergences.
    trained: f64,
    own: f64,
}

/// Requests before a comparison says anything.
const COMPARED: f64 = 4.0;

impl Balance {
    /// How far both were off.
    pub(crate) fn note(&mut self, trained: &Shares, own: &Shares, truth: &Shares) {
        self.weight = self.weight * kept() + 1.0;
        mix(&mut self.trained, self.weight, divergence::mean(trained, truth));
        mix(&mut self.own, self.weight, divergence::mean(own, truth));
    }

    /// The weight of the tenant's own past, from 0 to 1: the other's error over the sum of both.
    pub(crate) fn of_own(&self) -> f64 {
        if self.weight < COMPARED {
            0.5
        } else {
            self.trained / (self.trained + self.own).max(f64::MIN_POSITIVE)
        }
    }
}

impl Balance {
    /// The weight of the other way, from 0 to 1, by squared errors: one that is far worse has hardly any. 0 before there is
    /// anything to go by.
    pub(crate) fn of_other_by_squares(&self) -> f64 {
        if self.weight < COMPARED {
            return 0.0;
        }
        let [trained, other] = [self.trained, self.own].map(|error| error * error);
        trained / (trained + other).max(f64::MIN_POSITIVE)
    }
}

/// Quality of both phases, and counts of requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quality {
    /// By phase.
    pub phases: ByPhase<PhaseQuality>,
    /// Requests whose prediction was compared with what they used.
    pub compared: u64,
    /// Requests about which what was learned says next to nothing: the predictors disagreed more than they do about
    /// nearly all prompts of the history.
    pub unfamiliar: u64,
    /// Requests that other gateways told of and that were learned from.
    pub shared: u64,
}

impl Default for Quality {
    fn default() -> Self {
        Self { phases: ByPhase::both(PhaseQuality::default()), compared: 0, unfamiliar: 0, shared: 0 }
    }
}

fn kept() -> f64 {
    0.5_f64.powf(1.0 / HALF_LIFE)
}

/// Takes `value` into the mean `of` with `weight`.
fn mix(of: &mut f64, weight: f64, value: f64) {
    *of += (value - *of) / weight;
}

impl PhaseQuality {
    /// A request turned out to be `truth`, of which `prediction` was said.
    pub(crate) fn note(&mut self, prediction: &Shares, truth: &Shares) {
        self.weight = self.weight * kept() + 1.0;
        let layers = divergence::per_layer(prediction, truth);
        let (recalls, colds) = halves(prediction, truth);
        let weight = self.weight;
        mix(&mut self.divergence, weight, mean(&layers));
        mix(&mut self.hot_recall, weight, mean(&recalls));
        mix(&mut self.cold_share, weight, mean(&colds));
        self.each_third(&layers, |third, value| mix(&mut third.divergence, weight, value));
        self.each_third(&recalls, |third, value| mix(&mut third.hot_recall, weight, value));
        self.each_third(&colds, |third, value| mix(&mut third.cold_share, weight, value));
        self.calibration.each(&Calibration::of(prediction, truth), |mean, value| mix(mean, weight, value));
    }

    /// How many of the layers were within their bars.
    pub(crate) fn bar(&mut self, prediction: &Shares, truth: &Shares, bars: &[f64]) {
        let layers = divergence::per_layer(prediction, truth).into_iter().zip(bars);
        let within: Vec<f64> = layers.map(|(js, bar)| if js <= *bar { 1.0 } else { 0.0 }).collect();
        self.barred = self.barred * kept() + 1.0;
        let weight = self.barred;
        mix(&mut self.covered, weight, mean(&within));
        self.each_third(&within, |third, value| mix(&mut third.covered, weight, value));
    }

    /// Takes the mean of `layers` in each third that has any.
    fn each_third(&mut self, layers: &[f64], mut take: impl FnMut(&mut Third, f64)) {
        for (third, layers) in self.thirds.iter_mut().zip(thirds(layers)) {
            if !layers.is_empty() {
                take(third.get_or_insert_default(), mean(layers));
            }
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The layers' values cut in three; of fewer layers than three some parts are empty.
fn thirds(layers: &[f64]) -> [&[f64]; 3] {
    let (first, rest) = layers.split_at(layers.len().div_ceil(3));
    let (middle, last) = rest.split_at(rest.len().div_ceil(2));
    [first, middle, last]
}

/// Returns, for each layer, the recall of the hot half and the share of work in the half that was predicted to be cold.
fn halves(prediction: &Shares, truth: &Shares) -> (Vec<f64>, Vec<f64>) {
    let mut layers = (Vec::new(), Vec::new());
    for (predicted, truth) in prediction.rows().zip(truth.rows()) {
        let order = |row: &[f32]| {
            let mut order: Vec<usize> = (0..row.len()).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
            order.truncate(row.len().div_ceil(2));
            order
        };
        let (said, true_hot) = (order(predicted), order(truth));
        let share = |expert: &usize| f64::from(truth[*expert]);
        let hot: f64 = true_hot.iter().map(share).sum();
        let found: f64 = true_hot.iter().filter(|expert| said.contains(expert)).map(share).sum();
        layers.0.push(found / hot.max(f64::MIN_POSITIVE));
        layers.1.push(1.0 - said.iter().map(share).sum::<f64>());
    }
    layers
}

impl Quality {
    pub(crate) fn of_mut(&mut self, phase: Phase) -> &mut PhaseQuality {
        self.phases.of_mut(phase)
    }
}
