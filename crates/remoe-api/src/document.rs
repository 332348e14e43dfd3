//! Resources from documents, checked as an API server checks them: by the schema of the custom resource.

use crate::MoEDeployment;
use kube::{CustomResourceExt, Resource};
use serde_json::{Map, Value};
use thiserror::Error;

/// Longest quoted value in bytes.
const QUOTED_BYTES: usize = 80;

/// Invalid document of a resource. Fields are paths such as `spec.slo.tpot`.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidResource {
    /// A field that the schema does not have.
    #[error("{field}: unknown field; expected one of {}", known.join(", "))]
    Unknown {
        /// Path of the field.
        field: String,
        /// Fields that the schema has there.
        known: Vec<String>,
    },
    /// A required field that the document does not have.
    #[error("{field}: missing; add it")]
    Missing {
        /// Path of the field.
        field: String,
    },
    /// A value outside of the schema.
    #[error("{field}: invalid value '{value}': expected {expected}")]
    Value {
        /// Path of the field.
        field: String,
        /// The value, cut to what a report can show.
        value: String,
        /// Values that the schema takes.
        expected: String,
    },
    /// A value that fits the schema and cannot be read, such as a duration without a unit.
    #[error("{field}: {message}")]
    Unreadable {
        /// Path of the field.
        field: String,
        /// Reason, with the value.
        message: String,
    },
}

impl InvalidResource {
    /// Returns the path of the invalid field.
    pub fn field(&self) -> &str {
        match self {
            Self::Unknown { field, .. }
            | Self::Missing { field }
            | Self::Value { field, .. }
            | Self::Unreadable { field, .. } => field,
        }
    }

    fn value(field: &str, value: &Value, expected: impl Into<String>) -> Self {
        let mut shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let end = (0..=QUOTED_BYTES.min(shown.len())).rev().find(|end| shown.is_char_boundary(*end));
        shown.truncate(end.unwrap_or(0));
        Self::Value { field: field.to_owned(), value: shown, expected: expected.into() }
    }
}

impl MoEDeployment {
    /// Reads a resource from a document. As an API server does, this ignores `status` and takes null as absence, fills in
    /// defaults, and checks types, required fields, choices, numbers and lengths by the schema; other than it, this refuses
    /// unknown fields. Patterns and rules in CEL are left to the API server and to those who use the values.
    ///
    /// # Errors
    /// The first field that does not fit.
    pub fn from_document(mut document: Value) -> Result<Self, InvalidResource> {
        let schema = serde_json::to_value(Self::crd()).unwrap_or_default();
        let schema = schema.pointer("/spec/versions/0/schema/openAPIV3Schema/properties/spec");
        let schema = schema.unwrap_or(&Value::Null);
        let Some(fields) = document.as_object_mut() else {
            return Err(InvalidResource::value("", &document, "an object"));
        };
        fields.remove("status");
        for (field, expected) in [("apiVersion", Self::api_version(&())), ("kind", Self::kind(&()))] {
            let stated = fields.get(field).ok_or_else(|| missing("", field))?;
            if stated.as_str() != Some(&*expected) {
                return Err(InvalidResource::value(field, stated, expected));
            }
        }
        let name = fields.get("metadata").ok_or_else(|| missing("", "metadata"))?.get("name");
        let name = name.ok_or_else(|| missing("metadata", "name"))?;
        if name.as_str().is_none_or(str::is_empty) {
            return Err(InvalidResource::value("metadata.name", name, "a DNS label"));
        }
        let known = ["apiVersion", "kind", "metadata", "spec"];
        if let Some(name) = fields.keys().find(|name| !known.contains(&name.as_str())) {
            let known = known.map(str::to_owned).to_vec();
            return Err(InvalidResource::Unknown { field: name.clone(), known });
        }
        check("spec", fields.get_mut("spec").ok_or_else(|| missing("", "spec"))?, schema)?;
        serde_path_to_error::deserialize(document).map_err(|error| InvalidResource::Unreadable {
            field: error.path().to_string(),
            message: error.into_inner().to_string(),
        })
    }
}

fn missing(parent: &str, name: &str) -> InvalidResource {
    InvalidResource::Missing { field: below(parent, name) }
}

fn below(parent: &str, name: &str) -> String {
    if parent.is_empty() { name.to_owned() } else { format!("{parent}.{name}") }
}

/// Checks `value` of `field`, and removes fields that are null.
fn check(field: &str, value: &mut Value, schema: &Value) -> Result<(), InvalidResource> {
    if let Some(known) = schema["enum"].as_array().filter(|known| !known.contains(value)) {
        let known: Vec<&str> = known.iter().filter_map(Value::as_str).collect();
        return Err(InvalidResource::value(field, value, listed(&known)));
    }
    let kind = schema["type"].as_str().unwrap_or_default();
    let wrong = |value: &Value, expected: String| Err(InvalidResource::value(field, value, expected));
    match (kind, value) {
        ("object", Value::Object(fields)) => check_object(field, fields, schema),
        ("array", Value::Array(items)) => {
            if !within(items.len() as f64, schema, "minItems", "maxItems") {
                let value = Value::from(items.len());
                return wrong(&value, format!("{} items", range(schema, "minItems", "maxItems")));
            }
            let mut every = items.iter_mut().enumerate();
            every.try_for_each(|(index, item)| check(&format!("{field}[{index}]"), item, &schema["items"]))
        }
        ("string", value @ Value::String(_)) => {
            let length = value.as_str().map_or(0, |text| text.chars().count());
            match within(length as f64, schema, "minLength", "maxLength") {
                true => Ok(()),
                false => wrong(value, format!("{} characters", range(schema, "minLength", "maxLength"))),
            }
        }
        ("integer", value @ Value::Number(_)) if value.is_i64() || value.is_u64() => {
            check_number(field, value, schema)
        }
        ("number", value @ Value::Number(_)) => check_number(field, value, schema),
        ("boolean", Value::Bool(_)) => Ok(()),
        ("string", value @ (Value::Number(_) | Value::Bool(_))) => {
            let expected = format!("a string; write \"{value}\" in quotes");
            wrong(value, expected)
        }
        (kind, value) => {
            let article = if matches!(kind, "object" | "array" | "integer") { "an" } else { "a" };
            wrong(value, format!("{article} {kind}"))
        }
    }
}

fn check_object(field: &str, fields: &mut Map<String, Value>, schema: &Value) -> Result<(), InvalidResource> {
    if !within(fields.len() as f64, schema, "minProperties", "maxProperties") {
        let expected = format!("{} fields", range(schema, "minProperties", "maxProperties"));
        return Err(InvalidResource::value(field, &fields.len().into(), expected));
    }
    if schema["x-kubernetes-preserve-unknown-fields"] == true {
        return Ok(());
    }
    fields.retain(|_, value| !value.is_null());
    let properties = schema["properties"].as_object();
    for (name, value) in fields.iter_mut() {
        let path = below(field, name);
        let schema = match properties {
            Some(properties) => properties.get(name),
            None => schema.get("additionalProperties"),
        };
        let Some(schema) = schema else {
            let known = properties.into_iter().flat_map(Map::keys).cloned().collect();
            return Err(InvalidResource::Unknown { field: path, known });
        };
        check(&path, value, schema)?;
    }
    let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mut absent = required.filter(|name| !fields.contains_key(*name));
    absent.next().map_or(Ok(()), |name| Err(missing(field, name)))
}

fn check_number(field: &str, value: &Value, schema: &Value) -> Result<(), InvalidResource> {
    let number = value.as_f64().unwrap_or(f64::NAN);
    if !within(number, schema, "minimum", "maximum") {
        return Err(InvalidResource::value(field, value, range(schema, "minimum", "maximum")));
    }
    match schema["multipleOf"].as_f64().filter(|unit| number % unit != 0.0) {
        Some(unit) => Err(InvalidResource::value(field, value, format!("a multiple of {unit}"))),
        None => Ok(()),
    }
}

fn within(number: f64, schema: &Value, least: &str, most: &str) -> bool {
    schema[least].as_f64().is_none_or(|least| number >= least)
        && schema[most].as_f64().is_none_or(|most| number <= most)
}

fn range(schema: &Value, least: &str, most: &str) -> String {
    match (schema[least].as_f64(), schema[most].as_f64()) {
        (Some(least), Some(most)) => format!("{least} to {most}"),
        (Some(least), None) => format!("at least {least}"),
        (None, Some(most)) => format!("at most {most}"),
        (None, None) => "any number of".to_owned(),
    }
}

/// Returns names as `a, b or c`.
fn listed(names: &[&str]) -> String {
    match names {
        [names @ .., last] if !names.is_empty() => format!("{} or {last}", names.join(", ")),
        _ => names.concat(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{Device, MoEDeploymentSpec, PricingSpec, RemoteExpertsSpec, ScalingSpec, SloSpec};
    use serde_json::json;

    fn document(spec: Value) -> Value {
        let metadata = json!({"name": "demo"});
        json!({"apiVersion": "remoe.dev/v1alpha1", "kind": "MoEDeployment", "metadata": metadata, "spec": spec})
    }

    /// Document with `value` in place of the field at `pointer`.
    fn with(pointer: &str, value: Value) -> Value {
        let mut document = document(json!({"model": {"source": "hf://a/b"}}));
        let mut place = &mut document;
        for name in pointer.split('.') {
            place = &mut place[name];
        }
        *place = value;
        document
    }

    fn spec_of(document: Value) -> MoEDeploymentSpec {
        MoEDeployment::from_document(document).unwrap().spec
    }

    #[test]
    fn absent_and_null_fields_get_their_defaults() {
        let spec = spec_of(document(
            json!({"model": {"source": "hf://a/b"}, "slo": null, "main": {"device": null}}),
        ));
        assert_eq!((spec.slo, spec.main.device), (SloSpec::default(), Device::Cpu));
        assert_eq!((spec.scaling, spec.pricing), (ScalingSpec::default(), PricingSpec::default()));
        assert_eq!(spec.remote_experts, RemoteExpertsSpec::default());
    }

    #[test]
    fn free_fields_and_pod_templates_are_read() {
        let variables = json!({"enable_thinking": false, "mode": {"deep": [1, null]}});
        let spec = spec_of(with("spec.model.chatTemplateKwargs", variables.clone()));
        assert_eq!(spec.model.chat_template_kwargs.map(Value::Object), Some(variables));
        let tolerations = json!([{"key": "gpu", "operator": "Exists", "tolerationSeconds": 5}]);
        let spec = spec_of(with(
            "spec.main.template",
            json!({"tolerations": tolerations, "nodeSelector": {"a": "b"}}),
        ));
        assert_eq!(spec.main.template.tolerations[0].toleration_seconds, Some(5));
        assert_eq!(spec.main.template.node_selector["a"], "b");
        assert!(MoEDeployment::from_document(with("status", json!({"anything": 1}))).is_ok());
    }

    #[test]
    fn invalid_field_is_named_with_value_and_remedy() {
        for (pointer, value, says) in [
            (
                "apiVersion",
                json!("remoe.dev/v2"),
                "apiVersion: invalid value 'remoe.dev/v2': expected remoe.dev/v1alpha1",
            ),
            ("kind", json!("Pod"), "kind: invalid value 'Pod': expected MoEDeployment"),
            ("metadata", json!({}), "metadata.name: missing; add it"),
            ("metadata.name", json!(7), "metadata.name: invalid value '7'"),
            ("sepc", json!({}), "sepc: unknown field; expected one of apiVersion"),
            ("spec", json!({}), "spec.model: missing; add it"),
            ("spec.model", json!("hf://a/b"), "spec.model: invalid value 'hf://a/b': expected an object"),
            (
                "spec.model.dtype",
                json!("half"),
                "spec.model.dtype: invalid value 'half': expected bfloat16 or float32",
            ),
            ("spec.replcas", json!(2), "spec.replcas: unknown field; expected one of "),
            ("spec.replicas", json!(65), "spec.replicas: invalid value '65': expected 1 to 64"),
            ("spec.replicas", json!(1.5), "spec.replicas: invalid value '1.5': expected an integer"),
            ("spec.servedName", json!(""), "spec.servedName: invalid value '': expected 1 to 253 characters"),
            ("spec.pricing.cpuCoreHour", json!(0.03), "expected a string; write \"0.03\" in quotes"),
            (
                "spec.main.memoryMB",
                json!({"min": 250, "max": 500}),
                "spec.main.memoryMB.min: invalid value '250': expected a multiple of 100",
            ),
            (
                "spec.main.template.nodeSelector",
                json!({"a": 1}),
                "spec.main.template.nodeSelector.a: invalid value '1'",
            ),
            (
                "spec.main.template.tolerations",
                json!([{"kye": "a"}]),
                "spec.main.template.tolerations[0].kye: unknown field",
            ),
            (
                "spec.main.template.tolerations",
                json!(vec![json!({}); 65]),
                "invalid value '65': expected at most 64 items",
            ),
            ("spec.slo.tpot", json!("soon"), "spec.slo.tpot: invalid duration \"soon\""),
        ] {
            let error = MoEDeployment::from_document(with(pointer, value)).unwrap_err();
            assert!(error.to_string().contains(says), "{says}: {error}");
            assert!(error.to_string().starts_with(error.field()), "{error}");
        }
        let long = MoEDeployment::from_document(with("spec.mode", json!("\u{e4}".repeat(1000)))).unwrap_err();
        assert!(long.to_string().len() < 200, "{long}");
    }

    /// A keyword that nothing here knows would be one that is not checked.
    #[test]
    fn keywords_of_the_schema_are_known() {
        const CHECKED: [&str; 14] = [
            "additionalProperties",
            "enum",
            "items",
            "maxItems",
            "maxLength",
            "maxProperties",
            "maximum",
            "minLength",
            "minimum",
            "multipleOf",
            "properties",
            "required",
            "type",
            "x-kubernetes-preserve-unknown-fields",
        ];
        const LEFT: [&str; 8] = [
            "default",
            "description",
            "format",
            "nullable",
            "pattern",
            "x-kubernetes-list-map-keys",
            "x-kubernetes-list-type",
            "x-kubernetes-validations",
        ];
        fn walk(schema: &Value) {
            for (keyword, value) in schema.as_object().unwrap() {
                let name = keyword.as_str();
                assert!(CHECKED.contains(&name) || LEFT.contains(&name), "{name}");
                match name {
                    "properties" => value.as_object().unwrap().values().for_each(walk),
                    "items" | "additionalProperties" => walk(value),
                    _ => {}
                }
            }
        }
        let schema = serde_json::to_value(MoEDeployment::crd()).unwrap();
        walk(&schema["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]);
    }
}
