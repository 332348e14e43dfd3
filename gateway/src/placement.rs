//! `/v1/placement`: what the main function of a model says of its placement, and whether the model is awake. It
//! wakes nothing.

use crate::caller::Caller;
use crate::federation::page;
use crate::gateway::Gateway;
use crate::model::ApartGroup;
use axum::extract::State;
use axum::http::Uri;
use axum::{Extension, Json};
use remoe_http::{ApiError, query};
use remoe_wire::parse_listing;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
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
    if let Some(Value::Array(groups)) = answer.get_mut("groups") {
        list_others(groups, &model.groups());
    }
    answer.insert("model".to_owned(), model.name().into());
    answer.insert("state".to_owned(), json!(model.phase()));
    Ok(Json(answer))
}

/// Says of each of `groups` whether it sleeps, and lists with them those of `others` that the main function does not call: they
/// sleep, or are being started. What it still calls is awake until it does no more.
fn list_others(groups: &mut Vec<Value>, others: &[ApartGroup]) {
    let called: BTreeSet<(u32, u32)> =
        groups.iter().filter_map(|group| group["experts"].as_str()).flat_map(pairs).collect();
    for group in groups.iter_mut().filter_map(Value::as_object_mut) {
        group.insert("asleep".to_owned(), false.into());
        group.insert("starting".to_owned(), false.into());
    }
    // One whose experts were too many to be listed has none here.
    let is_called = |other: &ApartGroup| {
        let mut its = pairs(&other.experts).peekable();
        its.peek().is_some() && its.all(|pair| called.contains(&pair))
    };
    groups.extend(others.iter().filter(|other| !is_called(other)).map(|ApartGroup { experts, asleep }| {
        json!({"experts": experts, "asleep": asleep, "starting": !asleep, "replicas": 0, "address": null,
            "busy": 0.0, "functions": []})
    }));
}

/// Layers and experts of a listing.
fn pairs(listing: &str) -> impl Iterator<Item = (u32, u32)> {
    let sets = parse_listing(listing).unwrap_or_default();
    sets.into_iter().flat_map(|set| set.experts.into_iter().map(move |expert| (set.layer, expert)))
}

/// Of a model of which nothing runs.
fn nothing() -> Map<String, Value> {
    let fields =
        ["generation", "plan", "expected", "measured", "main", "card"].map(|name| (name, Value::Null));
    let lists = ["groups", "experts", "rivals"].map(|name| (name, json!([])));
    fields.into_iter().chain(lists).map(|(name, value)| (name.to_owned(), value)).collect()
}
