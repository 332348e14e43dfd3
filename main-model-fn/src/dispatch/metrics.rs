//! Metrics of expert dispatch.

use super::activity::Activity;
use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};
use std::sync::Arc;

/// Metrics of expert dispatch. There is no series per expert, as there can be thousands.
#[derive(Clone)]
pub(crate) struct ExpertMetrics {
    /// (token, expert) pairs by `placement`: local, remote, fallback.
    pub(crate) pairs: IntCounterVec,
    /// Experts whose weights the local kernels read: once per layer of an iteration, for any number of rows.
    pub(crate) reads: IntCounter,
    /// Fallback pairs whose expert has no function in the placement.
    pub(crate) unhosted: IntCounter,
    /// Messages sent to remote functions.
    pub(crate) messages: IntCounter,
    /// Messages sent again to another replica.
    pub(crate) retries: IntCounter,
    /// Experts loaded because no replica answered.
    pub(crate) loads: IntCounter,
    /// Bytes of experts held in the fallback cache.
    pub(crate) fallback_bytes: IntGauge,
    /// Local experts of the placement in force that are still being loaded.
    pub(crate) loading: IntGauge,
    /// Seconds per layer call that the engine waited for remote answers after its local work.
    pub(crate) wait: Histogram,
    /// Usage of single experts and load of single functions.
    pub(crate) activity: Arc<Activity>,
}

impl ExpertMetrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// A name is taken in `registry`.
    pub(crate) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            pairs: IntCounterVec::new(
                Opts::new(
                    "remoe_expert_pairs_total",
                    "(token, expert) pairs by where they were computed: local, remote, fallback.",
                ),
                &["placement"],
            )?,
            reads: IntCounter::new(
                "remoe_expert_reads_total",
                "Experts whose weights the main function read, counted once per layer of an iteration.",
            )?,
            unhosted: IntCounter::new(
                "remoe_expert_unhosted_pairs_total",
                "Fallback (token, expert) pairs whose expert has no function in the placement: its group is asleep or gone.",
            )?,
            messages: IntCounter::new(
                "remoe_expert_messages_total",
                "Messages sent to remote-expert functions.",
            )?,
            retries: IntCounter::new(
                "remoe_expert_retries_total",
                "Messages sent again to another replica.",
            )?,
            loads: IntCounter::new(
                "remoe_expert_fallback_loads_total",
                "Experts loaded locally because no replica answered or none hosts them.",
            )?,
            fallback_bytes: IntGauge::new(
                "remoe_expert_fallback_bytes",
                "Bytes of experts held in the fallback cache.",
            )?,
            loading: IntGauge::new(
                "remoe_experts_arriving",
                "Local experts that are still to be read, and the embedding after them.",
            )?,
            wait: Histogram::with_opts(
                HistogramOpts::new(
                    "remoe_expert_wait_seconds",
                    "Wait of a layer for remote answers after its local work.",
                )
                .buckets(prometheus::exponential_buckets(2e-5, 4.0, 10)?),
            )?,
            activity: Arc::default(),
        };
        registry.register(Box::new(metrics.pairs.clone()))?;
        registry.register(Box::new(metrics.reads.clone()))?;
        registry.register(Box::new(metrics.unhosted.clone()))?;
        registry.register(Box::new(metrics.messages.clone()))?;
        registry.register(Box::new(metrics.retries.clone()))?;
        registry.register(Box::new(metrics.loads.clone()))?;
        registry.register(Box::new(metrics.fallback_bytes.clone()))?;
        registry.register(Box::new(metrics.loading.clone()))?;
        registry.register(Box::new(metrics.wait.clone()))?;
        Ok(metrics)
    }
}
