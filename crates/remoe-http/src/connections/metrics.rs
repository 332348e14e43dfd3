//! Metrics of connections.

use prometheus::{IntCounterVec, IntGauge, Opts, Registry};

/// Metrics of one listener's connections. Clones share their values.
#[derive(Clone)]
pub struct ConnectionMetrics {
    pub(crate) open: IntGauge,
    pub(crate) ended: IntCounterVec,
}

impl ConnectionMetrics {
    /// Makes metrics, which are not exported until they are registered.
    ///
    /// # Errors
    /// A name is invalid.
    pub fn new() -> Result<Self, prometheus::Error> {
        Ok(Self {
            open: IntGauge::new("remoe_http_connections", "Open HTTP connections.")?,
            ended: IntCounterVec::new(
                Opts::new(
                    "remoe_http_connections_ended_total",
                    "HTTP connections that the server ended, by reason: idle (no request came), displaced (had no request when another one needed its place), stalled (the client did not read its answer).",
                ),
                &["reason"],
            )?,
        })
    }

    /// Registers the metrics in `registry`.
    ///
    /// # Errors
    /// `registry` has a metric of the same name.
    pub fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        registry.register(Box::new(self.open.clone()))?;
        registry.register(Box::new(self.ended.clone()))
    }
}
