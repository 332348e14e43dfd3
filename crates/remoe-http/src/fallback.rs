//! Fallback for requests that match no route.

use crate::error::ApiError;
use axum::http::{Method, StatusCode, Uri};

/// Returns 404, for a path without a route.
pub async fn unknown_route(method: Method, uri: Uri) -> ApiError {
    let message = format!("unknown URL: {method} {}", uri.path());
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message)
}

/// Returns 405, for a method that the route does not have.
pub async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("method {method} not allowed for {}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_supported", message)
}
