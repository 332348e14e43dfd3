//! Loading that a shutdown interrupts.

use std::io;
use tokio_util::sync::CancellationToken;

/// Runs `load` on its own thread, so that signals are handled meanwhile. Returns `None` if `shutdown` came first.
///
/// # Errors
/// The error of `load`, or its panic.
pub async fn load_unless_stopped<T, E>(
    shutdown: &CancellationToken,
    load: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<Option<T>, E>
where
    T: Send + 'static,
    E: From<io::Error> + Send + 'static,
{
    tokio::select! {
        loaded = tokio::task::spawn_blocking(load) => loaded.map_err(io::Error::other)?.map(Some),
        () = shutdown.cancelled() => {
            tracing::info!("stopped while loading");
            Ok(None)
        }
    }
}

#[cfg(test)]
#[allow(clippy::panic)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[tokio::test]
    async fn loading_ends_at_a_shutdown_and_tells_errors_and_panics() {
        let shutdown = CancellationToken::new();
        let loaded = load_unless_stopped::<_, io::Error>(&shutdown, || Ok(7)).await;
        assert!(matches!(loaded, Ok(Some(7))));
        let failed = load_unless_stopped::<(), _>(&shutdown, || Err(io::Error::other("no disk"))).await;
        assert!(failed.is_err_and(|error| error.to_string() == "no disk"));
        let panicked = load_unless_stopped::<(), io::Error>(&shutdown, || panic!("broken")).await;
        assert!(panicked.is_err());
        let (go_on, waits) = mpsc::channel::<()>();
        shutdown.cancel();
        let stopped = load_unless_stopped::<_, io::Error>(&shutdown, move || {
            let _until_dropped = waits.recv();
            Ok(())
        });
        assert!(matches!(stopped.await, Ok(None)));
        drop(go_on);
    }
}
