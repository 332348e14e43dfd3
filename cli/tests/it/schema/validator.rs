//! The part of JSON schema (draft 2020-12) that `remoe schema` uses. A keyword that it does not know fails the test.

use serde_json::Value;

/// Reports if `value` is valid under `schema`, whose references lead into `root`.
pub(super) fn is_valid(root: &Value, schema: &Value, value: &Value) -> bool {
    let keywords = schema.as_object().unwrap_or_else(|| panic!("no schema: {schema}"));
    keywords.iter().all(|(keyword, stated)| keeps(root, schema, keyword, stated, value))
}

fn keeps(root: &Value, schema: &Value, keyword: &str, stated: &Value, value: &Value) -> bool {
    let valid = |schema: &Value, value: &Value| is_valid(root, schema, value);
    let all = |list: &Value| list.as_array().unwrap().clone();
    let bound = |keeps: fn(f64, f64) -> bool, figure: Option<f64>| {
        figure.is_none_or(|figure| keeps(figure, stated.as_f64().unwrap()))
    };
    let items = value.as_array().map(|items| items.len() as f64);
    let length = value.as_str().map(|text| text.chars().count() as f64);
    match keyword {
        "$schema" | "$defs" | "title" | "description" | "format" | "default" => true,
        "$ref" => valid(root.pointer(stated.as_str().unwrap().strip_prefix('#').unwrap()).unwrap(), value),
        "type" => match stated {
            Value::Array(types) => types.iter().any(|name| is_of_type(name, value)),
            name => is_of_type(name, value),
        },
        "enum" => all(stated).contains(value),
        "const" => stated == value,
        "anyOf" => all(stated).iter().any(|schema| valid(schema, value)),
        "oneOf" => all(stated).iter().filter(|schema| valid(schema, value)).count() == 1,
        "required" => value
            .as_object()
            .is_none_or(|fields| all(stated).iter().all(|name| fields.contains_key(name.as_str().unwrap()))),
        "properties" => value.as_object().is_none_or(|fields| {
            fields.iter().all(|(name, field)| stated.get(name).is_none_or(|schema| valid(schema, field)))
        }),
        "additionalProperties" => {
            let known = |name: &String| schema["properties"].get(name).is_some();
            value.as_object().is_none_or(|fields| match stated {
                Value::Bool(allowed) => {
                    assert!(!allowed, "{schema}");
                    fields.keys().all(known)
                }
                // A map from names to values of one kind.
                of_values => fields.iter().all(|(name, field)| known(name) || valid(of_values, field)),
            })
        }
        "items" => value.as_array().is_none_or(|items| items.iter().all(|item| valid(stated, item))),
        "minItems" => bound(|figure, bound| figure >= bound, items),
        "maxItems" => bound(|figure, bound| figure <= bound, items),
        "minLength" => bound(|figure, bound| figure >= bound, length),
        "maxLength" => bound(|figure, bound| figure <= bound, length),
        "minimum" => bound(|figure, bound| figure >= bound, value.as_f64()),
        "maximum" => bound(|figure, bound| figure <= bound, value.as_f64()),
        "exclusiveMinimum" => bound(|figure, bound| figure > bound, value.as_f64()),
        // The only pattern is that of decimal numbers.
        "pattern" => value.as_str().is_none_or(|text| text.parse::<f64>().is_ok()),
        other => panic!("unknown keyword {other}: {schema}"),
    }
}

fn is_of_type(name: &Value, value: &Value) -> bool {
    match name.as_str().unwrap() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        other => panic!("unknown type {other}"),
    }
}
