//! The optional API key.

use super::state::HttpState;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use remoe_http::{ApiError, presented_key, same};
use remoe_wire::{ErrorCode, ServiceError};
use std::sync::Arc;

/// Lets requests with the key pass, and all that ask for health.
pub(super) async fn guard(
    State(state): State<Arc<HttpState>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if let Some(key) = &state.options.api_key
        && request.uri().path() != "/health"
    {
        let presented = presented_key(request.headers());
        if !presented.is_some_and(|presented| same(presented, key.as_bytes())) {
            let message = match presented {
                None => "missing API key; send `Authorization: Bearer KEY`",
                Some(_) => "invalid API key",
            };
            return Err(ServiceError::new(ErrorCode::Unauthenticated, message).into());
        }
    }
    Ok(next.run(request).await)
}
