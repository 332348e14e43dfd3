//! How long is waited for a source, and how often it is asked again.

use crate::error::FetchError;
use std::time::Duration;
use tokio::time::sleep;

/// Limits of waiting. All are about time without a byte: what makes progress may take as long as it takes.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
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
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(30),
            attempts: 6,
            first_pause: Duration::from_millis(250),
            longest_pause: Duration::from_secs(20),
            // More than another process may take to give up, or to go on.
            others: Duration::from_secs(240),
        }
    }
}

/// An attempt that failed.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) error: FetchError,
    pub(crate) again: Again,
}

/// Whether another attempt can succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    Never,
    /// After the usual pause, or the one that the source asks for.
    Soon(Option<Duration>),
}

impl From<FetchError> for Failed {
    fn from(error: FetchError) -> Self {
        Self { error, again: Again::Never }
    }
}

/// Counts attempts in a row and pauses between them.
#[derive(Debug)]
pub(crate) struct Attempts {
    patience: Patience,
    made: u32,
}

impl Attempts {
    pub(crate) fn new(patience: Patience) -> Self {
        Self { patience, made: 0 }
    }

    /// Bytes arrived.
    pub(crate) fn progress(&mut self) {
        self.made = 0;
    }

    /// Pauses after an attempt that failed, where another one is to be made.
    ///
    /// # Errors
    /// What failed, where no attempt is left or none can help.
    pub(crate) async fn pause(&mut self, failed: Failed) -> Result<(), FetchError> {
        self.made += 1;
        let Again::Soon(asked) = failed.again else {
            return Err(failed.error);
        };
        if self.made >= self.patience.attempts {
            return Err(failed.error);
        }
        let usual = self.patience.first_pause.saturating_mul(1 << (self.made - 1).min(16));
        // Not all who lost the same server come back at the same moment.
        let spread = usual.mul_f64(0.5 + fastrand::f64());
        sleep(asked.unwrap_or(spread).min(self.patience.longest_pause)).await;
        Ok(())
    }
}
