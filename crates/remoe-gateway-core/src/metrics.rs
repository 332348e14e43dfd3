//! Metrics of the gateway.

use crate::timeline::RequestTimeline;
use prometheus::core::{Collector, MetricVec, MetricVecBuilder};
use prometheus::{
    HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};
use remoe_autoscale::scale_to_zero::ScalingPhase;
use remoe_http::ConnectionMetrics;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Name of the last part of a cold start, until the first token. The parts before it are [`RequestTimeline::NAMES`].
const FIRST: &str = "first";

/// Histogram buckets of wakes and of the parts of cold starts, in seconds.
const WAKE_BUCKETS: [f64; 12] = [0.05, 0.1, 0.2, 0.35, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// Metrics of the gateway. Clones share their values.
#[derive(Clone)]
pub struct GatewayMetrics {
    registry: Registry,
    pub(crate) connections: ConnectionMetrics,
    requests: IntCounterVec,
    retries: IntCounterVec,
    streams_failed: IntCounterVec,
    tokens: IntCounterVec,
    implausible: IntCounterVec,
    waiting: IntGaugeVec,
    in_flight: IntGaugeVec,
    awake: IntGaugeVec,
    wakes: IntCounterVec,
    group_wakes: IntCounterVec,
    groups_asleep: IntGaugeVec,
    sleeping_pairs: IntCounterVec,
    prefix_routed: IntCounterVec,
    wake_seconds: HistogramVec,
    cold_start_seconds: HistogramVec,
    keys_outdated: IntGauge,
    shown_models: Arc<Mutex<ShownModels>>,
}

/// Models whose series are exposed.
#[derive(Default)]
struct ShownModels {
    /// Number of live models by name. A model may replace one of the same name that still answers a request.
    models: HashMap<String, usize>,
    /// Names without a live model, whose series are not removed yet.
    removed_models: BTreeSet<String>,
}

impl GatewayMetrics {
    /// Registers the metrics in a new registry, together with the metrics that every program has.
    ///
    /// # Errors
    /// A metric's name is invalid.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = remoe_process::program_registry(&[])?;
        let counter =
            |name: &str, help: &str, labels: &[&str]| IntCounterVec::new(Opts::new(name, help), labels);
        let gauge = |name: &str, help: &str| IntGaugeVec::new(Opts::new(name, help), &["model"]);
        let histogram = |name: &str, help: &str, labels: &[&str]| {
            HistogramVec::new(HistogramOpts::new(name, help).buckets(WAKE_BUCKETS.to_vec()), labels)
        };
        let metrics = Self {
            connections: ConnectionMetrics::new()?,
            requests: counter(
                "remoe_gateway_requests_total",
                "Answered requests by route and status.",
                &["route", "status"],
            )?,
            retries: counter(
                "remoe_gateway_retries_total",
                "Requests sent again because their main function failed before answering.",
                &["model"],
            )?,
            streams_failed: counter(
                "remoe_gateway_streams_failed_total",
                "Streams that failed after status 200, by reason: not_begun (no main function answered), broken_off (it failed while answering).",
                &["model", "reason"],
            )?,
            tokens: counter(
                "remoe_gateway_tokens_total",
                "Tokens of prompts and answers; estimated if the client left before the end.",
                &["model", "tenant"],
            )?,
            implausible: counter(
                "remoe_gateway_implausible_usage_total",
                "Usage records of functions that were bounded because they cannot be true, by what they overstated: tokens, work, cost, rivals.",
                &["model", "what"],
            )?,
            waiting: gauge("remoe_gateway_requests_waiting", "Requests in the gateway's queue.")?,
            in_flight: gauge("remoe_gateway_requests_in_flight", "Requests that main functions work on.")?,
            awake: gauge("remoe_gateway_model_awake", "1 while the model is active, else 0.")?,
            wakes: counter("remoe_gateway_wakes_total", "Wakes from sleep.", &["model"])?,
            group_wakes: counter(
                "remoe_gateway_group_wakes_total",
                "Wakes of remote groups while their main function ran, by cause: asked (their experts were used), predicted (expected to be).",
                &["model", "cause"],
            )?,
            groups_asleep: gauge(
                "remoe_gateway_groups_asleep",
                "Remote groups that sleep while their main function runs.",
            )?,
            sleeping_pairs: counter(
                "remoe_gateway_group_sleeping_pairs_total",
                "(token, expert) pairs of sleeping groups, computed by main functions.",
                &["model"],
            )?,
            prefix_routed: counter(
                "remoe_gateway_prefix_routed_total",
                "Requests routed to a main function that had one with the same prefix.",
                &["model"],
            )?,
            wake_seconds: histogram(
                "remoe_gateway_wake_seconds",
                "From the decision to wake until requests are taken.",
                &["model"],
            )?,
            cold_start_seconds: histogram(
                "remoe_gateway_cold_start_seconds",
                "Parts of the time to first token of cold requests: decide, schedule, start, load, ready, first.",
                &["model", "part"],
            )?,
            keys_outdated: IntGauge::new(
                "remoe_gateway_keys_outdated",
                "1 while the keys file is unreadable or has newer keys that are invalid, else 0.",
            )?,
            shown_models: Arc::default(),
            registry,
        };
        let registry = &metrics.registry;
        metrics.connections.register(registry)?;
        let Self { requests, retries, streams_failed, tokens, wakes, prefix_routed, .. } = &metrics;
        let Self { group_wakes, sleeping_pairs, implausible, .. } = &metrics;
        let of_requests = [requests, retries, streams_failed, tokens, wakes, prefix_routed];
        for counter in of_requests.into_iter().chain([group_wakes, sleeping_pairs, implausible]) {
            registry.register(Box::new(counter.clone()))?;
        }
        for gauge in [&metrics.waiting, &metrics.in_flight, &metrics.awake, &metrics.groups_asleep] {
            registry.register(Box::new(gauge.clone()))?;
        }
        for histogram in [&metrics.wake_seconds, &metrics.cold_start_seconds] {
            registry.register(Box::new(histogram.clone()))?;
        }
        registry.register(Box::new(metrics.keys_outdated.clone()))?;
        Ok(metrics)
    }

    /// Returns the registry, for further metrics of the same process.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    pub(crate) fn set_keys_outdated(&self, are_outdated: bool) {
        self.keys_outdated.set(are_outdated.into());
    }

    pub(crate) fn count_answer(&self, route: &str, status: &str) {
        self.requests.with_label_values(&[route, status]).inc();
    }

    pub(crate) fn count_retry(&self, model: &str) {
        self.retries.with_label_values(&[model]).inc();
    }

    pub(crate) fn count_failed_stream(&self, model: &str, failure: StreamFailure) {
        self.streams_failed.with_label_values(&[model, failure.reason()]).inc();
    }

    pub(crate) fn add_tokens(&self, model: &str, tenant: &str, tokens: u64) {
        self.tokens.with_label_values(&[model, tenant]).inc_by(tokens);
    }

    /// Counts a usage record of a function that cannot be true. Returns whether it is the first one of `model`.
    pub(crate) fn count_implausible(&self, model: &str, what: &'static str) -> bool {
        let counter = self.implausible.with_label_values(&[model, what]);
        let is_first = counter.get() == 0;
        counter.inc();
        is_first
    }

    /// Records the last part of a cold start: `seconds` from when a main function got the request to its first token.
    pub(crate) fn first_token_after_cold_start(&self, model: &str, seconds: f64) {
        self.cold_start_seconds.with_label_values(&[model, FIRST]).observe(seconds);
    }

    /// Returns the metrics of one model, with all its series exposed.
    pub(crate) fn of_model(&self, model: &str) -> ModelMetrics {
        // Locked until the series exist: another thread may be removing those of a previous model of this name.
        let mut shown_models = self.shown_models();
        shown_models.removed_models.remove(model);
        *shown_models.models.entry(model.to_owned()).or_default() += 1;
        for failure in [StreamFailure::NotBegun, StreamFailure::BrokenOff] {
            // Exposes 0, so that the first failure shows as an increase.
            self.streams_failed.with_label_values(&[model, failure.reason()]);
        }
        self.cold_start_seconds.with_label_values(&[model, FIRST]);
        let metrics = ModelMetrics { all: self.clone(), model: model.to_owned() };
        metrics.set_load(0, 0, ScalingPhase::Asleep);
        metrics.set_sleeping_groups(0);
        for counters in [&self.wakes, &self.sleeping_pairs, &self.prefix_routed] {
            counters.with_label_values(&[model]);
        }
        for cause in WakeCause::ALL {
            self.group_wakes.with_label_values(&[model, cause.name()]);
        }
        self.wake_seconds.with_label_values(&[model]);
        for part in RequestTimeline::NAMES {
            self.cold_start_seconds.with_label_values(&[model, part]);
        }
        metrics
    }

    /// Removes the series of models that are gone, and calls `also` for each, which removes its other series.
    pub(crate) fn remove_gone_models(&self, also: impl Fn(&str)) {
        // Locked until the end: a new model may take one of these names.
        let mut shown_models = self.shown_models();
        for model in std::mem::take(&mut shown_models.removed_models) {
            self.remove_model(&model);
            also(&model);
        }
    }

    fn shown_models(&self) -> MutexGuard<'_, ShownModels> {
        // A panic cannot leave it half changed, so a poisoned lock is used as it is.
        self.shown_models.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove_model(&self, model: &str) {
        let Self { retries, streams_failed, tokens, implausible, wakes, .. } = self;
        let Self { group_wakes, sleeping_pairs, prefix_routed, .. } = self;
        for counters in
            [retries, streams_failed, tokens, implausible, wakes, group_wakes, sleeping_pairs, prefix_routed]
        {
            remove_series(counters, model);
        }
        for gauges in [&self.waiting, &self.in_flight, &self.awake, &self.groups_asleep] {
            remove_series(gauges, model);
        }
        for histograms in [&self.wake_seconds, &self.cold_start_seconds] {
            remove_series(histograms, model);
        }
    }
}

/// Reason why a stream failed after its status 200 was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamFailure {
    /// No main function answered.
    NotBegun,
    /// The main function failed while it answered.
    BrokenOff,
}

impl StreamFailure {
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::NotBegun => "not_begun",
            Self::BrokenOff => "broken_off",
        }
    }
}

/// Reason why a remote group was woken while its main function ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WakeCause {
    /// Experts of the group were used. The main function computes them until the group is awake.
    Asked,
    /// Present requests are predicted to use experts of the group.
    Predicted,
}

impl WakeCause {
    const ALL: [Self; 2] = [Self::Asked, Self::Predicted];

    fn name(self) -> &'static str {
        match self {
            Self::Asked => "asked",
            Self::Predicted => "predicted",
        }
    }
}

/// Metrics of one model. When the last model of a name is dropped, [`GatewayMetrics::remove_gone_models`] removes
/// their series.
pub(crate) struct ModelMetrics {
    all: GatewayMetrics,
    model: String,
}

impl Drop for ModelMetrics {
    fn drop(&mut self) {
        let mut shown_models = self.all.shown_models();
        if let Some(models) = shown_models.models.get_mut(&self.model) {
            *models -= 1;
            if *models == 0 {
                shown_models.models.remove(&self.model);
                shown_models.removed_models.insert(std::mem::take(&mut self.model));
            }
        }
    }
}

impl ModelMetrics {
    pub(crate) fn set_load(&self, waiting: usize, in_flight: usize, phase: ScalingPhase) {
        let gauge = |gauges: &IntGaugeVec| gauges.with_label_values(&[&self.model]);
        gauge(&self.all.waiting).set(i64::try_from(waiting).unwrap_or(i64::MAX));
        gauge(&self.all.in_flight).set(i64::try_from(in_flight).unwrap_or(i64::MAX));
        gauge(&self.all.awake).set(i64::from(phase == ScalingPhase::Active));
    }

    pub(crate) fn count_prefix_match(&self) {
        self.counter(&self.all.prefix_routed).inc();
    }

    pub(crate) fn set_sleeping_groups(&self, asleep: usize) {
        let asleep = i64::try_from(asleep).unwrap_or(i64::MAX);
        self.all.groups_asleep.with_label_values(&[&self.model]).set(asleep);
    }

    pub(crate) fn record_group_wake(&self, cause: WakeCause) {
        self.all.group_wakes.with_label_values(&[self.model.as_str(), cause.name()]).inc();
    }

    pub(crate) fn add_sleeping_pairs(&self, pairs: u64) {
        self.counter(&self.all.sleeping_pairs).inc_by(pairs);
    }

    pub(crate) fn record_wake(&self, wake_time: Duration) {
        self.counter(&self.all.wakes).inc();
        self.all.wake_seconds.with_label_values(&[&self.model]).observe(wake_time.as_secs_f64());
    }

    /// Records the parts of a cold start until a main function gets the request.
    pub(crate) fn record_cold_start(&self, timeline: &RequestTimeline) {
        for (part, start, end) in timeline.parts() {
            let histogram = self.all.cold_start_seconds.with_label_values(&[self.model.as_str(), part]);
            histogram.observe(end.saturating_duration_since(start).as_secs_f64());
        }
    }

    fn counter(&self, counters: &IntCounterVec) -> IntCounter {
        counters.with_label_values(&[&self.model])
    }
}

/// Removes the series of `model`.
pub(crate) fn remove_series<B: MetricVecBuilder>(series: &MetricVec<B>, model: &str) {
    for family in series.collect() {
        for metric in family.get_metric() {
            let labels = metric.get_label().iter().map(|label| (label.name(), label.value()));
            let labels: HashMap<&str, &str> = labels.collect();
            if labels.get("model") == Some(&model) {
                // Another thread may have been first.
                let _removed = series.remove(&labels);
            }
        }
    }
}
