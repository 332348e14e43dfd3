//! Signals that ask the process to end.

use crate::exit::CliError;
use std::time::{Duration, Instant};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals within this time count as one request. `timeout` signals a process and then its whole group, and wrappers
/// forward signals that the terminal also sends. Users do not press a key twice so quickly.
const DEBOUNCE: Duration = Duration::from_millis(50);

/// Cause of a termination signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TerminationCause {
    /// Ctrl-C of the user.
    Interrupted,
    /// Signal of another process, or a closed terminal.
    Requested,
}

/// Receiver of SIGINT, SIGTERM and SIGHUP. Once created, these signals no longer end the process by themselves.
pub(crate) struct TerminationSignals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    last: Option<Instant>,
}

impl TerminationSignals {
    pub(crate) fn listen() -> Result<Self, CliError> {
        let handler =
            |kind| signal(kind).map_err(|error| CliError::runtime(format!("cannot handle signals: {error}")));
        Ok(Self {
            interrupt: handler(SignalKind::interrupt())?,
            terminate: handler(SignalKind::terminate())?,
            hangup: handler(SignalKind::hangup())?,
            last: None,
        })
    }

    /// Waits for the next signal.
    pub(crate) async fn next(&mut self) {
        self.next_cause().await;
    }

    /// Waits for the next signal, and returns its cause.
    pub(crate) async fn next_cause(&mut self) -> TerminationCause {
        loop {
            let ended = tokio::select! {
                _ = self.interrupt.recv() => TerminationCause::Interrupted,
                _ = self.terminate.recv() => TerminationCause::Requested,
                _ = self.hangup.recv() => TerminationCause::Requested,
            };
            let before = self.last.replace(Instant::now());
            if before.is_none_or(|before| before.elapsed() > DEBOUNCE) {
                return ended;
            }
        }
    }
}
