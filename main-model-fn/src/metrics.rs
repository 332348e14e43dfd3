//! Metrics of the engine.

use prometheus::{Histogram, HistogramOpts, IntCounter, IntGauge, IntGaugeVec, Opts, Registry};

/// Metrics of the engine.
#[derive(Clone)]
pub(crate) struct EngineMetrics {
    /// Requests in the queue.
    pub(crate) waiting: IntGauge,
    /// Requests in the batch.
    pub(crate) running: IntGauge,
    /// Forwards through the model.
    pub(crate) iterations: IntCounter,
    /// Rows forwarded, all requests together.
    pub(crate) rows: IntCounter,
    /// Forwards that failed and were repeated.
    pub(crate) repeated: IntCounter,
    /// Seconds per iteration.
    pub(crate) iteration_seconds: Histogram,
    /// Routing generation in force.
    pub(crate) generation: IntGauge,
    /// Experts by their location in the generation in force.
    pub(crate) experts: IntGaugeVec,
    /// Bytes of the KV cache that running requests hold, including unused space of their pages.
    pub(crate) cache_bytes: IntGauge,
    /// Limit of the KV cache in bytes.
    pub(crate) cache_limit: IntGauge,
    /// Preemptions of requests.
    pub(crate) preemptions: IntCounter,
    /// Forwards that ran out of device memory.
    pub(crate) out_of_memory: IntCounter,
    pub(crate) batch_limit: IntGauge,
    /// Bytes of device memory by use.
    pub(crate) device_memory: IntGaugeVec,
    /// Requests that missed their queue deadline.
    pub(crate) overdue: IntCounter,
    /// Requests that failed because their logits were not finite.
    pub(crate) not_finite: IntCounter,
    /// Prompt tokens looked up in the prefix cache.
    pub(crate) prefix_tokens: IntCounter,
    /// Prompt tokens found in the prefix cache.
    pub(crate) prefix_tokens_found: IntCounter,
}

impl EngineMetrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// A name is taken in `registry`.
    pub(crate) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            waiting: IntGauge::new("remoe_requests_waiting", "Requests in the queue.")?,
            running: IntGauge::new("remoe_requests_running", "Requests in the batch.")?,
            iterations: IntCounter::new("remoe_iterations_total", "Iterations of the engine.")?,
            rows: IntCounter::new(
                "remoe_forwarded_positions_total",
                "Rows of all iterations, all requests together.",
            )?,
            repeated: IntCounter::new(
                "remoe_iterations_repeated_total",
                "Iterations that failed because experts were out of reach, and were repeated.",
            )?,
            iteration_seconds: Histogram::with_opts(
                HistogramOpts::new("remoe_iteration_seconds", "Duration of one iteration.")
                    .buckets(prometheus::exponential_buckets(5e-4, 2.0, 16)?),
            )?,
            generation: IntGauge::new(
                "remoe_routing_generation",
                "Number of the routing generation in force.",
            )?,
            experts: IntGaugeVec::new(
                Opts::new(
                    "remoe_placement_experts",
                    "Experts of all layers by where the placement in force has them: local or remote.",
                ),
                &["placement"],
            )?,
            cache_bytes: IntGauge::new(
                "remoe_kv_cache_bytes",
                "KV cache bytes of running requests, unused space of their pages included.",
            )?,
            cache_limit: IntGauge::new(
                "remoe_kv_cache_limit_bytes",
                "Limit of the KV cache in bytes, prefix cache included.",
            )?,
            preemptions: IntCounter::new(
                "remoe_preemptions_total",
                "Preemptions: requests that released their pages and were computed again later.",
            )?,
            out_of_memory: IntCounter::new(
                "remoe_device_out_of_memory_total",
                "Forwards without enough device memory: one request was refused or preempted each time.",
            )?,
            batch_limit: IntGauge::new(
                "remoe_batch_limit_sequences",
                "Sequences that may run together: less than --max-batch after device memory ran out, until it has recovered.",
            )?,
            device_memory: IntGaugeVec::new(
                Opts::new(
                    "remoe_device_memory_bytes",
                    "Device memory by use: weights, kv_cache, or workspace that is left to iterations.",
                ),
                &["use"],
            )?,
            overdue: IntCounter::new(
                "remoe_requests_overdue_total",
                "Requests that failed because they waited for longer than their queue deadline.",
            )?,
            not_finite: IntCounter::new(
                "remoe_non_finite_logits_total",
                "Requests that failed because their logits had an infinity or a NaN.",
            )?,
            prefix_tokens: IntCounter::new(
                "remoe_prefix_cache_queries_total",
                "Prompt tokens looked up in the prefix cache.",
            )?,
            prefix_tokens_found: IntCounter::new(
                "remoe_prefix_cache_hits_total",
                "Prompt tokens found in the prefix cache and not computed again.",
            )?,
        };
        registry.register(Box::new(metrics.waiting.clone()))?;
        registry.register(Box::new(metrics.running.clone()))?;
        registry.register(Box::new(metrics.iterations.clone()))?;
        registry.register(Box::new(metrics.rows.clone()))?;
        registry.register(Box::new(metrics.repeated.clone()))?;
        registry.register(Box::new(metrics.iteration_seconds.clone()))?;
        registry.register(Box::new(metrics.generation.clone()))?;
        registry.register(Box::new(metrics.experts.clone()))?;
        registry.register(Box::new(metrics.cache_bytes.clone()))?;
        registry.register(Box::new(metrics.cache_limit.clone()))?;
        registry.register(Box::new(metrics.preemptions.clone()))?;
        registry.register(Box::new(metrics.out_of_memory.clone()))?;
        registry.register(Box::new(metrics.batch_limit.clone()))?;
        registry.register(Box::new(metrics.device_memory.clone()))?;
        registry.register(Box::new(metrics.overdue.clone()))?;
        registry.register(Box::new(metrics.not_finite.clone()))?;
        registry.register(Box::new(metrics.prefix_tokens.clone()))?;
        registry.register(Box::new(metrics.prefix_tokens_found.clone()))?;
        Ok(metrics)
    }
}
