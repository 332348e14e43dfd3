//! Check of the `Host` header, which every HTTP/1.1 request has exactly once (RFC 9112, 3.2).

use crate::error::ApiError;
use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderValue, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::Response;

/// Refuses requests with a missing, repeated or invalid `Host` header.
pub async fn check_host(request: Request, next: Next) -> Result<Response, ApiError> {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let problem = match (hosts.next(), hosts.next()) {
        // HTTP/1.0 has no `Host` header, and HTTP/2 has `:authority` instead.
        (None, _) if request.version() != Version::HTTP_11 => None,
        (None, _) => Some("missing Host header"),
        (Some(_), Some(_)) => Some("invalid Host header: expected one, got several"),
        (Some(host), None) if !is_host(host) => Some("invalid Host header: expected a host name"),
        (Some(_), None) => None,
    };
    match problem {
        Some(problem) => Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_host", problem)),
        None => Ok(next.run(request).await),
    }
}

/// Reports if `value` is a host with an optional port, or empty.
fn is_host(value: &HeaderValue) -> bool {
    let has_user = |host: &str| host.contains('@');
    value.is_empty() || value.to_str().is_ok_and(|host| !has_user(host) && host.parse::<Authority>().is_ok())
}
