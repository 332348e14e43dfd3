//! `/v1/responses/{id}`: a stored response, read and removed.

use super::ID;
use crate::caller::Caller;
use crate::gateway::Gateway;
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
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let stored = gateway.options().responses.get(&id, caller.tenant_name()).ok_or_else(|| not_found(&id))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], stored.response.to_string()).into_response())
}

pub(crate) async fn delete(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    if !gateway.options().responses.remove(&id, caller.tenant_name()) {
        return Err(not_found(&id));
    }
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})).into_response())
}

fn not_found(id: &str) -> ApiError {
    let id: String = id.chars().take(ID).collect();
    let message = format!("response {id:?} not found");
    ApiError::new(StatusCode::NOT_FOUND, "response_not_found", message).about("response_id")
}
