//! How long is waited for a source, and how often it is asked again.

use crate::error::FetchError;
use crate::progress::size;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Limits of waiting. All are about time without a byte: what makes progress may take as long as it takes.
#[derive(Debug, Clone, Copy)]
pub struct FetchTimeouts {
    /// For a connection.
    pub connect: Duration,
    /// For the next bytes of an answer.
    pub idle: Duration,
    /// Attempts in a row that bring no byte.
    pub attempts: u32,
    /// Before the second attempt; doubled for each further one.
    pub first_pause: Duration,
    /// Longest pause, also where the source asks for a longer one.
    pub longest_pause: Duration,
    /// For another process that fetches the same bytes, while nothing arrives there either.
    pub others: Duration,
    /// After which a source is given up, whatever attempts are left. `None`: attempts alone decide.
    pub silence: Option<StallLimit>,
}

/// Longest time without a byte from a source, and the flag that sets it.
#[derive(Debug, Clone, Copy)]
pub struct StallLimit {
    /// The time.
    pub after: Duration,
    /// The flag, for messages.
    pub flag: &'static str,
}

impl FetchTimeouts {
    /// This patience with a limit for silence, which no single wait exceeds.
    #[must_use]
    pub fn within(self, silence: StallLimit) -> Self {
        let StallLimit { after, .. } = silence;
        let (connect, idle) = (self.connect.min(after), self.idle.min(after));
        Self { connect, idle, silence: Some(silence), ..self }
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
            // More than another process may take to give up, or to go on.
            others: Duration::from_secs(240),
            silence: None,
        }
    }
}

/// Bytes that arrived from a source so far, on all connections.
#[derive(Debug)]
pub(crate) struct SourceActivity(Mutex<ReadTally>);

#[derive(Debug)]
struct ReadTally {
    bytes: u64,
    /// Arrival of the first ones, and of the latest.
    first: Option<Instant>,
    latest: Option<Instant>,
}

impl SourceActivity {
    /// Nothing yet.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(ReadTally { bytes: 0, first: None, latest: None })))
    }

    /// Notes the arrival of `bytes`; of an answer without any, 0.
    pub(crate) fn note(&self, bytes: u64) {
        let now = Instant::now();
        let mut counted = self.counted();
        counted.bytes += bytes;
        counted.first.get_or_insert(now);
        counted.latest = Some(now);
    }

    /// Returns the time without a byte, at most that since `begun`.
    fn silent(&self, begun: Instant) -> Duration {
        self.counted().latest.map_or(begun, |latest| latest.max(begun)).elapsed()
    }

    /// Returns the bytes so far, and how many arrived in a second.
    fn figures(&self) -> (u64, u64) {
        let ReadTally { bytes, first, latest } = &*self.counted();
        let took = latest.zip(*first).map_or(0.0, |(latest, first)| (latest - first).as_secs_f64());
        (*bytes, (*bytes as f64 / took.max(0.001)) as u64)
    }

    fn counted(&self) -> MutexGuard<'_, ReadTally> {
        // Every change is a few assignments that cannot panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An attempt that failed.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) error: FetchError,
    pub(crate) again: RetryDecision,
}

/// Retry decision: an attempt that failed is final, or another one can succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RetryDecision {
    Never,
    /// After the usual pause, or the one that the source asks for.
    Soon(Option<Duration>),
}

impl From<FetchError> for Failed {
    fn from(error: FetchError) -> Self {
        Self { error, again: RetryDecision::Never }
    }
}

/// Counts attempts in a row and pauses between them.
#[derive(Debug)]
pub(crate) struct Attempts {
    patience: FetchTimeouts,
    heard: Arc<SourceActivity>,
    begun: Instant,
    made: u32,
}

impl Attempts {
    /// The first of several attempts at a source from which `heard` arrived so far.
    pub(crate) fn new(patience: FetchTimeouts, heard: &Arc<SourceActivity>) -> Self {
        Self { patience, heard: Arc::clone(heard), begun: Instant::now(), made: 0 }
    }

    /// Bytes arrived.
    pub(crate) fn progress(&mut self) {
        self.made = 0;
    }

    /// Pauses after an attempt that failed, where another one is to be made.
    ///
    /// # Errors
    /// The error of `failed`, if no attempt is left or none can help.
    pub(crate) async fn pause(&mut self, failed: Failed) -> Result<(), FetchError> {
        self.made += 1;
        let RetryDecision::Soon(asked) = failed.again else {
            return Err(failed.error);
        };
        if self.made >= self.patience.attempts {
            return Err(failed.error);
        }
        let left = match self.patience.silence {
            None => Duration::MAX,
            Some(silence) => {
                let silent = self.heard.silent(self.begun);
                let left = silence.after.saturating_sub(silent);
                if left.is_zero() {
                    return Err(self.silent(silence, failed.error));
                }
                left
            }
        };
        let usual = self.patience.first_pause.saturating_mul(1 << (self.made - 1).min(16));
        // Clients that lost the same server do not all come back at the same moment.
        let spread = usual.mul_f64(0.5 + fastrand::f64());
        sleep(asked.unwrap_or(spread).min(self.patience.longest_pause).min(left)).await;
        Ok(())
    }

    fn silent(&self, StallLimit { after, flag }: StallLimit, last: FetchError) -> FetchError {
        let (bytes, rate) = self.heard.figures();
        let before = match bytes {
            0 => "none arrived before".to_owned(),
            bytes => format!("{} arrived before, {}/s", size(bytes), size(rate)),
        };
        FetchError::Silent { after, before, flag, last: Box::new(last) }
    }
}
