//! Background servers.

use std::io;

/// Spawns a `server` that is not essential. If it fails, logs `lost`, the consequence. Must be called within a tokio
/// runtime.
pub fn beside(lost: &'static str, server: impl Future<Output = io::Result<()>> + Send + 'static) {
    tokio::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(%error, "{lost}");
        }
    });
}
