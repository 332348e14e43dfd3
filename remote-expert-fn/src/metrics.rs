//! Prometheus metrics of the function.

use crate::admission::InFlightGauges;
use prometheus::{Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};
use remoe_proto::v1::Code;

/// Metrics of a function. There are no series per expert, because a function can host thousands.
#[derive(Clone)]
pub(crate) struct Metrics {
    /// Number of answers by `outcome`: ok, or the code of the failure.
    pub(crate) answers: IntCounterVec,
    /// Number of computed (token, expert) pairs.
    pub(crate) pairs: IntCounter,
    /// Number of reads of an expert's weights.
    pub(crate) reads: IntCounter,
    /// Compute time of each request in seconds, its share if several were computed together.
    pub(crate) compute: Histogram,
    /// Queue time of each request, in seconds.
    pub(crate) queued: Histogram,
    /// Requests accepted and not yet answered, and their bytes.
    pub(crate) in_flight: InFlightGauges,
    /// Limit on their bytes.
    pub(crate) in_flight_limit: IntGauge,
    /// Packed weights and the least working memory, in bytes.
    pub(crate) memory: IntGauge,
    /// Number of hosted experts.
    pub(crate) experts: IntGauge,
    /// Time from the start of the process to readiness, in seconds.
    pub(crate) start: Gauge,
}

impl Metrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// A name is already registered.
    pub(crate) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let seconds = |name: &str, help: &str| {
            Histogram::with_opts(
                HistogramOpts::new(name, help).buckets(prometheus::exponential_buckets(1e-5, 4.0, 10)?),
            )
        };
        let metrics = Self {
            answers: IntCounterVec::new(
                Opts::new("remoe_function_answers_total", "Answers by outcome."),
                &["outcome"],
            )?,
            pairs: IntCounter::new("remoe_function_pairs_total", "(token, expert) pairs computed.")?,
            reads: IntCounter::new(
                "remoe_function_expert_reads_total",
                "Times that an expert's weights were read; pairs that wait together share one read.",
            )?,
            compute: seconds(
                "remoe_function_compute_seconds",
                "Computation of a request: its share where several were computed together.",
            )?,
            queued: seconds("remoe_function_queue_seconds", "Wait of a request for its computation.")?,
            in_flight: InFlightGauges {
                requests: IntGauge::new(
                    "remoe_function_requests_in_flight",
                    "Requests accepted and not yet answered.",
                )?,
                bytes: IntGauge::new(
                    "remoe_function_bytes_in_flight",
                    "Bytes of requests accepted and not yet answered, answers included.",
                )?,
            },
            in_flight_limit: IntGauge::new(
                "remoe_function_bytes_in_flight_limit",
                "Limit of the bytes of requests and answers in flight.",
            )?,
            memory: IntGauge::new(
                "remoe_function_memory_bytes",
                "Packed weights and the least working memory.",
            )?,
            experts: IntGauge::new("remoe_function_experts", "Experts hosted.")?,
            start: Gauge::new(
                "remoe_function_start_seconds",
                "Time from the start of the process to readiness.",
            )?,
        };
        registry.register(Box::new(metrics.answers.clone()))?;
        registry.register(Box::new(metrics.pairs.clone()))?;
        registry.register(Box::new(metrics.reads.clone()))?;
        registry.register(Box::new(metrics.compute.clone()))?;
        registry.register(Box::new(metrics.queued.clone()))?;
        registry.register(Box::new(metrics.in_flight.requests.clone()))?;
        registry.register(Box::new(metrics.in_flight.bytes.clone()))?;
        registry.register(Box::new(metrics.in_flight_limit.clone()))?;
        registry.register(Box::new(metrics.memory.clone()))?;
        registry.register(Box::new(metrics.experts.clone()))?;
        registry.register(Box::new(metrics.start.clone()))?;
        Ok(metrics)
    }
}

/// Returns the `outcome` label of a refusal.
pub(crate) fn outcome_label(code: Code) -> &'static str {
    match code {
        Code::Unspecified => "unspecified",
        Code::InvalidArgument => "invalid_argument",
        Code::NotFound => "not_found",
        Code::ResourceExhausted => "resource_exhausted",
        Code::Draining => "draining",
        Code::DeadlineExceeded => "deadline_exceeded",
        Code::Internal => "internal",
    }
}
