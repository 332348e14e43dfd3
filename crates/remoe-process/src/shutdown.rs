//! Graceful shutdown on signals.

use rustix::process::{Signal, getpid, kill_process};
use std::io;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Returns a token that the first SIGTERM or SIGINT cancels. The second signal kills the process.
///
/// # Errors
/// The signal handlers cannot be installed.
pub fn shutdown_on_signal() -> io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = CancellationToken::new();
    let trigger = token.clone();
    tokio::spawn(async move {
        let mut next = async || {
            tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            }
        };
        let signal = next().await;
        tracing::info!(signal, "shutting down");
        trigger.cancel();
        let signal = next().await;
        tracing::warn!(signal, "stopping immediately");
        // A normal exit would wait for exit handlers of libraries, beside busy threads. The first process of a
        // container cannot kill itself, so it exits.
        let _still_here = kill_process(getpid(), Signal::KILL);
        #[expect(clippy::disallowed_methods, reason = "nothing may delay the end")]
        std::process::exit(1);
    });
    Ok(token)
}
