//! Fallback for requests that match no route.

use crate::error::ApiError;
use axum::http::{Method, StatusCode, Uri};

/// 404 for a path that leads nowhere.
pub async fn unknown_route(method: Method, uri: Uri) -> ApiError {
    let message = format!("unknown URL: {method} {}", uri.path());
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message)
}

/// 405 for a method that a path does not answer.
pub async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("method {method} not allowed for {}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_supported", message)
}
