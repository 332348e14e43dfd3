//! Request fields of tools: `tools`, `tool_choice` and `parallel_tool_calls`.

use crate::http::fields::{BoundedList, Json, Object};
use crate::http::request_body::RequestBody;
use remoe_proto::ServiceError;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::collections::HashSet;
use std::fmt;

/// Tools of a chat, at most 128.
pub(in crate::http) type Tools = BoundedList<Json, 128>;

/// Longest name of a function in bytes, as in OpenAI's API.
const MAX_NAME_BYTES: usize = 64;

/// Field `tool_choice`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::http) enum ToolChoice {
    /// `none`, `auto`, `required`, or an invalid name.
    Named(String),
    /// `{"type": "function", "function": {"name": ..}}`
    Function(String),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ChosenTool {
    #[serde(rename = "type")]
    kind: String,
    function: Option<Object<ChosenFunction>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ChosenFunction {
    name: Option<String>,
}

impl<'de> Deserialize<'de> for ToolChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ChoiceVisitor;
        impl<'de> Visitor<'de> for ChoiceVisitor {
            type Value = ToolChoice;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("none, auto, required or an object that names a function")
            }
            fn visit_str<E: Error>(self, choice: &str) -> Result<ToolChoice, E> {
                Ok(ToolChoice::Named(choice.to_owned()))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ToolChoice, A::Error> {
                let chosen = ChosenTool::deserialize(MapAccessDeserializer::new(map))?;
                if chosen.kind != "function" {
                    let message = format!("invalid `type`: expected function, got {:?}", chosen.kind);
                    return Err(A::Error::custom(message));
                }
                match chosen.function.and_then(|Object(function)| function.name) {
                    Some(name) => Ok(ToolChoice::Function(name)),
                    None => Err(A::Error::custom("missing `function.name`")),
                }
            }
        }
        deserializer.deserialize_any(ChoiceVisitor)
    }
}

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::http) struct ToolFunction {
    pub(super) name: String,
    /// Schema of the arguments; `None` allows any object.
    pub(super) parameters: Option<Value>,
    /// True if the arguments must match the schema in every call.
    pub(super) strict: bool,
    /// Index of the tool in the request.
    pub(super) place: usize,
}

/// Decision about calling tools.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Mode {
    /// The model decides.
    #[default]
    Auto,
    /// The answer has at least one call.
    Required,
}

/// Tools of a chat that the model may call; none by default.
#[derive(Debug, Clone, Default, PartialEq)]
pub(in crate::http) struct CallableTools {
    /// Tools as in the request, for the template.
    pub(in crate::http) tools: Vec<Value>,
    /// Functions that may be called.
    pub(super) functions: Vec<ToolFunction>,
    pub(super) mode: Mode,
    /// True if an answer may have several calls.
    pub(super) parallel: bool,
}

impl CallableTools {
    /// Takes the tools of `body`; `None` if no tool may be called.
    ///
    /// # Errors
    /// Fails with the first field that is invalid or unsupported.
    pub(in crate::http) fn take(body: &mut RequestBody) -> Result<Option<Self>, ServiceError> {
        Self::new(body.tools.take(), body.tool_choice.take(), body.parallel_tool_calls)
    }

    /// Combines `tools`, `tool_choice` and `parallel_tool_calls`.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub(in crate::http) fn new(
        tools: Option<Tools>,
        choice: Option<ToolChoice>,
        parallel: Option<bool>,
    ) -> Result<Option<Self>, ServiceError> {
        let tools: Vec<Value> = tools
            .map(|BoundedList(tools)| tools.into_iter().map(|Json(tool)| tool).collect())
            .unwrap_or_default();
        let functions: Vec<ToolFunction> =
            tools.iter().enumerate().map(|(place, tool)| function(place, tool)).collect::<Result<_, _>>()?;
        let mut names = HashSet::new();
        if let Some(again) = functions.iter().find(|function| !names.insert(function.name.as_str())) {
            let field = format!("tools[{}].function.name", again.place);
            let message = format!("duplicate tool name {:?} in `{field}`", again.name);
            return Err(ServiceError::invalid(field, message));
        }
        let invalid = |message: String| ServiceError::invalid("tool_choice", message);
        let (mode, only) = match choice {
            None => (Mode::Auto, None),
            Some(ToolChoice::Named(choice)) => match choice.as_str() {
                // Tools are not even shown: a model that sees tools may call them.
                "none" => return Ok(None),
                "auto" => (Mode::Auto, None),
                "required" => (Mode::Required, None),
                other => {
                    let message = format!(
                        "invalid `tool_choice`: expected none, auto, required or a function, got {other:?}"
                    );
                    return Err(invalid(message));
                }
            },
            Some(ToolChoice::Function(name)) => (Mode::Required, Some(name)),
        };
        if functions.is_empty() {
            return match mode {
                Mode::Auto => Ok(None),
                Mode::Required => Err(invalid("`tool_choice` requires `tools`".to_owned())),
            };
        }
        let parallel = only.is_none() && parallel.unwrap_or(true);
        let functions: Vec<ToolFunction> = match only {
            None => functions,
            Some(name) => {
                let chosen: Vec<_> = functions.into_iter().filter(|function| function.name == name).collect();
                if chosen.is_empty() {
                    return Err(invalid(format!("invalid `tool_choice`: unknown tool {name:?}")));
                }
                chosen
            }
        };
        Ok(Some(Self { tools, functions, mode, parallel }))
    }

    /// Reports if no tool may be called.
    pub(super) fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// Returns the schema of the arguments of function `name`, if it has one.
    pub(super) fn parameters(&self, name: &str) -> Option<&Value> {
        self.functions.iter().find(|function| function.name == name)?.parameters.as_ref()
    }

    /// Reports if the function `name` may be called.
    pub(super) fn has(&self, name: &str) -> bool {
        self.functions.iter().any(|function| function.name == name)
    }
}

/// Checks the tool at index `place` of the request.
fn function(place: usize, tool: &Value) -> Result<ToolFunction, ServiceError> {
    let invalid = |field: &str, what: &str| {
        let field = format!("tools[{place}]{field}");
        let message = format!("invalid `{field}`: expected {what}");
        Err(ServiceError::invalid(field, message))
    };
    if tool.get("type").and_then(Value::as_str) != Some("function") {
        return invalid(".type", "\"function\"");
    }
    let Some(function) = tool.get("function").and_then(Value::as_object) else {
        return invalid(".function", "an object");
    };
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    let name = match function.get("name").and_then(Value::as_str) {
        Some(name) if (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(letter) => {
            name.to_owned()
        }
        _ => return invalid(".function.name", "1 to 64 letters, digits, `_`, `-` and `.`"),
    };
    let parameters = match function.get("parameters") {
        None | Some(Value::Null) => None,
        Some(Value::Object(schema)) if schema.get("type").is_some_and(|kind| kind != "object") => {
            return invalid(".function.parameters", "a schema whose type is \"object\"");
        }
        Some(parameters @ Value::Object(_)) => Some(parameters.clone()),
        Some(_) => return invalid(".function.parameters", "an object"),
    };
    let strict = match function.get("strict") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(strict)) => *strict,
        Some(_) => return invalid(".function.strict", "a boolean"),
    };
    match function.get("description") {
        None | Some(Value::Null | Value::String(_)) => (),
        Some(_) => return invalid(".function.description", "a string"),
    }
    Ok(ToolFunction { name, parameters, strict, place })
}
