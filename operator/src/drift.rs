//! Comparison of an object in the cluster with its desired state.

use serde::Serialize;
use serde_json::Value;

/// Maps that are compared as a whole: an additional entry in a selector changes what it selects.
const WHOLE_MAPS: [&str; 5] = ["selector", "matchLabels", "podSelector", "namespaceSelector", "generations"];

/// Returns whether `live` has every field of `wanted` with the same value. It may have more fields, since the API
/// server adds defaults and others add labels; lists and selectors must be equal.
pub(crate) fn includes_all(live: &Value, wanted: &Value) -> bool {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => wanted.iter().all(|(key, wanted)| {
            let Some(live) = live.get(key) else { return is_empty(wanted) };
            let compared_whole = WHOLE_MAPS.contains(&key.as_str());
            includes_all(live, wanted) && (!compared_whole || includes_all(wanted, live))
        }),
        (Value::Array(live), Value::Array(wanted)) => {
            live.len() == wanted.len()
                && live.iter().zip(wanted).all(|(live, wanted)| includes_all(live, wanted))
        }
        (live, wanted) => live == wanted,
    }
}

/// Returns whether `live` still has every field of `wanted` with the same value.
pub(crate) fn is_up_to_date<K: Serialize>(live: &K, wanted: &K) -> bool {
    let (live, wanted) = (serde_json::to_value(live), serde_json::to_value(wanted));
    matches!((live, wanted), (Ok(live), Ok(wanted)) if includes_all(&live, &wanted))
}

/// Returns whether the API server drops the value.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::includes_all;
    use serde_json::json;

    #[test]
    fn defaults_are_no_drift_but_other_values_are() {
        let wanted = json!({"spec": {"ports": [{"port": 1}], "selector": {"a": "b"}}});
        let with = |spec: serde_json::Value| json!({"spec": spec, "status": {}});
        assert!(includes_all(
            &with(json!({"ports": [{"port": 1, "protocol": "TCP"}], "selector": {"a": "b"}})),
            &wanted
        ));
        assert!(!includes_all(&with(json!({"ports": [{"port": 2}], "selector": {"a": "b"}})), &wanted));
        assert!(!includes_all(
            &with(json!({"ports": [{"port": 1}, {"port": 2}], "selector": {"a": "b"}})),
            &wanted
        ));
        assert!(!includes_all(
            &with(json!({"ports": [{"port": 1}], "selector": {"a": "b", "c": "d"}})),
            &wanted
        ));
        assert!(!includes_all(&with(json!({"selector": {"a": "b"}})), &wanted));
    }
}
