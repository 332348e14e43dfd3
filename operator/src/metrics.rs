use prometheus::{
    Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry, core::Collector,
};

/// What the operator counts.
#[derive(Clone)]
pub(super) struct Metrics {
    /// Runs of the pipeline.
    pub(super) reconciliations: IntCounter,
    /// Runs that failed, by what failed.
    pub(super) errors: IntCounterVec,
    /// Their durations.
    pub(super) duration: Histogram,
    /// Calls that change objects, by verb and kind.
    pub(super) writes: IntCounterVec,
    /// Whether this operator leads.
    pub(super) leads: IntGauge,
}

impl Metrics {
    /// Metrics in `registry`.
    ///
    /// # Errors
    /// A name is taken.
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            reconciliations: IntCounter::new(
                "remoe_operator_reconciliations_total",
                "Times that a deployment was looked at.",
            )?,
            errors: IntCounterVec::new(
                Opts::new("remoe_operator_reconciliation_errors_total", "Times that this failed."),
                &["error"],
            )?,
            duration: Histogram::with_opts(
                HistogramOpts::new(
                    "remoe_operator_reconcile_duration_seconds",
                    "How long looking at a deployment took.",
                )
                .buckets(vec![0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]),
            )?,
            writes: IntCounterVec::new(
                Opts::new("remoe_operator_api_writes_total", "Calls of the API that change objects."),
                &["verb", "kind"],
            )?,
            leads: IntGauge::new("remoe_operator_leader", "Whether this operator leads.")?,
        };
        let all: [Box<dyn Collector>; 5] = [
            Box::new(metrics.reconciliations.clone()),
            Box::new(metrics.errors.clone()),
            Box::new(metrics.duration.clone()),
            Box::new(metrics.writes.clone()),
            Box::new(metrics.leads.clone()),
        ];
        all.into_iter().try_for_each(|metric| registry.register(metric))?;
        Ok(metrics)
    }
}
