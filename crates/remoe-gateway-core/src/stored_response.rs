//! `/v1/responses/{id}`: reads and removes a stored response.

use crate::caller::Caller;
use crate::gateway::Gateway;
use crate::responses::MAX_ID_BYTES;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use remoe_http::ApiError;
use serde_json::json;
use std::sync::Arc;

/// Returns a stored response of the caller's tenant.
pub(crate) async fn get(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let id = id_of_path(id);
    let stored = gateway.options().responses.get(&id, caller.tenant_name()).ok_or_else(|| not_found(&id))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], Body::from(stored.response)).into_response())
}

/// Removes a stored response of the caller's tenant.
pub(crate) async fn delete(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let id = id_of_path(id);
    if !gateway.options().responses.remove(&id, caller.tenant_name()) {
        return Err(not_found(&id));
    }
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})).into_response())
}

/// Returns the id in a path. An id that is no UTF-8 matches no response.
fn id_of_path(id: Result<Path<String>, PathRejection>) -> String {
    id.map_or_else(|_| char::REPLACEMENT_CHARACTER.to_string(), |Path(id)| id)
}

fn not_found(id: &str) -> ApiError {
    let id: String = id.chars().take(MAX_ID_BYTES).collect();
    let message = format!("response {id:?} not found");
    ApiError::new(StatusCode::NOT_FOUND, "response_not_found", message).about("response_id")
}
