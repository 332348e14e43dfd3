//! `/v1/responses/{id}`: a stored response, read and removed.

use crate::caller::Caller;
use crate::gateway::Gateway;
use crate::responses::ID;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use remoe_http::ApiError;
use serde_json::json;
use std::sync::Arc;

pub(crate) async fn get(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let id = text(id);
    let stored = gateway.options().responses.get(&id, caller.tenant_name()).ok_or_else(|| not_found(&id))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], Body::from(stored.response)).into_response())
}

pub(crate) async fn delete(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let id = text(id);
    if !gateway.options().responses.remove(&id, caller.tenant_name()) {
        return Err(not_found(&id));
    }
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})).into_response())
}

/// Returns the id of a path; one that is no text names no response.
fn text(id: Result<Path<String>, PathRejection>) -> String {
    id.map_or_else(|_| char::REPLACEMENT_CHARACTER.to_string(), |Path(id)| id)
}

fn not_found(id: &str) -> ApiError {
    let id: String = id.chars().take(ID).collect();
    let message = format!("response {id:?} not found");
    ApiError::new(StatusCode::NOT_FOUND, "response_not_found", message).about("response_id")
}
