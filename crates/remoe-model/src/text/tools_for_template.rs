//! Defaults for optional fields of a request's tools, which chat templates expect to be present.

use serde_json::{Map, Value, json};

/// Returns tools with a description and parameters, which OpenAI's requests may leave out but many templates require.
///
/// A missing description becomes an empty text, missing parameters become the schema of a function without any. All other
/// fields, `strict` too, are unchanged.
#[must_use]
pub fn tools_for_template(tools: &[Value]) -> Vec<Value> {
    tools.iter().map(with_defaults).collect()
}

fn with_defaults(tool: &Value) -> Value {
    let mut tool = tool.clone();
    if let Some(function) = tool.get_mut("function").and_then(Value::as_object_mut) {
        insert_if_missing(function, "description", || json!(""));
        insert_if_missing(function, "parameters", || json!({"type": "object", "properties": {}}));
        if let Some(parameters) = function.get_mut("parameters").and_then(Value::as_object_mut)
            && parameters.get("type").is_none_or(|kind| kind == "object")
        {
            insert_if_missing(parameters, "type", || json!("object"));
            insert_if_missing(parameters, "properties", || json!({}));
        }
    }
    tool
}

fn insert_if_missing(object: &mut Map<String, Value>, name: &str, default: impl FnOnce() -> Value) {
    if object.get(name).is_none_or(Value::is_null) {
        object.insert(name.to_owned(), default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_fields_are_filled() {
        let tools = [json!({"type": "function", "function": {"name": "now", "strict": true}})];
        let expected = json!({"type": "function", "function": {
            "name": "now", "strict": true, "description": "", "parameters": {"type": "object", "properties": {}},
        }});
        assert_eq!(tools_for_template(&tools), [expected]);
    }

    #[test]
    fn null_fields_are_filled() {
        let tools = [json!({"function": {"name": "now", "description": null, "parameters": {}}})];
        let expected = json!({"function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}});
        assert_eq!(tools_for_template(&tools), [expected]);
    }

    #[test]
    fn present_fields_are_unchanged() {
        let tools = [
            json!({"type": "function", "function": {
                "name": "add", "description": "Adds.",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            }}),
            json!({"type": "custom", "name": "other"}),
        ];
        assert_eq!(tools_for_template(&tools), tools);
    }
}
