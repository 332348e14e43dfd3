use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing::get};
use prometheus::{Registry, TextEncoder};
use std::io;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Serves `registry` at `/metrics` in the Prometheus text format until `shutdown`.
///
/// # Errors
/// The listener fails.
pub async fn serve_metrics(
    listener: TcpListener,
    registry: Registry,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let router = Router::new().route(
        "/metrics",
        get(move || {
            let registry = registry.clone();
            async move { render(&registry) }
        }),
    );
    axum::serve(listener, router).with_graceful_shutdown(shutdown.cancelled_owned()).await
}

/// The metrics of `registry` as an HTTP answer.
pub fn render(registry: &Registry) -> Response {
    match TextEncoder::new().encode_to_string(&registry.gather()) {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
