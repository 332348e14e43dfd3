use std::io;

/// Runs in a task a `server` that the process can do without; where it fails, that is logged with what is `lost`.
/// Within a runtime.
pub fn beside(lost: &'static str, server: impl Future<Output = io::Result<()>> + Send + 'static) {
    tokio::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(%error, "{lost}");
        }
    });
}
