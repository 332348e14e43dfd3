use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing::get};
use prometheus::{IntCounterVec, Opts, Registry, TextEncoder};
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

/// Counts connections that a port did not let in, by `reason`, each of which there is from the start.
///
/// # Errors
/// The name is taken in `registry`.
pub fn refused_connections(
    registry: &Registry,
    reasons: impl IntoIterator<Item = &'static str>,
) -> Result<IntCounterVec, prometheus::Error> {
    let counter = IntCounterVec::new(
        Opts::new("remoe_connections_refused_total", "Connections that were not let in, by reason."),
        &["reason"],
    )?;
    reasons.into_iter().for_each(|reason| drop(counter.with_label_values(&[reason])));
    registry.register(Box::new(counter.clone()))?;
    Ok(counter)
}
