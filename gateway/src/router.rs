//! Which path leads where.

use crate::gateway::Gateway;
use crate::{answer, caller, federation, listing};
use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use remoe_http::{allow_origins, check_host, stamp_request_id, unknown_route, wrong_method};
use std::sync::Arc;

/// All routes of `gateway`.
pub(crate) fn routes(gateway: Arc<Gateway>) -> Router {
    let origins = gateway.options().cors_origins.clone();
    Router::new()
        .route("/v1/chat/completions", post(answer::handle))
        .route("/v1/completions", post(answer::handle))
        .route("/tokenize", post(answer::handle))
        .route("/v1/models", get(listing::models))
        .route("/v1/models/{*id}", get(listing::model))
        .route("/status", get(listing::status))
        .route("/health", get(listing::health))
        .route("/metrics", get(federation::metrics))
        .route("/version", get(listing::version))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        // The last layer is the outermost: every answer has a request id and is counted.
        .layer(from_fn_with_state(gateway.clone(), caller::identify))
        .layer(from_fn(check_host))
        .layer(from_fn_with_state(origins, allow_origins))
        .layer(from_fn_with_state(gateway.clone(), observe))
        .layer(from_fn(stamp_request_id))
        .with_state(gateway)
}

/// Counts every answer.
async fn observe(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    let route = route(request.uri().path());
    let response = next.run(request).await;
    gateway.metrics().answered(route, response.status().as_str());
    response
}

/// A bounded set of names, whatever clients ask for.
fn route(path: &str) -> &'static str {
    const EXACT: [&str; 8] = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/status",
        "/health",
        "/metrics",
        "/version",
    ];
    match EXACT.into_iter().find(|route| *route == path) {
        Some(route) => route,
        None if path.starts_with("/v1/models/") => "/v1/models/{id}",
        None => "other",
    }
}
