//! Converts the messages of a chat to the form that templates expect.

use super::fields::{BoundedList, Given, Object};
use remoe_proto::ServiceError;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use std::fmt;

/// Messages of a chat, up to a maximum.
pub(super) type Messages = BoundedList<Object<Message>, 16384>;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Message {
    role: Option<String>,
    content: Option<Content>,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    name: Option<String>,
    tool_call_id: Option<String>,
    tool_calls: Option<BoundedList<Object<ToolCall>, 128>>,
    function_call: Given,
    audio: Given,
}

/// Text of a message, or the reason why its first part without text has none.
#[derive(Debug)]
enum Content {
    Text(String),
    Refused(usize, NoText),
}

/// Reason why a part of a message has no text.
#[derive(Debug)]
enum NoText {
    Kind(String),
    Missing(&'static str),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ContentPart {
    #[serde(rename = "type")]
    kind: Option<String>,
    text: Option<String>,
    refusal: Option<String>,
}

impl ContentPart {
    fn text(self) -> Result<String, NoText> {
        match self.kind.as_deref().unwrap_or("text") {
            "text" => self.text.ok_or(NoText::Missing("text")),
            "refusal" => self.refusal.ok_or(NoText::Missing("refusal")),
            other => Err(NoText::Kind(other.to_owned())),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ToolCall {
    id: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    function: Option<Object<CalledFunction>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct CalledFunction {
    name: Option<String>,
    arguments: Option<String>,
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ContentVisitor;
        impl<'de> Visitor<'de> for ContentVisitor {
            type Value = Content;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of content parts")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
                let mut text = String::new();
                let mut refused = None;
                let mut index = 0;
                while let Some(Object::<ContentPart>(part)) = list.next_element()? {
                    match part.text() {
                        _ if refused.is_some() => (),
                        Ok(part) => {
                            text.push_str(if index > 0 { "\n" } else { "" });
                            text.push_str(&part);
                        }
                        Err(why) => refused = Some(Content::Refused(index, why)),
                    }
                    index += 1;
                }
                Ok(refused.unwrap_or(Content::Text(text)))
            }
        }
        deserializer.deserialize_any(ContentVisitor)
    }
}

/// Converts `messages` for the template: one text each, `developer` as `system`.
///
/// # Errors
/// Fails with the message and the field that is invalid.
pub(super) fn for_template(BoundedList(messages): Messages) -> Result<Vec<Value>, ServiceError> {
    if messages.is_empty() {
        return Err(ServiceError::invalid("messages", "invalid `messages`: expected at least one message"));
    }
    (0..).zip(messages).map(|(index, message)| one(index, message.0)).collect()
}

fn one(index: usize, message: Message) -> Result<Value, ServiceError> {
    let at = |field: &str| format!("messages[{index}].{field}");
    let role = match message.role.as_deref() {
        // Instructions of the application are system messages for templates.
        Some("system" | "developer") => "system",
        Some("user") => "user",
        Some("assistant") => "assistant",
        Some("tool") => "tool",
        None => {
            return Err(ServiceError::invalid(at("role"), format!("missing `{}`", at("role"))));
        }
        Some(other) => {
            return Err(ServiceError::invalid(
                at("role"),
                format!(
                    "invalid `{}`: expected system, developer, user, assistant or tool, got {other:?}",
                    at("role")
                ),
            ));
        }
    };
    for (name, given) in [("function_call", &message.function_call), ("audio", &message.audio)] {
        if *given != Given::Nothing {
            return Err(ServiceError::invalid(at(name), format!("`{name}` is not supported")));
        }
    }
    let calls = message.tool_calls.map(|calls| calls.0).unwrap_or_default();
    if !calls.is_empty() && role != "assistant" {
        let message = "`tool_calls` is supported in assistant messages only";
        return Err(ServiceError::invalid(at("tool_calls"), message));
    }
    let content = match message.content {
        Some(content) => text(&at("content"), content)?,
        None if role == "assistant" => String::new(),
        None => {
            return Err(ServiceError::invalid(
                at("content"),
                format!("missing `{}`: a {role} message needs content", at("content")),
            ));
        }
    };
    let mut ready = Map::new();
    ready.insert("role".to_owned(), role.into());
    ready.insert("content".to_owned(), content.into());
    for (name, value) in [("name", message.name), ("tool_call_id", message.tool_call_id)] {
        if let Some(value) = value {
            ready.insert(name.to_owned(), value.into());
        }
    }
    let reasoning = message.reasoning_content.or(message.reasoning);
    if let Some(reasoning) = reasoning.filter(|_| role == "assistant") {
        // gpt-oss names this field differently, and its messages with calls have no content.
        if calls.is_empty() || ready["content"] == "" {
            ready.insert("thinking".to_owned(), reasoning.clone().into());
        }
        ready.insert("reasoning_content".to_owned(), reasoning.into());
    }
    if !calls.is_empty() {
        let calls =
            (0..).zip(calls).map(|(number, call)| tool_call(&at(&format!("tool_calls[{number}]")), call.0));
        ready.insert("tool_calls".to_owned(), calls.collect::<Result<Vec<Value>, _>>()?.into());
    }
    Ok(Value::Object(ready))
}

fn text(at: &str, content: Content) -> Result<String, ServiceError> {
    match content {
        Content::Text(text) => Ok(text),
        Content::Refused(index, NoText::Kind(kind)) => {
            let field = format!("{at}[{index}]");
            let message = format!("unsupported content type `{kind}` in `{field}`: expected `text`");
            Err(ServiceError::invalid(field, message))
        }
        Content::Refused(index, NoText::Missing(kind)) => {
            let field = format!("{at}[{index}].{kind}");
            let message = format!("missing `{field}`");
            Err(ServiceError::invalid(field, message))
        }
    }
}

/// Converts a call: templates expect arguments as an object, clients send text.
fn tool_call(at: &str, call: ToolCall) -> Result<Value, ServiceError> {
    if let Some(other) = call.kind.filter(|kind| kind != "function") {
        let field = format!("{at}.type");
        let message = format!("invalid `{field}`: expected function, got {other:?}");
        return Err(ServiceError::invalid(field, message));
    }
    let function = call.function.map(|function| function.0).unwrap_or_default();
    let Some(name) = function.name else {
        let field = format!("{at}.function.name");
        let message = format!("missing `{field}`");
        return Err(ServiceError::invalid(field, message));
    };
    let arguments = function.arguments.unwrap_or_default();
    let arguments = match serde_json::from_str::<Map<String, Value>>(&arguments) {
        Ok(object) => Value::Object(object),
        Err(_) => Value::String(arguments),
    };
    Ok(json!({
        "id": call.id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }))
}
