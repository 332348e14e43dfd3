//! Endpoints for Kubernetes probes of a function.

use super::{ConnectionLimits, ConnectionMetrics, serve};
use axum::http::StatusCode;
use axum::{Router, routing::get};
use std::io;
use std::net::SocketAddr;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Probe endpoints of a function. They are served until this is dropped, while the function drains, too.
pub struct Probes {
    address: Option<SocketAddr>,
    loaded: watch::Sender<bool>,
    end: CancellationToken,
    _end_on_drop: DropGuard,
}

impl Probes {
    /// Serves `/healthz` and `/readyz` on `listener`, in a Tokio task. `/healthz` is 200 once the function has
    /// loaded, `/readyz` while it is `ready`; else they are 503. Without a listener, serves nothing.
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
        Ok(Self { address, loaded, _end_on_drop: end.clone().drop_guard(), end })
    }

    /// Returns the address of the endpoints.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Marks the function as loaded: `/healthz` is 200 from now on.
    pub fn has_loaded(&self) {
        self.loaded.send_replace(true);
    }

    /// Returns a token that is cancelled when this is dropped, for servers that also run while the function drains.
    pub fn end(&self) -> CancellationToken {
        self.end.clone()
    }
}

/// Serves `/healthz` and `/readyz` on `listener` until `stop`. The connection limits keep idle connections from
/// blocking probes.
async fn serve_probes(
    listener: TcpListener,
    loaded: watch::Receiver<bool>,
    ready: watch::Receiver<bool>,
    stop: CancellationToken,
) -> io::Result<()> {
    let status_route = |state: watch::Receiver<bool>| {
        get(move || {
            let is_ok = *state.borrow();
            async move { if is_ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE } }
        })
    };
    let routes = Router::new().route("/healthz", status_route(loaded)).route("/readyz", status_route(ready));
    let metrics = ConnectionMetrics::new().map_err(io::Error::other)?;
    serve(listener, None, routes, ConnectionLimits::PROBES, metrics, stop).await
}
