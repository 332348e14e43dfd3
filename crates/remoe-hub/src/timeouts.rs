//! Timeouts of requests to a source, and retries with exponential backoff.

use crate::error::FetchError;
use crate::progress::format_bytes;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Timeouts and retries. All limit the time without a received byte; the total time of a transfer is not limited.
#[derive(Debug, Clone, Copy)]
pub struct FetchTimeouts {
    /// Timeout of establishing a connection.
    pub connect: Duration,
    /// Timeout of the next bytes of a response.
    pub idle: Duration,
    /// Limit of consecutive attempts that receive no byte.
    pub attempts: u32,
    /// Pause before the second attempt. Each further pause is twice as long.
    pub first_pause: Duration,
    /// Longest pause, even if the source's `Retry-After` is longer.
    pub longest_pause: Duration,
    /// Limit of waiting for another process that fetches the same bytes, without any progress of it.
    pub other_process: Duration,
    /// Stall limit, after which no further attempt is failed_attempts. `None`: only `attempts` limits them.
    pub stall_limit: Option<StallLimit>,
}

/// Longest time without a byte from a source, and the flag that sets it.
#[derive(Debug, Clone, Copy)]
pub struct StallLimit {
    /// Time without a byte.
    pub after: Duration,
    /// Flag that sets the limit, for messages.
    pub flag: &'static str,
}

impl FetchTimeouts {
    /// Sets the stall limit, and reduces the other timeouts to it.
    #[must_use]
    pub fn with_stall_limit(self, stall_limit: StallLimit) -> Self {
        let StallLimit { after, .. } = stall_limit;
        let (connect, idle) = (self.connect.min(after), self.idle.min(after));
        Self { connect, idle, stall_limit: Some(stall_limit), ..self }
    }
}

impl Default for FetchTimeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(30),
            attempts: 6,
            first_pause: Duration::from_millis(250),
            longest_pause: Duration::from_secs(20),
            // Longer than all attempts of another process, so that it fails or makes progress first.
            other_process: Duration::from_secs(240),
            stall_limit: None,
        }
    }
}

/// Counter of the bytes that arrived from a source, on all connections.
#[derive(Debug)]
pub(crate) struct SourceActivity(Mutex<ByteCount>);

#[derive(Debug)]
struct ByteCount {
    bytes: u64,
    /// Arrival of the first bytes, and of the latest.
    first: Option<Instant>,
    latest: Option<Instant>,
}

impl SourceActivity {
    /// Creates a counter without bytes.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(ByteCount { bytes: 0, first: None, latest: None })))
    }

    /// Records the arrival of `bytes`. 0 records a response without a body.
    pub(crate) fn record(&self, bytes: u64) {
        let now = Instant::now();
        let mut counted = self.counted();
        counted.bytes += bytes;
        counted.first.get_or_insert(now);
        counted.latest = Some(now);
    }

    /// Returns the time since the latest byte, or since `begun` if that is later.
    fn time_since_byte(&self, begun: Instant) -> Duration {
        self.counted().latest.map_or(begun, |latest| latest.max(begun)).elapsed()
    }

    /// Returns the number of bytes so far, and their rate in bytes per second.
    fn bytes_and_rate(&self) -> (u64, u64) {
        let ByteCount { bytes, first, latest } = &*self.counted();
        let seconds = latest.zip(*first).map_or(0.0, |(latest, first)| (latest - first).as_secs_f64());
        (*bytes, (*bytes as f64 / seconds.max(0.001)) as u64)
    }

    fn counted(&self) -> MutexGuard<'_, ByteCount> {
        // A poisoned lock is safe to use: changes are assignments that cannot panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Error of an attempt, and whether to retry.
#[derive(Debug)]
pub(crate) struct FailedAttempt {
    pub(crate) error: FetchError,
    pub(crate) retry: RetryDecision,
}

/// Decision about a retry after a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RetryDecision {
    Never,
    /// Retry after the given pause from `Retry-After`, or after the exponential backoff.
    Retry(Option<Duration>),
}

impl From<FetchError> for FailedAttempt {
    fn from(error: FetchError) -> Self {
        Self { error, retry: RetryDecision::Never }
    }
}

/// Consecutive failed attempts at one request, with pauses between them.
#[derive(Debug)]
pub(crate) struct Attempts {
    timeouts: FetchTimeouts,
    activity: Arc<SourceActivity>,
    begun: Instant,
    failed_attempts: u32,
}

impl Attempts {
    /// Starts with no failed attempt. `activity` counts the bytes of the source.
    pub(crate) fn new(timeouts: FetchTimeouts, activity: &Arc<SourceActivity>) -> Self {
        Self { timeouts, activity: Arc::clone(activity), begun: Instant::now(), failed_attempts: 0 }
    }

    /// Resets the count of failed attempts, because bytes arrived.
    pub(crate) fn reset(&mut self) {
        self.failed_attempts = 0;
    }

    /// Pauses before the next attempt.
    ///
    /// # Errors
    /// The error of `failed`, if a retry cannot help, or the limits are reached.
    pub(crate) async fn pause(&mut self, failed: FailedAttempt) -> Result<(), FetchError> {
        self.failed_attempts += 1;
        let RetryDecision::Retry(requested_pause) = failed.retry else {
            return Err(failed.error);
        };
        if self.failed_attempts >= self.timeouts.attempts {
            return Err(failed.error);
        }
        let left = match self.timeouts.stall_limit {
            None => Duration::MAX,
            Some(stall_limit) => {
                let silent = self.activity.time_since_byte(self.begun);
                let left = stall_limit.after.saturating_sub(silent);
                if left.is_zero() {
                    return Err(self.stalled(stall_limit, failed.error));
                }
                left
            }
        };
        let backoff = self.timeouts.first_pause.saturating_mul(1 << (self.failed_attempts - 1).min(16));
        // Jitter, so that clients do not all return to a failed server at the same moment.
        let jittered = backoff.mul_f64(0.5 + fastrand::f64());
        sleep(requested_pause.unwrap_or(jittered).min(self.timeouts.longest_pause).min(left)).await;
        Ok(())
    }

    fn stalled(&self, StallLimit { after, flag }: StallLimit, last: FetchError) -> FetchError {
        let (bytes, rate) = self.activity.bytes_and_rate();
        let before = match bytes {
            0 => "none arrived before".to_owned(),
            bytes => format!("{} arrived before, {}/s", format_bytes(bytes), format_bytes(rate)),
        };
        FetchError::Silent { after, before, flag, last: Box::new(last) }
    }
}
