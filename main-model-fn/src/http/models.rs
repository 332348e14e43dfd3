//! `/v1/models`: the served model.

use super::state::HttpState;
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use remoe_http::ApiError;
use serde::Serialize;
use std::sync::Arc;

#[derive(Serialize)]
pub(super) struct ModelList {
    object: &'static str,
    data: Vec<ModelObject>,
}

#[derive(Serialize)]
pub(super) struct ModelObject {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    max_model_len: usize,
}

pub(super) async fn list(State(state): State<Arc<HttpState>>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: vec![describe(&state)] })
}

pub(super) async fn one(
    State(state): State<Arc<HttpState>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelObject>, ApiError> {
    // A path that is not UTF-8 names no model.
    let Path(id) = id.unwrap_or_else(|_| Path(char::REPLACEMENT_CHARACTER.to_string()));
    state.check_model(Some(&id))?;
    Ok(Json(describe(&state)))
}

fn describe(state: &HttpState) -> ModelObject {
    ModelObject {
        id: state.options.model.clone(),
        object: "model",
        created: state.created,
        owned_by: "remoe",
        max_model_len: state.engine.limits().context_length,
    }
}
