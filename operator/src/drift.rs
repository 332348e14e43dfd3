//! Comparison of an object in the cluster with its desired state.

use serde::Serialize;
use serde_json::Value;

/// Maps that are replaced as a whole: one more entry in a selector selects something else.
const WHOLE: [&str; 5] = ["selector", "matchLabels", "podSelector", "namespaceSelector", "generations"];

/// Reports if `live` has every field of `wanted` with the same value. It may have more, where the API server fills in
/// defaults and others add labels; lists and selectors must be equal.
pub(crate) fn covers(live: &Value, wanted: &Value) -> bool {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => wanted.iter().all(|(key, wanted)| {
            let Some(live) = live.get(key) else { return is_empty(wanted) };
            let whole = WHOLE.contains(&key.as_str());
            covers(live, wanted) && (!whole || covers(wanted, live))
        }),
        (Value::Array(live), Value::Array(wanted)) => {
            live.len() == wanted.len() && live.iter().zip(wanted).all(|(live, wanted)| covers(live, wanted))
        }
        (live, wanted) => live == wanted,
    }
}

/// Reports if `live` still has every field of `wanted` with the same value.
pub(crate) fn is_as<K: Serialize>(live: &K, wanted: &K) -> bool {
    let (live, wanted) = (serde_json::to_value(live), serde_json::to_value(wanted));
    matches!((live, wanted), (Ok(live), Ok(wanted)) if covers(&live, &wanted))
}

/// Reports if the API server leaves the value out.
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
    use super::covers;
    use serde_json::json;

    #[test]
    fn defaults_are_no_drift_but_other_values_are() {
        let wanted = json!({"spec": {"ports": [{"port": 1}], "selector": {"a": "b"}}});
        let with = |spec: serde_json::Value| json!({"spec": spec, "status": {}});
        assert!(covers(
            &with(json!({"ports": [{"port": 1, "protocol": "TCP"}], "selector": {"a": "b"}})),
            &wanted
        ));
        assert!(!covers(&with(json!({"ports": [{"port": 2}], "selector": {"a": "b"}})), &wanted));
        assert!(!covers(
            &with(json!({"ports": [{"port": 1}, {"port": 2}], "selector": {"a": "b"}})),
            &wanted
        ));
        assert!(!covers(&with(json!({"ports": [{"port": 1}], "selector": {"a": "b", "c": "d"}})), &wanted));
        assert!(!covers(&with(json!({"selector": {"a": "b"}})), &wanted));
    }
}
