//! The optional bearer key.

use super::error::ApiError;
use super::state::HttpState;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::Response;
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
        let presented = bearer(request.headers());
        if !presented.is_some_and(|presented| same(presented, key.as_bytes())) {
            let message = match presented {
                None => "this server needs a key: `Authorization: Bearer KEY`",
                Some(_) => "the key is wrong",
            };
            return Err(ServiceError::new(ErrorCode::Unauthenticated, message).into());
        }
    }
    Ok(next.run(request).await)
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
}

/// Compares in a time that depends on the presented key's length only.
fn same(presented: &[u8], key: &[u8]) -> bool {
    let mut difference = u8::from(presented.len() != key.len());
    let expected = key.iter().copied().chain(std::iter::repeat(0));
    for (a, b) in presented.iter().zip(expected) {
        difference |= std::hint::black_box(a ^ b);
    }
    std::hint::black_box(difference) == 0
}
