//! Who asks: the tenant of the key, or the address where there are no keys.

use crate::gateway::Gateway;
use crate::keys::Tenant;
use axum::extract::{ConnectInfo, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use remoe_http::{ApiError, bearer};
use remoe_wire::{ErrorCode, ServiceError};
use std::net::SocketAddr;
use std::sync::Arc;

/// Who asks.
#[derive(Clone)]
pub(crate) struct Caller {
    pub(crate) tenant: Option<Arc<Tenant>>,
    /// Whose turns it takes where requests wait.
    pub(crate) client: Arc<str>,
}

/// Lets requests with a key pass, all where there are none, and all that ask for health.
pub(crate) async fn identify(
    State(gateway): State<Arc<Gateway>>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let keys = &gateway.options().keys;
    let presented = bearer(request.headers());
    let tenant = presented.and_then(|presented| keys.tenant(presented)).cloned();
    if tenant.is_none() && !keys.is_empty() && request.uri().path() != "/health" {
        let message = match presented {
            None => "this server needs a key: `Authorization: Bearer KEY`",
            Some(_) => "the key is wrong",
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
    request.extensions_mut().insert(Caller { tenant, client });
    Ok(next.run(request).await)
}
