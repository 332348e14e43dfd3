//! What a request says that its answer must match, in OpenAI's words and in vLLM's.

use super::fields::{Json, Object};
use super::request_body::RequestBody;
use crate::grammar::Source;
use remoe_wire::ServiceError;
use serde::Deserialize;
use serde_json::Value;

/// A wish for an answer of some form, and the field that it was found in.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Structure {
    pub(super) source: Source,
    pub(super) field: String,
}

/// `response_format`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<Object<NamedSchema>>,
}

/// A schema under a name; `strict` changes nothing, answers always obey.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct NamedSchema {
    schema: Option<Json>,
}

/// vLLM's `structured_outputs`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StructuredOutputs {
    json: Option<Json>,
    json_object: Option<bool>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
    disable_any_whitespace: Option<bool>,
    disable_additional_properties: Option<bool>,
    whitespace_pattern: Option<String>,
    structural_tag: Option<Json>,
}

/// What `body` asks for, if anything.
///
/// # Errors
/// It asks for two things at once, or for something that is not supported, by name.
pub(super) fn take(body: &mut RequestBody) -> Result<Option<Structure>, ServiceError> {
    let mut found = Found(None);
    if let Some(Object(format)) = body.response_format.take() {
        found.response_format(format)?;
    }
    if let Some(Object(outputs)) = body.structured_outputs.take() {
        found.structured_outputs(outputs)?;
    }
    if let Some(Json(schema)) = body.guided_json.take() {
        found.add("guided_json", Source::json(Some(written_out("guided_json", schema)?), true))?;
    }
    if let Some(regex) = body.guided_regex.take() {
        found.add("guided_regex", Source::regex(&regex))?;
    }
    if let Some(choice) = body.guided_choice.take() {
        found.add("guided_choice", Source::choice(choice))?;
    }
    if let Some(grammar) = body.guided_grammar.take() {
        found.add("guided_grammar", Source::lark(grammar))?;
    }
    Ok(found.0)
}

struct Found(Option<Structure>);

impl Found {
    fn add(&mut self, field: &str, source: Result<Source, String>) -> Result<(), ServiceError> {
        let source =
            source.map_err(|message| ServiceError::invalid(field, format!("`{field}`: {message}")))?;
        if let Some(first) = &self.0 {
            let message = format!("cannot combine `{field}` with `{}`", first.field);
            return Err(ServiceError::invalid(field, message));
        }
        self.0 = Some(Structure { source, field: field.to_owned() });
        Ok(())
    }

    fn response_format(&mut self, format: ResponseFormat) -> Result<(), ServiceError> {
        const SCHEMA: &str = "response_format.json_schema.schema";
        match format.kind.as_str() {
            "text" => Ok(()),
            "json_object" => self.add("response_format", Source::json(None, true)),
            "json_schema" => {
                let schema = format.json_schema.and_then(|Object(named)| named.schema);
                let Some(Json(schema)) = schema else {
                    return Err(ServiceError::invalid(SCHEMA, format!("missing `{SCHEMA}`")));
                };
                self.add(SCHEMA, Source::json(Some(schema), true))
            }
            other => Err(ServiceError::invalid(
                "response_format.type",
                format!(
                    "invalid `response_format.type`: expected text, json_object or json_schema, got {other:?}"
                ),
            )),
        }
    }

    fn structured_outputs(&mut self, outputs: StructuredOutputs) -> Result<(), ServiceError> {
        for (name, is_given) in [
            ("disable_additional_properties", outputs.disable_additional_properties == Some(true)),
            ("whitespace_pattern", outputs.whitespace_pattern.is_some()),
            ("structural_tag", outputs.structural_tag.is_some()),
        ] {
            if is_given {
                let field = format!("structured_outputs.{name}");
                let message = format!("`{field}` is not supported");
                return Err(ServiceError::invalid(field, message));
            }
        }
        let spaces = outputs.disable_any_whitespace != Some(true);
        if let Some(Json(schema)) = outputs.json {
            const FIELD: &str = "structured_outputs.json";
            self.add(FIELD, Source::json(Some(written_out(FIELD, schema)?), spaces))?;
        }
        if outputs.json_object == Some(true) {
            self.add("structured_outputs.json_object", Source::json(None, spaces))?;
        }
        if let Some(regex) = outputs.regex {
            self.add("structured_outputs.regex", Source::regex(&regex))?;
        }
        if let Some(choice) = outputs.choice {
            self.add("structured_outputs.choice", Source::choice(choice))?;
        }
        if let Some(grammar) = outputs.grammar {
            self.add("structured_outputs.grammar", Source::lark(grammar))?;
        }
        Ok(())
    }
}

/// A schema that may be sent as the text of one.
fn written_out(field: &str, schema: Value) -> Result<Value, ServiceError> {
    match schema {
        Value::String(text) => serde_json::from_str(&text).map_err(|error| {
            ServiceError::invalid(field, format!("invalid `{field}`: expected JSON: {error}"))
        }),
        schema => Ok(schema),
    }
}
