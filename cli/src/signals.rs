//! Being asked to end.

use crate::exit::CliError;
use std::time::{Duration, Instant};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals that follow each other sooner are one request.
const ECHO: Duration = Duration::from_secs(1);

/// The signals that ask this process to end. From now on they do not end it by themselves.
pub(crate) struct EndSignals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl EndSignals {
    pub(crate) fn catch() -> Result<Self, CliError> {
        let handler =
            |kind| signal(kind).map_err(|error| CliError::runtime(format!("cannot handle signals: {error}")));
        Ok(Self {
            interrupt: handler(SignalKind::interrupt())?,
            terminate: handler(SignalKind::terminate())?,
            hangup: handler(SignalKind::hangup())?,
        })
    }

    /// Returns when one comes that is not the echo of the one before: some launchers signal a
    /// process and then its whole group.
    pub(crate) async fn again(&mut self) {
        let first = Instant::now();
        loop {
            self.next().await;
            if first.elapsed() > ECHO {
                return;
            }
        }
    }

    /// Returns when the next of them comes.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}
