//! Prometheus metrics of prediction quality.

use crate::calibration::{expert_sets, layer_groups};
use crate::quality::LayerThirdQuality;
use crate::usage_predictor::UsagePredictor;
use prometheus::core::{Collector, MetricVec, MetricVecBuilder};
use prometheus::{GaugeVec, IntCounterVec, IntGaugeVec, Opts, Registry};
use remoe_predictor::Phase;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Labels of the thirds of the layers with experts.
const THIRDS: [&str; 3] = ["first", "middle", "last"];

/// Prediction metrics of all models.
#[derive(Debug, Clone)]
pub struct PredictionMetrics {
    divergence: GaugeVec,
    hot_recall: GaugeVec,
    cold_share: GaugeVec,
    coverage: GaugeVec,
    by_layers: LayerGauges,
    activation: GaugeVec,
    compared: IntGaugeVec,
    unfamiliar: IntGaugeVec,
    remembered: IntGaugeVec,
    shared: IntGaugeVec,
    replans: IntCounterVec,
    handles: Arc<Mutex<ModelHandles>>,
}

/// Number of the latest handle for each model name: a new model may replace one of the same name whose metrics still
/// exist.
#[derive(Debug, Default)]
struct ModelHandles {
    numbers: HashMap<String, u64>,
    next: u64,
}

/// Quality gauges by third of the layers.
#[derive(Debug, Clone)]
struct LayerGauges {
    divergence: GaugeVec,
    hot_recall: GaugeVec,
    cold_share: GaugeVec,
    coverage: GaugeVec,
}

/// Prediction metrics of one model.
#[derive(Debug, Clone)]
pub struct ModelPredictionMetrics {
    all: PredictionMetrics,
    model: String,
    number: u64,
}

impl PredictionMetrics {
    /// Registers the metrics with `registry`.
    ///
    /// # Errors
    /// A name is already registered.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauges = |name: &str, help: &str, labels: &[&str]| -> Result<GaugeVec, prometheus::Error> {
            let gauge = GaugeVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let by_phase = |name: &str, help: &str| gauges(name, help, &["model", "phase"]);
        let by_layers = |name: &str, help: &str| gauges(name, help, &["model", "phase", "layers"]);
        let by_model = |name: &str, help: &str| -> Result<IntGaugeVec, prometheus::Error> {
            let gauge = IntGaugeVec::new(Opts::new(name, help), &["model"])?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let help = "Revisions of the placement, by cause: wake (waiting requests), drift (observed usage), failed (taken back).";
        let replans = IntCounterVec::new(Opts::new("remoe_replans_total", help), &["model", "cause"])?;
        registry.register(Box::new(replans.clone()))?;
        Ok(Self {
            by_layers: LayerGauges {
                divergence: by_layers(
                    "remoe_prediction_layers_divergence_nats",
                    "Mean Jensen-Shannon divergence of predicted and observed expert usage, by thirds of the layers with experts.",
                )?,
                hot_recall: by_layers(
                    "remoe_prediction_layers_hot_recall_ratio",
                    "Of the work of the more used half of the experts, the share on experts predicted to be in it, by thirds of the layers with experts.",
                )?,
                cold_share: by_layers(
                    "remoe_prediction_layers_cold_share_ratio",
                    "Share of the work on the half of the experts predicted to be used least, by thirds of the layers with experts.",
                )?,
                coverage: by_layers(
                    "remoe_prediction_layers_coverage_ratio",
                    "Share of (request, layer) pairs whose divergence was within the predicted 95th percentile, by thirds of the layers with experts.",
                )?,
            },
            divergence: by_phase(
                "remoe_prediction_divergence_nats",
                "Mean Jensen-Shannon divergence of predicted and observed expert usage, over the latest requests.",
            )?,
            hot_recall: by_phase(
                "remoe_prediction_hot_recall_ratio",
                "Of the work of the more used half of the experts, the share on experts predicted to be in it.",
            )?,
            cold_share: by_phase(
                "remoe_prediction_cold_share_ratio",
                "Share of the work on the half of the experts predicted to be used least.",
            )?,
            coverage: by_phase(
                "remoe_prediction_coverage_ratio",
                "Share of (request, layer) pairs whose divergence was within the predicted 95th percentile.",
            )?,
            activation: gauges(
                "remoe_prediction_activation_ratio",
                "Share of the work of a quarter of the layers on each eighth of their experts, predicted and observed; eighth 1 was predicted to be used most.",
                &["model", "phase", "layers", "eighth", "of"],
            )?,
            compared: by_model(
                "remoe_prediction_compared_requests",
                "Requests whose prediction was compared with their expert usage, since the start.",
            )?,
            unfamiliar: by_model(
                "remoe_prediction_unfamiliar_requests",
                "Out-of-distribution requests since the start.",
            )?,
            remembered: by_model(
                "remoe_prediction_remembered_requests",
                "Requests in the training history.",
            )?,
            shared: by_model(
                "remoe_prediction_shared_requests",
                "Requests to other gateways learned from since the start.",
            )?,
            replans,
            handles: Arc::default(),
        })
    }

    /// Returns the metrics of the model called `name`.
    #[must_use]
    pub fn of_model(&self, name: &str) -> ModelPredictionMetrics {
        let mut handles = self.handles();
        let number = handles.next;
        handles.next += 1;
        handles.numbers.insert(name.to_owned(), number);
        drop(handles);
        ModelPredictionMetrics { all: self.clone(), model: name.to_owned(), number }
    }

    fn handles(&self) -> MutexGuard<'_, ModelHandles> {
        // A panic cannot leave a change half done.
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LayerGauges {
    /// Sets the gauges of a third of the layers, the coverage only if there are error bars.
    fn set(&self, labels: &[&str], third: &LayerThirdQuality, has_bars: bool) {
        self.divergence.with_label_values(labels).set(third.divergence);
        self.hot_recall.with_label_values(labels).set(third.hot_recall);
        self.cold_share.with_label_values(labels).set(third.cold_share);
        if has_bars {
            self.coverage.with_label_values(labels).set(third.coverage);
        }
    }
}

impl ModelPredictionMetrics {
    /// Sets all gauges from the quality of `predictor`.
    pub fn update(&self, predictor: &UsagePredictor) {
        let Self { all, model, .. } = self;
        let quality = predictor.quality();
        for phase in Phase::ALL {
            let figures = quality.phases.get(phase);
            let labels = [model.as_str(), phase.name()];
            if figures.weight > 0.0 {
                all.divergence.with_label_values(&labels).set(figures.divergence);
                all.hot_recall.with_label_values(&labels).set(figures.hot_recall);
                all.cold_share.with_label_values(&labels).set(figures.cold_share);
                self.set_activation(predictor, phase);
            }
            if figures.requests_with_bars > 0.0 {
                all.coverage.with_label_values(&labels).set(figures.coverage);
            }
            for (name, third) in THIRDS.into_iter().zip(figures.thirds) {
                if let Some(third) = third {
                    let labels = [model.as_str(), phase.name(), name];
                    all.by_layers.set(&labels, &third, figures.requests_with_bars > 0.0);
                }
            }
        }
        let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        all.compared.with_label_values(&[model]).set(count(quality.compared));
        all.unfamiliar.with_label_values(&[model]).set(count(quality.unfamiliar));
        all.shared.with_label_values(&[model]).set(count(quality.shared));
        all.remembered.with_label_values(&[model]).set(count(predictor.history_size().requests as u64));
    }

    /// Sets the activation gauges. The number of series is bounded by layer groups and expert sets, not by the model.
    fn set_activation(&self, predictor: &UsagePredictor, phase: Phase) {
        let calibration = &predictor.quality().phases.get(phase).calibration;
        let layers = predictor.layers();
        for (group, range) in calibration.0.iter().zip(layer_groups(layers.len())) {
            let ids = match &layers[range] {
                [] => continue,
                [one] => one.to_string(),
                [first, .., last] => format!("{first}-{last}"),
            };
            for (index, set) in group.iter().enumerate().take(expert_sets(predictor.experts())) {
                let eighth = (index + 1).to_string();
                for (source, value) in [("predicted", set.predicted), ("observed", set.observed)] {
                    let labels = [self.model.as_str(), phase.name(), ids.as_str(), eighth.as_str(), source];
                    self.all.activation.with_label_values(&labels).set(value);
                }
            }
        }
    }

    /// Returns the gauge of requests learned from other gateways.
    #[must_use]
    pub fn shared_requests(&self) -> i64 {
        self.all.shared.with_label_values(&[&self.model]).get()
    }

    /// Removes all series of the model, unless a newer handle has the same model name.
    pub fn remove(&self) {
        let Self { all, model, number } = self;
        // Keeps the lock until all series are removed: a new handle may take the name.
        let mut handles = all.handles();
        if handles.numbers.get(model).is_some_and(|latest| latest != number) {
            return;
        }
        handles.numbers.remove(model);
        let LayerGauges { divergence, hot_recall, cold_share, coverage } = &all.by_layers;
        for gauges in [
            &all.divergence,
            &all.hot_recall,
            &all.cold_share,
            &all.coverage,
            &all.activation,
            divergence,
            hot_recall,
            cold_share,
            coverage,
        ] {
            remove_series(gauges, model);
        }
        for gauges in [&all.compared, &all.unfamiliar, &all.remembered, &all.shared] {
            remove_series(gauges, model);
        }
        remove_series(&all.replans, model);
    }

    /// Counts a revision of the placement by its `cause`.
    pub fn count_replan(&self, cause: &str) {
        self.all.replans.with_label_values(&[self.model.as_str(), cause]).inc();
    }
}

/// Removes the series of `model`.
fn remove_series<B: MetricVecBuilder>(series: &MetricVec<B>, model: &str) {
    for family in series.collect() {
        for metric in family.get_metric() {
            let labels = metric.get_label().iter().map(|label| (label.name(), label.value()));
            let labels: HashMap<&str, &str> = labels.collect();
            if labels.get("model") == Some(&model) {
                // Another thread may have removed the series first.
                let _removed = series.remove(&labels);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_a_model_are_removed_with_it() {
        let registry = Registry::new();
        let all = PredictionMetrics::register(&registry).unwrap();
        let series = || registry.gather().iter().map(|family| family.get_metric().len()).sum::<usize>();
        for model in ["gone", "here"] {
            all.divergence.with_label_values(&[model, "decode"]).set(1.0);
            all.by_layers.coverage.with_label_values(&[model, "decode", "first"]).set(1.0);
            all.activation.with_label_values(&[model, "decode", "0-3", "1", "predicted"]).set(1.0);
            all.shared.with_label_values(&[model]).set(1);
            all.of_model(model).count_replan("wake");
        }
        assert_eq!(series(), 10);
        all.of_model("gone").remove();
        assert_eq!((series(), all.of_model("here").shared_requests()), (5, 1));
    }

    #[test]
    fn metrics_of_a_newer_handle_survive_the_older_one() {
        let registry = Registry::new();
        let all = PredictionMetrics::register(&registry).unwrap();
        let series = || registry.gather().iter().map(|family| family.get_metric().len()).sum::<usize>();
        let (first, second) = (all.of_model("m"), all.of_model("m"));
        second.count_replan("wake");
        first.remove();
        assert_eq!(series(), 1);
        second.remove();
        assert_eq!(series(), 0);
        // A late update of the first handle is removed with it.
        first.count_replan("wake");
        first.remove();
        assert_eq!((series(), all.handles().numbers.len()), (0, 0));
    }
}
