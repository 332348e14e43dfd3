//! `/v1/placement`: what the main function of a model says of its placement, and whether the model is awake. It
//! wakes nothing.

use crate::caller::Caller;
use crate::federation::page;
use crate::gateway::Gateway;
use axum::extract::State;
use axum::http::Uri;
use axum::{Extension, Json};
use remoe_http::{ApiError, query};
use serde_json::{Map, Value, json};
use std::sync::Arc;

pub(crate) async fn handle(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Result<Json<Map<String, Value>>, ApiError> {
    let model = gateway.model(query(&uri, "model").as_deref(), &caller)?;
    let mut answer = None;
    for backend in model.backends() {
        let text = page(gateway.upstream(), &backend, "/v1/placement").await;
        answer = text.and_then(|text| serde_json::from_str(&text).ok());
        if answer.is_some() {
            break;
        }
    }
    let mut answer = answer.unwrap_or_else(nothing);
    answer.insert("model".to_owned(), model.name().into());
    answer.insert("state".to_owned(), json!(model.phase()));
    Ok(Json(answer))
}

/// Of a model of which nothing runs.
fn nothing() -> Map<String, Value> {
    let fields =
        ["generation", "plan", "expected", "measured", "main", "card"].map(|name| (name, Value::Null));
    let lists = ["groups", "experts", "rivals"].map(|name| (name, json!([])));
    fields.into_iter().chain(lists).map(|(name, value)| (name.to_owned(), value)).collect()
}
