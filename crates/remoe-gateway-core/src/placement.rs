//! `/v1/placement`: what the main function of a model says of its placement, and whether the model is awake. It
//! wakes nothing.

use crate::body_budget::Holder;
use crate::caller::Caller;
use crate::cost_accounting::Billing;
use crate::function_page::fetch;
use crate::gateway::Gateway;
use crate::listing::cost;
use crate::model::ApartGroup;
use axum::extract::State;
use axum::http::Uri;
use axum::{Extension, Json};
use remoe_http::{ApiError, query};
use remoe_proto::parse_listing;
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
        let holder = Holder::answer(&caller.client, &model.name().into());
        let page = fetch(&gateway, holder, &backend, "/v1/placement").await;
        let page = page.filter(|page| elements(&page.text) <= MOST_ELEMENTS);
        answer = page.and_then(|page| serde_json::from_str(&page.text).ok());
        if answer.is_some() {
            break;
        }
    }
    let mut answer = answer.unwrap_or_else(nothing);
    if let Some(Value::Array(groups)) = answer.get_mut("groups") {
        name_called(groups, &model.billings());
        list_others(groups, &model.groups());
    }
    answer.insert("model".to_owned(), model.name().into());
    answer.insert("state".to_owned(), json!(model.phase()));
    answer.insert("sleep".to_owned(), json!(model.sleep_view()));
    answer.insert("cost".to_owned(), json!(cost(&gateway, model.name(), &caller)));
    Ok(Json(answer))
}

/// Elements of a placement in JSON: each takes up to 100 bytes in memory, whatever it takes in text. One of 8,192
/// functions in 1,024 groups has a tenth of them.
const MOST_ELEMENTS: usize = 1 << 18;

/// Returns at least the number of elements of `json`.
fn elements(json: &str) -> usize {
    json.bytes().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count()
}

/// Names each of `groups` by the tier that `billings` have for one of its addresses; null where they have none.
fn name_called(groups: &mut [Value], billings: &[Arc<Billing>]) {
    let tier_of = |function: &Value| {
        let address = function["address"].as_str()?;
        billings.iter().find_map(|billing| billing.functions.get(address)).map(|(_, tier)| tier.clone())
    };
    for group in groups.iter_mut().filter_map(Value::as_object_mut) {
        let functions = group.get("functions").and_then(Value::as_array);
        let name = functions.and_then(|functions| functions.iter().find_map(tier_of));
        group.insert("name".to_owned(), json!(name));
    }
}

/// Says of each of `groups` whether it sleeps, and lists with them those of `others` that the main function does not
/// call: they sleep, or are being started. What it still calls is awake until it does no more.
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
    groups.extend(others.iter().filter(|other| !is_called(other)).map(|ApartGroup { name, experts, asleep }| {
        json!({"name": name, "experts": experts, "asleep": asleep, "starting": !asleep, "replicas": 0, "address": null,
            "busy": 0.0, "functions": []})
    }));
}

/// Layers and experts of a listing.
fn pairs(listing: &str) -> impl Iterator<Item = (u32, u32)> {
    let sets = parse_listing(listing).unwrap_or_default();
    sets.into_iter().flat_map(|set| set.experts.into_iter().map(move |expert| (set.layer, expert)))
}

/// Returns the placement of a model of which nothing runs.
fn nothing() -> Map<String, Value> {
    let fields =
        ["generation", "plan", "expected", "measured", "main", "card"].map(|name| (name, Value::Null));
    let lists = ["groups", "experts", "rivals"].map(|name| (name, json!([])));
    fields.into_iter().chain(lists).map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn called_groups_have_the_names_of_their_tiers() {
        let functions = [("main", "main"), ("10.0.0.1:9001", "group-1"), ("10.0.0.2:9001", "layer-3")];
        let functions = functions.map(|(name, tier)| (name.to_owned(), ("uid".to_owned(), tier.to_owned())));
        let billing = Arc::new(Billing { functions: functions.into(), ..Billing::default() });
        let group = |addresses: &[&str]| {
            let functions = addresses.iter().map(|address| json!({"address": address}));
            json!({"functions": functions.collect::<Vec<_>>()})
        };
        // The first address is of a function that has ended meanwhile.
        let mut groups = [
            group(&["10.0.0.9:9001", "10.0.0.1:9001"]),
            group(&["10.0.0.2:9001"]),
            group(&["10.0.0.3:9001"]),
        ];
        name_called(&mut groups, &[Arc::default(), billing]);
        let names = groups.map(|group| group["name"].clone());
        assert_eq!(names, [json!("group-1"), json!("layer-3"), Value::Null]);
    }
}
