//! Which path leads where.

use super::connections::Connections;
use super::error::ApiError;
use super::state::HttpState;
use super::{auth, chat, completions, cors, metrics, models, request_id, service, tokenize};
use axum::Router;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};
use std::sync::Arc;

/// All routes over `state`, for every connection of a server.
pub(crate) fn router(state: HttpState) -> Connections {
    let state = Arc::new(state);
    Connections::new(routes(state.clone()), &state)
}

/// All routes over `state`.
pub(super) fn routes(state: Arc<HttpState>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/tokenize", post(tokenize::handle))
        .route("/health", get(service::health))
        .route("/metrics", get(service::metrics))
        .route("/version", get(service::version))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        // The last layer is the outermost: every answer has a request id and is counted.
        .layer(from_fn_with_state(state.clone(), auth::guard))
        .layer(from_fn_with_state(state.clone(), cors::allow))
        .layer(from_fn_with_state(state.clone(), metrics::observe))
        .layer(from_fn(request_id::stamp))
        .with_state(state)
}

async fn unknown_route(method: Method, uri: Uri) -> ApiError {
    let message = format!("unknown request URL: {method} {}", uri.path());
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message)
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not answer {method}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_supported", message)
}
