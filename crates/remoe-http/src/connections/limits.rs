//! Limits of connections.

use std::time::Duration;

/// How many connections there may be, and how long each may keep the server waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Connections at the same time. A further one takes the place of the one that has been without a
    /// request for longest; while all have requests, it waits to be accepted.
    pub count: usize,
    /// The whole head of a request must be there so long after its begin, or the connection's.
    pub head: Duration,
    /// The next request must begin so long after the answer before it.
    pub idle: Duration,
    /// A client that takes nothing of its answer for so long is given up.
    pub stall: Duration,
}

impl ConnectionLimits {
    /// A connection has two descriptors: 480 connections fit the usual limit of 1024.
    const COUNT: u64 = 480;
    const HEAD_S: u64 = 10;
    /// Longer than the 60 s that proxies usually keep connections which they mean to use again.
    const IDLE_S: u64 = 75;
    const STALL_S: u64 = 60;

    /// For probes: few connections, short ones, and never those of clients.
    pub const PROBES: Self = Self {
        count: 32,
        head: Duration::from_secs(2),
        idle: Duration::from_secs(10),
        stall: Duration::from_secs(2),
    };

    /// `REMOE_HTTP_MAX_CONNECTIONS`, `REMOE_HTTP_HEAD_S`, `REMOE_HTTP_IDLE_S` and `REMOE_HTTP_STALL_S`,
    /// whole numbers from 1, as `variable` gives them; what is not there or no such number is the
    /// default.
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
            count: usize::try_from(read("REMOE_HTTP_MAX_CONNECTIONS", Self::COUNT)).unwrap_or(usize::MAX),
            head: Duration::from_secs(read("REMOE_HTTP_HEAD_S", Self::HEAD_S)),
            idle: Duration::from_secs(read("REMOE_HTTP_IDLE_S", Self::IDLE_S)),
            stall: Duration::from_secs(read("REMOE_HTTP_STALL_S", Self::STALL_S)),
        }
    }
}
