//! Tools of a request with their optional fields filled, as templates expect them.

use serde_json::{Map, Value, json};

/// Returns tools with a description and parameters: OpenAI's requests may leave both out, many templates may not.
///
/// A missing description becomes an empty text, missing parameters those of a function without any. All else, `strict`
/// too, stays as it is given.
#[must_use]
pub fn tools_for_template(tools: &[Value]) -> Vec<Value> {
    tools.iter().map(filled).collect()
}

fn filled(tool: &Value) -> Value {
    let mut tool = tool.clone();
    if let Some(function) = tool.get_mut("function").and_then(Value::as_object_mut) {
        fill(function, "description", || json!(""));
        fill(function, "parameters", || json!({"type": "object", "properties": {}}));
        if let Some(parameters) = function.get_mut("parameters").and_then(Value::as_object_mut)
            && parameters.get("type").is_none_or(|kind| kind == "object")
        {
            fill(parameters, "type", || json!("object"));
            fill(parameters, "properties", || json!({}));
        }
    }
    tool
}

fn fill(object: &mut Map<String, Value>, name: &str, default: impl FnOnce() -> Value) {
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
    fn given_fields_stay_as_they_are() {
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
