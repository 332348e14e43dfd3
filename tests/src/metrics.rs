//! Prometheus metrics of a function.

use crate::http;
use std::net::SocketAddr;

/// A function's metrics at one moment.
#[derive(Debug, Clone)]
pub struct Metrics(String);

impl Metrics {
    /// Reads `/metrics` at `address`.
    pub async fn read(address: SocketAddr) -> Self {
        let response = http::get(address, "/metrics").await;
        assert_eq!(response.status, 200, "GET /metrics");
        Self(response.body)
    }

    /// The value of a series, `name{label="value"}` as it is written; 0 where there is none.
    #[must_use]
    pub fn value(&self, series: &str) -> u64 {
        let mut lines = self.0.lines().filter_map(|line| line.rsplit_once(' '));
        let value = lines.find(|(name, _)| *name == series).map_or("0", |(_, value)| value);
        value.parse::<f64>().unwrap_or_else(|error| panic!("{series} is {value:?}: {error}")) as u64
    }
}
