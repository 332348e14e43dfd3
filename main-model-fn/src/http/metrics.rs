//! Metrics of the HTTP API.

use super::plan_metrics::PlanMetrics;
use super::state::HttpState;
use crate::engine::request::{Figures, FinishReason};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};
use remoe_http::{ConnectionMetrics, RequestId, route_name};
use std::sync::Arc;
use std::time::Instant;

/// Buckets in seconds for the time to first token and between tokens.
const TOKEN_BUCKETS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0, 160.0, 640.0];

/// Buckets in seconds for whole requests.
const REQUEST_BUCKETS: [f64; 14] =
    [0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 240.0, 960.0, 1920.0];

/// Metrics of the HTTP API. Clones share their values.
#[derive(Clone)]
pub(super) struct HttpMetrics {
    pub(super) connections: ConnectionMetrics,
    requests: IntCounterVec,
    in_flight: IntGauge,
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    finished: IntCounterVec,
    plan: PlanMetrics,
}

impl HttpMetrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// Fails if the name of a metric is taken in `registry`.
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let seconds = |name: &str, help: &str, buckets: &[f64]| {
            Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec()))
        };
        let metrics = Self {
            connections: ConnectionMetrics::new()?,
            requests: IntCounterVec::new(
                Opts::new("remoe_http_requests_total", "HTTP requests by route and status."),
                &["route", "status"],
            )?,
            in_flight: IntGauge::new("remoe_requests_in_flight", "Generations in flight, streams included.")?,
            first_token: seconds(
                "remoe_time_to_first_token_seconds",
                "Time from the engine's queue to the first token (TTFT).",
                &TOKEN_BUCKETS,
            )?,
            between_tokens: seconds(
                "remoe_inter_token_latency_seconds",
                "Time between two tokens of one choice, while the client keeps up.",
                &TOKEN_BUCKETS,
            )?,
            whole: seconds(
                "remoe_e2e_request_latency_seconds",
                "Time from the arrival of a generation to its last token.",
                &REQUEST_BUCKETS,
            )?,
            prompt_tokens: IntCounter::new("remoe_prompt_tokens_total", "Prompt tokens.")?,
            generation_tokens: IntCounter::new("remoe_generation_tokens_total", "Generated tokens.")?,
            finished: IntCounterVec::new(
                Opts::new("remoe_choices_finished_total", "Finished choices by reason."),
                &["finished_reason"],
            )?,
            plan: PlanMetrics::new(registry)?,
        };
        metrics.connections.register(registry)?;
        registry.register(Box::new(metrics.requests.clone()))?;
        registry.register(Box::new(metrics.in_flight.clone()))?;
        registry.register(Box::new(metrics.first_token.clone()))?;
        registry.register(Box::new(metrics.between_tokens.clone()))?;
        registry.register(Box::new(metrics.whole.clone()))?;
        registry.register(Box::new(metrics.prompt_tokens.clone()))?;
        registry.register(Box::new(metrics.generation_tokens.clone()))?;
        registry.register(Box::new(metrics.finished.clone()))?;
        Ok(metrics)
    }
}

/// Measures one generation from its arrival until it is dropped.
pub(super) struct Stopwatch {
    state: Arc<HttpState>,
    arrived: Instant,
    /// Time of the last token, per choice.
    last: Vec<Option<Instant>>,
}

impl Stopwatch {
    pub(super) fn start(state: Arc<HttpState>, choices: usize) -> Self {
        state.metrics.in_flight.inc();
        Self { state, arrived: Instant::now(), last: vec![None; choices] }
    }

    pub(super) fn state(&self) -> &HttpState {
        &self.state
    }

    /// Records a token of choice `index`.
    pub(super) fn token(&mut self, index: usize) {
        let now = Instant::now();
        if let Some(last) = self.last.get_mut(index)
            && let Some(before) = last.replace(now)
        {
            self.state.metrics.between_tokens.observe((now - before).as_secs_f64());
        }
    }

    /// Ignores the time until the next token, because the client was slow, not the engine.
    pub(super) fn forget_pace(&mut self) {
        self.last.fill(None);
    }

    pub(super) fn choice_finished(&self, reason: FinishReason) {
        self.state.metrics.finished.with_label_values(&[reason.as_str()]).inc();
    }

    pub(super) fn prompt_done(&self, figures: &Figures) {
        let metrics = &self.state.metrics;
        metrics.prompt_tokens.inc_by(figures.prompt_tokens as u64);
        metrics.generation_tokens.inc_by(figures.completion_tokens as u64);
        if figures.completion_tokens > 0 {
            metrics.first_token.observe(figures.ttft.as_secs_f64());
            if let Some(comparison) = self.state.placement.record(figures, self.state.account().as_deref()) {
                metrics.plan.add(&comparison);
            }
        }
    }

    pub(super) fn done(&self) {
        self.state.metrics.whole.observe(self.arrived.elapsed().as_secs_f64());
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        self.state.metrics.in_flight.dec();
    }
}

/// Counts every answer.
pub(super) async fn observe(State(state): State<Arc<HttpState>>, request: Request, next: Next) -> Response {
    let route = route_name(request.uri().path());
    let id = request.extensions().get::<RequestId>().cloned();
    let started = Instant::now();
    let response = next.run(request).await;
    let status = response.status();
    state.metrics.requests.with_label_values(&[route, status.as_str()]).inc();
    tracing::debug!(
        request_id = id.as_ref().and_then(|id| id.0.to_str().ok()),
        route,
        status = status.as_u16(),
        elapsed_us = started.elapsed().as_micros(),
        "answered"
    );
    response
}
