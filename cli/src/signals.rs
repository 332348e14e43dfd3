//! Being asked to end.

use crate::exit::CliError;
use std::time::{Duration, Instant};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals that follow each other sooner are one request: `timeout` signals a process and then its whole group,
/// wrappers pass on what the terminal has sent already. Users do not press a key twice so soon.
const ECHO: Duration = Duration::from_millis(50);

/// How this process was asked to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// By a key of its user.
    Interrupted,
    /// By another process, or because its terminal is gone.
    Asked,
}

/// The signals that ask this process to end. From now on they do not end it by themselves.
pub(crate) struct EndSignals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    last: Option<Instant>,
}

impl EndSignals {
    pub(crate) fn catch() -> Result<Self, CliError> {
        let handler =
            |kind| signal(kind).map_err(|error| CliError::runtime(format!("cannot handle signals: {error}")));
        Ok(Self {
            interrupt: handler(SignalKind::interrupt())?,
            terminate: handler(SignalKind::terminate())?,
            hangup: handler(SignalKind::hangup())?,
            last: None,
        })
    }

    /// Returns when the next of them comes that is not the echo of the one before.
    pub(crate) async fn next(&mut self) {
        self.next_kind().await;
    }

    /// As [`Self::next`], and returns which it was.
    pub(crate) async fn next_kind(&mut self) -> Ended {
        loop {
            let ended = tokio::select! {
                _ = self.interrupt.recv() => Ended::Interrupted,
                _ = self.terminate.recv() => Ended::Asked,
                _ = self.hangup.recv() => Ended::Asked,
            };
            let before = self.last.replace(Instant::now());
            if before.is_none_or(|before| before.elapsed() > ECHO) {
                return ended;
            }
        }
    }
}
