//! Structure that a request demands of its answer, in OpenAI's fields and in vLLM's.

use super::fields::{Json, Object};
use super::request_body::RequestBody;
use crate::grammar::{Source, Whitespace};
use remoe_proto::ServiceError;
use serde::Deserialize;
use serde_json::Value;

/// Demanded structure, and the field that demands it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Structure {
    pub(super) source: Source,
    pub(super) field: String,
    /// Sentences about parts of the request that the answer need not match.
    pub(super) warnings: Vec<String>,
}

/// Field `response_format`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<Object<NamedSchema>>,
}

/// A named schema. `strict` has no effect, because answers always match.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct NamedSchema {
    schema: Option<Json>,
}

/// vLLM's field `structured_outputs`.
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

/// Takes the structure that `body` demands, if any.
///
/// # Errors
/// Fails if two fields demand a structure, or if one is unsupported.
pub(super) fn take(body: &mut RequestBody) -> Result<Option<Structure>, ServiceError> {
    let whitespace = whitespace(body)?;
    let mut found = StructureFields { structure: None, whitespace };
    if let Some(Object(format)) = body.response_format.take() {
        found.response_format(format)?;
    }
    if let Some(Object(outputs)) = body.structured_outputs.take() {
        found.structured_outputs(outputs)?;
    }
    if let Some(Json(schema)) = body.guided_json.take() {
        found.json("guided_json", Some(parse_schema_text("guided_json", schema)?))?;
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
    Ok(found.structure)
}

/// Reads the white space between parts of JSON, for answers and for arguments of functions.
///
/// # Errors
/// Fails if the pattern is invalid or combined with another option.
pub(super) fn whitespace(body: &RequestBody) -> Result<Whitespace, ServiceError> {
    let outputs = body.structured_outputs.as_ref().map(|Object(outputs)| outputs);
    let is_compact = outputs.is_some_and(|outputs| outputs.disable_any_whitespace == Some(true));
    let patterns = [
        (
            "structured_outputs.whitespace_pattern",
            outputs.and_then(|outputs| outputs.whitespace_pattern.as_deref()),
        ),
        ("guided_whitespace_pattern", body.guided_whitespace_pattern.as_deref()),
    ];
    let mut given = patterns.into_iter().filter_map(|(field, pattern)| Some((field, pattern?)));
    match (given.next(), given.next().is_some() || is_compact) {
        (None, true) => Ok(Whitespace::Compact),
        (None, false) => Ok(Whitespace::default()),
        (Some((field, _)), true) => {
            let message = format!("cannot combine `{field}` with another option of white space");
            Err(ServiceError::invalid(field, message))
        }
        (Some((field, pattern)), false) => Whitespace::pattern(pattern)
            .map_err(|message| ServiceError::invalid(field, format!("invalid `{field}`: {message}"))),
    }
}

/// Structure found so far.
struct StructureFields {
    structure: Option<Structure>,
    whitespace: Whitespace,
}

impl StructureFields {
    fn add(&mut self, field: &str, source: Result<Source, String>) -> Result<(), ServiceError> {
        let source =
            source.map_err(|message| ServiceError::invalid(field, format!("`{field}`: {message}")))?;
        if let Some(first) = &self.structure {
            let message = format!("cannot combine `{field}` with `{}`", first.field);
            return Err(ServiceError::invalid(field, message));
        }
        let warnings = source.warnings(field);
        self.structure = Some(Structure { source, field: field.to_owned(), warnings });
        Ok(())
    }

    fn json(&mut self, field: &str, schema: Option<Value>) -> Result<(), ServiceError> {
        self.add(field, Source::json(schema, self.whitespace.clone()))
    }

    fn response_format(&mut self, format: ResponseFormat) -> Result<(), ServiceError> {
        const SCHEMA: &str = "response_format.json_schema.schema";
        match format.kind.as_str() {
            "text" => Ok(()),
            "json_object" => self.json("response_format", None),
            "json_schema" => {
                let schema = format.json_schema.and_then(|Object(named)| named.schema);
                let Some(Json(schema)) = schema else {
                    return Err(ServiceError::invalid(SCHEMA, format!("missing `{SCHEMA}`")));
                };
                self.json(SCHEMA, Some(schema))
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
            ("structural_tag", outputs.structural_tag.is_some()),
        ] {
            if is_given {
                let field = format!("structured_outputs.{name}");
                let message = format!("`{field}` is not supported");
                return Err(ServiceError::invalid(field, message));
            }
        }
        if let Some(Json(schema)) = outputs.json {
            const FIELD: &str = "structured_outputs.json";
            self.json(FIELD, Some(parse_schema_text(FIELD, schema)?))?;
        }
        if outputs.json_object == Some(true) {
            self.json("structured_outputs.json_object", None)?;
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

/// Parses a schema that is given as JSON text; returns any other value as it is.
fn parse_schema_text(field: &str, schema: Value) -> Result<Value, ServiceError> {
    match schema {
        Value::String(text) => serde_json::from_str(&text).map_err(|error| {
            ServiceError::invalid(field, format!("invalid `{field}`: expected JSON: {error}"))
        }),
        schema => Ok(schema),
    }
}
