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

/// The part of a cold start that main functions measure; those before it are [`RequestTimeline::NAMES`].
const FIRST: &str = "first";

/// Seconds of wakes, and of the parts of cold starts.
const WAKE_BUCKETS: [f64; 12] = [0.05, 0.1, 0.2, 0.35, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// The gateway's metrics. Clones share their values.
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
    living: Arc<Mutex<ShownModels>>,
}

/// Models whose series are shown.
#[derive(Default)]
struct ShownModels {
    /// Models by name: one may follow another one of its name that still answers a request.
    models: HashMap<String, usize>,
    /// Names whose last model is gone, and whose series are not removed yet.
    gone: BTreeSet<String>,
}

impl GatewayMetrics {
    /// Metrics in a registry of their own, with those that every program has.
    ///
    /// # Errors
    /// A name is none.
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
            living: Arc::default(),
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

    /// Where further metrics of the same process are shown.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    pub(crate) fn keys_are_outdated(&self, are: bool) {
        self.keys_outdated.set(are.into());
    }

    pub(crate) fn answered(&self, route: &str, status: &str) {
        self.requests.with_label_values(&[route, status]).inc();
    }

    pub(crate) fn retried(&self, model: &str) {
        self.retries.with_label_values(&[model]).inc();
    }

    pub(crate) fn stream_failed(&self, model: &str, failure: StreamFailure) {
        self.streams_failed.with_label_values(&[model, failure.reason()]).inc();
    }

    pub(crate) fn took(&self, model: &str, tenant: &str, tokens: u64) {
        self.tokens.with_label_values(&[model, tenant]).inc_by(tokens);
    }

    /// Counts a usage record of a function that cannot be true. Returns whether it is the first one of `model`.
    pub(crate) fn implausible(&self, model: &str, what: &'static str) -> bool {
        let counter = self.implausible.with_label_values(&[model, what]);
        let is_first = counter.get() == 0;
        counter.inc();
        is_first
    }

    /// A request that waited for functions of `model` to start had its first token so many seconds after they had it.
    pub(crate) fn first_token_after_cold_start(&self, model: &str, seconds: f64) {
        self.cold_start_seconds.with_label_values(&[model, FIRST]).observe(seconds);
    }

    pub(crate) fn of_model(&self, model: &str) -> ModelMetrics {
        // Held until its series are there: those of the one before may be removed meanwhile.
        let mut living = self.living();
        living.gone.remove(model);
        *living.models.entry(model.to_owned()).or_default() += 1;
        for failure in [StreamFailure::NotBegun, StreamFailure::BrokenOff] {
            // A first failure is an increase.
            self.streams_failed.with_label_values(&[model, failure.reason()]);
        }
        self.cold_start_seconds.with_label_values(&[model, FIRST]);
        let metrics = ModelMetrics { all: self.clone(), model: model.to_owned() };
        metrics.load(0, 0, ScalingPhase::Asleep);
        metrics.groups_sleep(0);
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

    /// Removes the series of models that are gone, and has `also` remove others of the same model.
    pub(crate) fn forget_gone(&self, also: impl Fn(&str)) {
        // Held meanwhile: another model may get a name.
        let mut living = self.living();
        for model in std::mem::take(&mut living.gone) {
            self.forget(&model);
            also(&model);
        }
    }

    fn living(&self) -> MutexGuard<'_, ShownModels> {
        // Each change of it is whole.
        self.living.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self, model: &str) {
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

/// Why a stream ended with an error that its status could not say any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamFailure {
    /// It waited, and no function answered it.
    NotBegun,
    /// The function that answered it ended.
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

/// Why a remote group was woken beside a main function that ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WakeCause {
    /// Experts of the group were used, and the main function computed them meanwhile.
    Asked,
    /// Requests that are there are expected to use them.
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

/// The metrics of one model. Dropped with the last model of its name, they are removed by
/// [`GatewayMetrics::forget_gone`].
pub(crate) struct ModelMetrics {
    all: GatewayMetrics,
    model: String,
}

impl Drop for ModelMetrics {
    fn drop(&mut self) {
        let mut living = self.all.living();
        if let Some(models) = living.models.get_mut(&self.model) {
            *models -= 1;
            if *models == 0 {
                living.models.remove(&self.model);
                living.gone.insert(std::mem::take(&mut self.model));
            }
        }
    }
}

impl ModelMetrics {
    pub(crate) fn load(&self, waiting: usize, in_flight: usize, phase: ScalingPhase) {
        let gauge = |gauges: &IntGaugeVec| gauges.with_label_values(&[&self.model]);
        gauge(&self.all.waiting).set(i64::try_from(waiting).unwrap_or(i64::MAX));
        gauge(&self.all.in_flight).set(i64::try_from(in_flight).unwrap_or(i64::MAX));
        gauge(&self.all.awake).set(i64::from(phase == ScalingPhase::Active));
    }

    pub(crate) fn sent_where_seen(&self) {
        self.counter(&self.all.prefix_routed).inc();
    }

    pub(crate) fn groups_sleep(&self, asleep: usize) {
        let asleep = i64::try_from(asleep).unwrap_or(i64::MAX);
        self.all.groups_asleep.with_label_values(&[&self.model]).set(asleep);
    }

    pub(crate) fn group_woke(&self, cause: WakeCause) {
        self.all.group_wakes.with_label_values(&[self.model.as_str(), cause.name()]).inc();
    }

    pub(crate) fn pairs_slept(&self, pairs: u64) {
        self.counter(&self.all.sleeping_pairs).inc_by(pairs);
    }

    pub(crate) fn woke(&self, wake: Duration) {
        self.counter(&self.all.wakes).inc();
        self.all.wake_seconds.with_label_values(&[&self.model]).observe(wake.as_secs_f64());
    }

    /// A request that waited for functions to start is handed over.
    pub(crate) fn started_cold(&self, parts: &RequestTimeline) {
        for (part, from, until) in parts.each() {
            let histogram = self.all.cold_start_seconds.with_label_values(&[self.model.as_str(), part]);
            histogram.observe(until.saturating_duration_since(from).as_secs_f64());
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
