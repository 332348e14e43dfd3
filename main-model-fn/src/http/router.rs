//! Routes of the HTTP API.

use super::state::HttpState;
use super::{
    anthropic, auth, chat, completions, embeddings, metrics, models, placement, primer, responses, service,
    tokenize,
};
use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};
use remoe_http::{
    allow_origins, check_host, shape_messages_errors, stamp_request_id, trace_request, unknown_route,
    wrong_method,
};
use remoe_proto::TlsHandshake;
use std::io;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Serves all routes on `listener` until `stop`. `handshake` authenticates connections if set.
///
/// # Errors
/// Fails if the server does.
pub(crate) async fn serve(
    listener: TcpListener,
    handshake: Option<TlsHandshake>,
    state: HttpState,
    stop: CancellationToken,
) -> io::Result<()> {
    let (limits, metrics) = (state.options.connections, state.metrics.connections.clone());
    remoe_http::serve(listener, handshake, routes(Arc::new(state)), limits, metrics, stop).await
}

/// Returns the router of all routes.
pub(super) fn routes(state: Arc<HttpState>) -> Router {
    let traces = state.options.traces.clone();
    let routes = Router::new()
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/responses", post(responses::handle))
        .route("/v1/messages", post(anthropic::handle))
        .route("/v1/messages/count_tokens", post(anthropic::handle_count))
        .route("/v1/embeddings", post(embeddings::handle))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/placement", get(placement::handle))
        .route("/v1/primer", get(primer::handle))
        .route("/tokenize", post(tokenize::handle))
        .route("/detokenize", post(tokenize::handle_back))
        .route("/health", get(service::health))
        .route("/metrics", get(service::metrics))
        .route("/version", get(service::version))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        // The last layer is the outermost: every answer gets a request id and is counted.
        .layer(from_fn_with_state(state.clone(), auth::guard))
        .layer(from_fn(check_host))
        .layer(from_fn_with_state(state.options.cors_origins.clone(), allow_origins))
        .layer(from_fn(shape_messages_errors))
        .layer(from_fn_with_state(state.clone(), metrics::observe));
    // Without allowed origins, the layer has no cost.
    let routes = match traces.is_on() {
        true => routes.layer(from_fn_with_state(traces, trace_request)),
        false => routes,
    };
    routes.layer(from_fn(stamp_request_id)).with_state(state)
}
