//! Request ids: that of the client's `X-Request-Id`, or a new one.

use crate::entropy::random_id;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

/// Header with the request id.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest id of a client that is used, in bytes.
const MAX_ID_BYTES: usize = 128;

/// Request id, an extension of the request.
#[derive(Debug, Clone)]
pub struct RequestId(pub HeaderValue);

/// Middleware that gives every request an id and every answer the id of its request.
pub async fn stamp_request_id(mut request: Request, next: Next) -> Response {
    let id = request
        .headers()
        .get(REQUEST_ID)
        .filter(|id| is_acceptable(id.as_bytes()))
        .cloned()
        .or_else(|| HeaderValue::from_str(&random_id()).ok());
    if let Some(id) = &id {
        request.extensions_mut().insert(RequestId(id.clone()));
    }
    let mut response = next.run(request).await;
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

fn is_acceptable(id: &[u8]) -> bool {
    (1..=MAX_ID_BYTES).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
}
