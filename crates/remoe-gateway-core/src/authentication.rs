//! Authentication: identifies the caller of a request by its API key, or by its address if the gateway has no keys.

use crate::access_log::RequestFacts;
use crate::caller::Caller;
use crate::gateway::Gateway;
use axum::extract::{ConnectInfo, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use remoe_http::{ApiError, presented_key};
use remoe_proto::{ErrorCode, ServiceError};
use std::net::SocketAddr;
use std::sync::Arc;

/// Identifies the caller of a request by its key. If the gateway has no keys, all requests pass. `/health` and the
/// static files of the page need no key.
///
/// # Errors
/// The key is missing or invalid.
pub(crate) async fn identify(
    State(gateway): State<Arc<Gateway>>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let keys = gateway.keys();
    let presented = presented_key(request.headers());
    let tenant = presented.and_then(|presented| keys.tenant(presented)).cloned();
    if tenant.is_none() && !keys.is_empty() && !needs_no_key(request.uri().path()) {
        let message = match presented {
            None => "missing API key; send `Authorization: Bearer KEY`",
            Some(_) => "invalid API key",
        };
        return Err(ServiceError::new(ErrorCode::Unauthenticated, message).into());
    }
    let client = match &tenant {
        Some(tenant) => tenant.name().clone(),
        None => {
            let address = request.extensions().get::<ConnectInfo<SocketAddr>>();
            address.map_or_else(String::new, |address| address.ip().to_string()).into()
        }
    };
    let caller = Caller { tenant, client };
    if let Some(facts) = request.extensions().get::<Arc<RequestFacts>>() {
        // Set once: a request has one caller.
        let _already_set = facts.caller.set(caller.clone());
    }
    request.extensions_mut().insert(caller);
    Ok(next.run(request).await)
}

/// Reports if `path` can be requested without a key.
fn needs_no_key(path: &str) -> bool {
    matches!(path, "/" | "/health") || path.starts_with("/page/")
}
