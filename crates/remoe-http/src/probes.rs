//! Endpoints for probes of a function.

use super::{ConnectionLimits, ConnectionMetrics, serve};
use axum::http::StatusCode;
use axum::{Router, routing::get};
use std::io;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Serves `/healthz`, 200 once the function has `loaded`, and `/readyz`, 200 while it is `ready`, both 503
/// else, on `listener` until `stop`. Connections that ask for nothing cannot keep it from answering.
///
/// # Errors
/// The server fails.
pub async fn serve_probes(
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
