//! HTTP server of the operator: metrics and probes.

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use prometheus::Registry;
use remoe_process::render_metrics;
use std::io;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Serves `/metrics`, `/healthz` and `/readyz` until `shutdown`. It is ready if deployments can be read, or if
/// another operator leads.
///
/// # Errors
/// The listener fails.
pub(super) async fn serve(
    listener: TcpListener,
    registry: Registry,
    ready: watch::Receiver<bool>,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let router = Router::new()
        .route("/healthz", get(|| async { StatusCode::OK }))
        .route(
            "/readyz",
            get(move || {
                let ready = *ready.borrow();
                async move { if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE } }
            }),
        )
        .route(
            "/metrics",
            get(move || {
                let registry = registry.clone();
                async move { render_metrics(&registry) }
            }),
        );
    axum::serve(listener, router).with_graceful_shutdown(shutdown.cancelled_owned()).await
}
