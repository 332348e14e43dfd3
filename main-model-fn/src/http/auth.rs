//! Authentication of requests: API keys of clients, the key of a gateway, and headers that only gateways may send.

use super::state::HttpState;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::middleware::Next;
use axum::response::Response;
use remoe_http::internal_headers::TENANT;
use remoe_http::{ApiError, constant_time_eq, presented_key, random_id};
use remoe_proto::{ErrorCode, ServiceError};
use std::sync::Arc;

/// Accepts requests with a valid key, and health requests.
///
/// A request whose tenant no gateway names gets a prefix cache scope of its own, so it finds no one else's prefixes.
pub(super) async fn guard(
    State(state): State<Arc<HttpState>>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let options = &state.options;
    let presented = presented_key(request.headers());
    let is = |key: &Option<String>| {
        presented.zip(key.as_ref()).is_some_and(|(it, key)| constant_time_eq(it, key.as_bytes()))
    };
    let is_gateway = options.is_only_for_gateways || is(&options.gateway_key);
    let has_keys = options.api_key.is_some() || options.gateway_key.is_some();
    if has_keys && !is(&options.gateway_key) && !is(&options.api_key) && request.uri().path() != "/health" {
        let message = match presented {
            None => "missing API key; send `Authorization: Bearer KEY`",
            Some(_) => "invalid API key",
        };
        return Err(ServiceError::new(ErrorCode::Unauthenticated, message).into());
    }
    if !is_gateway && let Some(tenant) = request.headers_mut().get_mut(TENANT) {
        // Names of tenants are shorter.
        let unverified = format!("unverified {} {}", random_id(), random_id());
        *tenant = HeaderValue::from_str(&unverified).unwrap_or_else(|_| HeaderValue::from_static(""));
    }
    Ok(next.run(request).await)
}
