//! Limits of connections.

use std::time::Duration;

/// Limits of the number of connections, and of the time that each may keep the server waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Largest number of connections. A further one displaces the one that has been idle for longest. While none is
    /// idle, it waits to be accepted.
    pub count: usize,
    /// Time within which the complete head of a request must arrive, from its first byte or from the start of the
    /// connection.
    pub head: Duration,
    /// Time within which the next request must begin after the previous answer.
    pub idle: Duration,
    /// Time after which a client that reads nothing of its answer is disconnected.
    pub stall: Duration,
}

impl ConnectionLimits {
    /// Default of `count`. A connection has two file descriptors: 480 connections fit the usual limit of 1024.
    const DEFAULT_COUNT: u64 = 480;
    const DEFAULT_HEAD_S: u64 = 10;
    /// Default of `idle`: longer than the 60 s for which proxies usually keep idle connections.
    const DEFAULT_IDLE_S: u64 = 75;
    const DEFAULT_STALL_S: u64 = 60;

    /// Limits of servers for probes and metrics: few and short connections.
    pub const PROBES: Self = Self {
        count: 32,
        head: Duration::from_secs(2),
        idle: Duration::from_secs(10),
        stall: Duration::from_secs(2),
    };

    /// Reads the limits from `REMOE_HTTP_MAX_CONNECTIONS`, `REMOE_HTTP_HEAD_S`, `REMOE_HTTP_IDLE_S` and
    /// `REMOE_HTTP_STALL_S`, through `variable`. Missing and invalid numbers get the defaults.
    pub fn from_environment(variable: impl Fn(&str) -> Option<String>) -> Self {
        let read = |name: &str, default: u64| {
            let Some(text) = variable(name) else {
                return default;
            };
            text.parse().ok().filter(|number| (1..=1_000_000).contains(number)).unwrap_or_else(|| {
                tracing::warn!(
                    name,
                    text,
                    default,
                    "invalid setting: expected 1 to 1000000, using the default"
                );
                default
            })
        };
        Self {
            count: usize::try_from(read("REMOE_HTTP_MAX_CONNECTIONS", Self::DEFAULT_COUNT))
                .unwrap_or(usize::MAX),
            head: Duration::from_secs(read("REMOE_HTTP_HEAD_S", Self::DEFAULT_HEAD_S)),
            idle: Duration::from_secs(read("REMOE_HTTP_IDLE_S", Self::DEFAULT_IDLE_S)),
            stall: Duration::from_secs(read("REMOE_HTTP_STALL_S", Self::DEFAULT_STALL_S)),
        }
    }
}
