//! `/v1/placement`: the placement of a model as its main function reports it, with the model's phase and cost. It
//! never wakes the model.

use crate::body_budget::BudgetHolder;
use crate::caller::Caller;
use crate::cost_accounting::Billing;
use crate::function_page::fetch;
use crate::gateway::Gateway;
use crate::listing::cost;
use crate::model::InactiveGroup;
use axum::extract::State;
use axum::http::Uri;
use axum::{Extension, Json};
use remoe_http::{ApiError, query_parameter};
use remoe_proto::parse_listing;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Returns the placement of a model.
pub(crate) async fn handle(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Result<Json<Map<String, Value>>, ApiError> {
    let model = gateway.model(query_parameter(&uri, "model").as_deref(), &caller)?;
    let mut answer = None;
    for backend in model.backends() {
        let holder = BudgetHolder::answer(&caller.client, &model.name().into());
        let page = fetch(&gateway, holder, &backend, "/v1/placement").await;
        let page = page.filter(|page| max_element_count(&page.text) <= MAX_ELEMENTS);
        answer = page.and_then(|page| serde_json::from_str(&page.text).ok());
        if answer.is_some() {
            break;
        }
    }
    let mut answer = answer.unwrap_or_else(empty_placement);
    if let Some(Value::Array(groups)) = answer.get_mut("groups") {
        add_names(groups, &model.billings());
        add_inactive_groups(groups, &model.inactive_groups());
    }
    answer.insert("model".to_owned(), model.name().into());
    answer.insert("state".to_owned(), json!(model.phase()));
    answer.insert("sleep".to_owned(), json!(model.sleep_view()));
    answer.insert("cost".to_owned(), json!(cost(&gateway, model.name(), &caller)));
    Ok(Json(answer))
}

/// Largest number of JSON elements of a placement: each takes up to 100 bytes in memory. A placement of 8,192
/// functions in 1,024 groups has a tenth of them.
const MAX_ELEMENTS: usize = 1 << 18;

/// Returns an upper bound of the number of elements of `json`.
fn max_element_count(json: &str) -> usize {
    json.bytes().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count()
}

/// Adds a `name` to each of `groups`: the tier that `billings` have for one of its addresses, or null.
fn add_names(groups: &mut [Value], billings: &[Arc<Billing>]) {
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

/// Marks `groups`, which the main function calls, as awake, and appends the `inactive` groups that it does not call.
/// A group in both lists is awake until the main function stops calling it.
fn add_inactive_groups(groups: &mut Vec<Value>, inactive: &[InactiveGroup]) {
    let called_pairs: BTreeSet<(u32, u32)> =
        groups.iter().filter_map(|group| group["experts"].as_str()).flat_map(pairs).collect();
    for group in groups.iter_mut().filter_map(Value::as_object_mut) {
        group.insert("asleep".to_owned(), false.into());
        group.insert("starting".to_owned(), false.into());
    }
    // A group with too many experts to be listed has an empty list here, and counts as not called.
    let is_called = |group: &InactiveGroup| {
        let mut group_pairs = pairs(&group.experts).peekable();
        group_pairs.peek().is_some() && group_pairs.all(|pair| called_pairs.contains(&pair))
    };
    groups.extend(inactive.iter().filter(|group| !is_called(group)).map(|InactiveGroup { name, experts, asleep }| {
        json!({"name": name, "experts": experts, "asleep": asleep, "starting": !asleep, "replicas": 0, "address": null,
            "busy": 0.0, "functions": []})
    }));
}

/// Returns the (layer, expert) pairs of a listing `LAYER:FIRST-LAST,..`.
fn pairs(listing: &str) -> impl Iterator<Item = (u32, u32)> {
    let sets = parse_listing(listing).unwrap_or_default();
    sets.into_iter().flat_map(|set| set.experts.into_iter().map(move |expert| (set.layer, expert)))
}

/// Returns the placement of a model that is asleep.
fn empty_placement() -> Map<String, Value> {
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
        add_names(&mut groups, &[Arc::default(), billing]);
        let names = groups.map(|group| group["name"].clone());
        assert_eq!(names, [json!("group-1"), json!("layer-3"), Value::Null]);
    }
}
