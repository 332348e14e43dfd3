use crate::admission::Gauges;
use prometheus::{Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};
use remoe_proto::v1::Code;

/// Metrics of a function. No series per expert: there can be thousands.
#[derive(Clone)]
pub(crate) struct Metrics {
    /// Answers by `outcome`: ok, or the failure's code.
    pub(crate) answers: IntCounterVec,
    /// (token, expert) pairs computed.
    pub(crate) pairs: IntCounter,
    /// How often an expert's weights were read to compute them.
    pub(crate) reads: IntCounter,
    /// Seconds of computation per request: its share where several were computed together.
    pub(crate) compute: Histogram,
    /// Seconds that a request waited for its computation.
    pub(crate) queued: Histogram,
    /// Requests accepted and not yet answered, and their bytes.
    pub(crate) in_flight: Gauges,
    /// The bound on their bytes.
    pub(crate) in_flight_limit: IntGauge,
    /// Bytes of packed weights and the least working memory.
    pub(crate) memory: IntGauge,
    /// Experts hosted.
    pub(crate) experts: IntGauge,
    /// Seconds from the start of the process to readiness.
    pub(crate) start: Gauge,
}

impl Metrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// A name is taken in `registry`.
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
            in_flight: Gauges {
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

/// The `outcome` of an answer that refuses.
pub(crate) fn outcome(code: Code) -> &'static str {
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
