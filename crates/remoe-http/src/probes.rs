//! Endpoints for probes of a function.

use super::{ConnectionLimits, ConnectionMetrics, serve};
use axum::http::StatusCode;
use axum::{Router, routing::get};
use std::io;
use std::net::SocketAddr;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Probe endpoints of a function, served from its start until this is dropped, the drain included.
pub struct Probes {
    address: Option<SocketAddr>,
    loaded: watch::Sender<bool>,
    end: CancellationToken,
    _end_with_this: DropGuard,
}

impl Probes {
    /// Serves on `listener` in a task: `/healthz`, 200 once the function has loaded, and `/readyz`, 200 while it is
    /// `ready`, both 503 else. Without a listener nothing is served. Within a runtime.
    ///
    /// # Errors
    /// The listener has no address.
    pub fn start(listener: Option<TcpListener>, ready: watch::Receiver<bool>) -> io::Result<Self> {
        let address = listener.as_ref().map(TcpListener::local_addr).transpose()?;
        let (loaded, has_loaded) = watch::channel(false);
        let end = CancellationToken::new();
        if let Some(listener) = listener {
            let probes = serve_probes(listener, has_loaded, ready, end.clone());
            tokio::spawn(async move {
                if let Err(error) = probes.await {
                    tracing::error!(%error, "health server stopped");
                }
            });
        }
        Ok(Self { address, loaded, _end_with_this: end.clone().drop_guard(), end })
    }

    /// Where probes are answered.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// The function has loaded: it is alive from here on.
    pub fn has_loaded(&self) {
        self.loaded.send_replace(true);
    }

    /// Cancelled when this is dropped: the end of servers that go on through the drain.
    pub fn end(&self) -> CancellationToken {
        self.end.clone()
    }
}

/// Serves `/healthz` and `/readyz` on `listener` until `stop`. Connections that ask for nothing cannot keep it from
/// answering.
async fn serve_probes(
    listener: TcpListener,
    loaded: watch::Receiver<bool>,
    ready: watch::Receiver<bool>,
    stop: CancellationToken,
) -> io::Result<()> {
    let says = |state: watch::Receiver<bool>| {
        get(move || {
            let yes = *state.borrow();
            async move { if yes { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE } }
        })
    };
    let routes = Router::new().route("/healthz", says(loaded)).route("/readyz", says(ready));
    let metrics = ConnectionMetrics::new().map_err(io::Error::other)?;
    serve(listener, None, routes, ConnectionLimits::PROBES, metrics, stop).await
}
