//! Waiting, never for ever.

use std::future::Future;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// For steps that take milliseconds on a quiet machine.
pub const SOON: Duration = Duration::from_secs(60);

/// For a whole generation with failures in it.
pub const LONG: Duration = Duration::from_secs(180);

/// The outcome of `future`; `what` is in the message when it does not come within `limit`.
pub async fn within<T>(limit: Duration, what: &str, future: impl Future<Output = T>) -> T {
    match timeout(limit, future).await {
        Ok(value) => value,
        Err(_elapsed) => panic!("{what}: not within {limit:?}"),
    }
}

/// Asks again and again until there is an answer.
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
