//! Waits with deadlines.

use std::future::Future;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Deadline of steps that take milliseconds on an idle machine.
pub const SOON: Duration = Duration::from_secs(60);

/// Deadline of a complete generation with failures.
pub const LONG: Duration = Duration::from_secs(180);

/// Awaits `future`. Panics with `what` if it takes longer than `limit`.
pub async fn within<T>(limit: Duration, what: &str, future: impl Future<Output = T>) -> T {
    match timeout(limit, future).await {
        Ok(value) => value,
        Err(_elapsed) => panic!("{what}: not within {limit:?}"),
    }
}

/// Calls `ask` repeatedly until it returns a value. Panics with `what` after `limit`.
pub async fn until<T>(limit: Duration, what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = ask().await {
            return value;
        }
        assert!(Instant::now() < deadline, "{what}: not within {limit:?}");
        sleep(Duration::from_millis(10)).await;
    }
}
