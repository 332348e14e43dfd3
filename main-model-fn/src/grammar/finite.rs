//! Finds schemas that no finite value satisfies, because each value would contain another such value.

use super::schema::{step, unescaped};
use serde_json::{Map, Value};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Pointers to schemas of which at least one must have a finite value.
type OneOf = Vec<String>;

/// Returns the pointers of the schemas in `schema` that no finite value satisfies. `places` has the pointers of all schemas.
/// The library finds schemas that are unsatisfiable for other reasons.
pub(super) fn endless(schema: &Value, places: &HashSet<String>) -> BTreeSet<String> {
    let index: HashMap<&str, usize> = places.iter().map(String::as_str).zip(0..).collect();
    let needs: Vec<Vec<Vec<usize>>> = places
        .iter()
        .map(|place| {
            let object = schema.pointer(place).and_then(Value::as_object);
            let needs = object.map(|object| needs(object, place)).unwrap_or_default();
            let known =
                |one_of: OneOf| one_of.iter().filter_map(|pointer| index.get(&**pointer).copied()).collect();
            needs.into_iter().map(known).filter(|known: &Vec<usize>| !known.is_empty()).collect()
        })
        .collect();
    // Starts with schemas without needs, and repeats until nothing is added.
    let mut is_finite = vec![false; needs.len()];
    loop {
        let mut is_more = false;
        for (place, needs) in needs.iter().enumerate() {
            if !is_finite[place] && needs.iter().all(|one_of| one_of.iter().any(|&it| is_finite[it])) {
                (is_finite[place], is_more) = (true, true);
            }
        }
        if !is_more {
            break;
        }
    }
    places.iter().zip(is_finite).filter(|(_, is_finite)| !is_finite).map(|(place, _)| place.clone()).collect()
}

/// Returns the schemas that a finite value of `object`, at the pointer `place`, depends on.
fn needs(object: &Map<String, Value>, place: &str) -> Vec<OneOf> {
    let mut needs: Vec<OneOf> = Vec::new();
    if let Some(pointer) =
        object.get("$ref").and_then(Value::as_str).and_then(|reference| reference.strip_prefix('#'))
    {
        needs.push(vec![unescaped(pointer)]);
    }
    let list = |name: &str| -> OneOf {
        let options = object.get(name).and_then(Value::as_array).map_or(0, Vec::len);
        (0..options).map(|option| format!("{place}/{name}/{option}")).collect()
    };
    needs.extend(list("allOf").into_iter().map(|option| vec![option]));
    needs.extend([list("anyOf"), list("oneOf")].into_iter().filter(|options| !options.is_empty()));
    let types = match object.get("type") {
        Some(Value::Array(types)) => types.as_slice(),
        Some(one) => std::slice::from_ref(one),
        None => &[],
    };
    // All other values are finite, and most schemas allow one of several types.
    match types {
        [only] if only == "object" => properties(object, place, &mut needs),
        [only] if only == "array" => items(object, place, &mut needs),
        _ => (),
    }
    needs
}

fn properties(object: &Map<String, Value>, place: &str, needs: &mut Vec<OneOf>) {
    let named = |keyword: &str| object.get(keyword).and_then(Value::as_object);
    let properties = named("properties");
    let has_patterns = named("patternProperties").is_some_and(|patterns| !patterns.is_empty());
    let others = object.get("additionalProperties").map(|_| format!("{place}/additionalProperties"));
    let required = object.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let (mut known, mut is_other) = (HashSet::new(), false);
    for name in required.iter().filter_map(Value::as_str) {
        if properties.is_none_or(|properties| !properties.contains_key(name)) {
            is_other = true;
        } else if known.insert(name) {
            needs.push(vec![format!("{place}/properties/{}", step(name))]);
        }
    }
    // A name that matches no pattern.
    if let Some(others) = others.filter(|_| !has_patterns) {
        let least = object.get("minProperties").and_then(Value::as_u64).unwrap_or_default();
        if is_other || properties.is_none_or(Map::is_empty) && least > 0 {
            needs.push(vec![others]);
        }
    }
}

fn items(object: &Map<String, Value>, place: &str, needs: &mut Vec<OneOf>) {
    let least = object.get("minItems").and_then(Value::as_u64).unwrap_or_default();
    let list = |name: &str| object.get(name).and_then(Value::as_array).map(Vec::len);
    // Older drafts have the first items as a list in `items`.
    let (first, count, rest) = match list("items") {
        Some(count) => ("items", count, "additionalItems"),
        None => ("prefixItems", list("prefixItems").unwrap_or_default(), "items"),
    };
    needs.extend(
        (0..count)
            .take_while(|&item| (item as u64) < least)
            .map(|item| vec![format!("{place}/{first}/{item}")]),
    );
    if object.contains_key(rest) && least > count as u64 {
        needs.push(vec![format!("{place}/{rest}")]);
    }
}
