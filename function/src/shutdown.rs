use std::io;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that is cancelled by the first SIGTERM or SIGINT.
///
/// # Errors
/// The signal handlers cannot be installed.
pub fn shutdown_on_signal() -> io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = CancellationToken::new();
    let trigger = token.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => tracing::info!(signal = "SIGTERM", "shutting down"),
            _ = interrupt.recv() => tracing::info!(signal = "SIGINT", "shutting down"),
        }
        trigger.cancel();
    });
    Ok(token)
}
