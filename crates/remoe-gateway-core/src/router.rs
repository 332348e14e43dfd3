//! Routes of the gateway.

use crate::gateway::Gateway;
use crate::{access_log, answer, authentication, federation, listing, page, placement, stored_response};
use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use remoe_http::{
    allow_origins, check_host, route_name, shape_messages_errors, stamp_request_id, trace_request,
    unknown_route, wrong_method,
};
use std::sync::Arc;

/// Returns the routes for clients.
pub(crate) fn client_routes(gateway: Arc<Gateway>) -> Router {
    let origins = gateway.options().cors_origins.clone();
    let traces = gateway.options().traces.clone();
    let access_log = gateway.options().access_log.clone();
    let routes = Router::new()
        .route("/v1/chat/completions", post(answer::handle))
        .route("/v1/completions", post(answer::handle))
        .route("/v1/responses", post(answer::handle))
        .route("/v1/responses/{id}", get(stored_response::get).delete(stored_response::delete))
        .route("/v1/messages", post(answer::handle))
        .route("/v1/messages/count_tokens", post(answer::handle))
        .route("/v1/embeddings", post(answer::handle))
        .route("/tokenize", post(answer::handle))
        .route("/detokenize", post(answer::handle))
        .route("/v1/models", get(listing::models))
        .route("/v1/models/{*id}", get(listing::model))
        .route("/v1/placement", get(placement::handle))
        .route("/", get(page::html))
        .route("/page/{file}", get(page::file))
        .route("/status", get(listing::status))
        .route("/health", get(listing::health))
        .route("/metrics", get(federation::metrics))
        .route("/version", get(listing::version))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        // The last layer is the outermost: every answer has a request id and is counted.
        .layer(from_fn_with_state(gateway.clone(), authentication::identify))
        .layer(from_fn(check_host))
        .layer(from_fn_with_state(origins, allow_origins))
        .layer(from_fn(shape_messages_errors))
        .layer(from_fn_with_state(gateway.clone(), count_answer))
        .layer(from_fn_with_state(access_log, access_log::log));
    // Without traces the layer is left out, so that it costs nothing.
    let routes = match traces.is_on() {
        true => routes.layer(from_fn_with_state(traces, trace_request)),
        false => routes,
    };
    routes.layer(from_fn(stamp_request_id)).with_state(gateway)
}

/// Returns the route of the gateway's own `/metrics`.
pub(crate) fn own_metrics_routes(gateway: Arc<Gateway>) -> Router {
    Router::new().route("/metrics", get(federation::own_metrics)).fallback(unknown_route).with_state(gateway)
}

/// Returns the route of `/metrics` with the metrics of the gateway and of its functions.
pub(crate) fn metrics_routes(gateway: Arc<Gateway>) -> Router {
    Router::new().route("/metrics", get(federation::all_metrics)).fallback(unknown_route).with_state(gateway)
}

/// Counts every answer by route and status.
async fn count_answer(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    let route = route_name(request.uri().path());
    let response = next.run(request).await;
    // Bounds the number of series: functions may answer with any number from 100 to 999.
    let status = response.status();
    gateway
        .metrics()
        .count_answer(route, status.canonical_reason().map_or("other", |_known| status.as_str()));
    response
}
