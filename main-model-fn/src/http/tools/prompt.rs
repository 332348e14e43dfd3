//! Adapts messages to a model's template: describes tools in words, writes calls as content and results as user messages, if
//! the template does not.

use super::dialect::{Dialect, TemplateSupport};
use super::format::Ids;
use super::writing::written;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fmt::Write;

/// Adds to `messages` what the template of `dialect` does not write. `tools` are the request's tools.
pub(in crate::http) fn adapt_messages(
    dialect: &Dialect,
    messages: Vec<Value>,
    tools: &[Value],
) -> Vec<Value> {
    let mut messages = without_tools(dialect, dialect.written(!tools.is_empty()), messages);
    if tools.is_empty() || dialect.shows_tools {
        return messages;
    }
    let mut description = String::from(
        "You may call functions to help the user. These are the functions, with their parameters as JSON Schema:\n<tools>\n",
    );
    for tool in tools {
        // Writing to a String cannot fail.
        let _written = writeln!(description, "{tool}");
    }
    let example = [("function_name".to_owned(), json!({"parameter": "value"}))];
    let example = written(dialect.format, &example, 0);
    // Writing to a String cannot fail.
    let _written =
        write!(description, "</tools>\nTo call one, write its name and arguments like this:\n{example}");
    let place = if dialect.takes_system { "system" } else { "user" };
    match messages.first_mut() {
        Some(first) if first["role"] == place => {
            let content = first["content"].as_str().unwrap_or_default();
            let (before, after) =
                if dialect.takes_system { (content, &*description) } else { (&*description, content) };
            first["content"] = format!("{before}\n\n{after}").trim_start().into();
        }
        _ => messages.insert(0, message(place, description)),
    }
    messages
}

/// Rewrites calls and results in `messages` that the template does not write.
fn without_tools(dialect: &Dialect, kept: TemplateSupport, mut messages: Vec<Value>) -> Vec<Value> {
    if kept.calls {
        rewrite_ids(dialect.format.ids, &mut messages);
    }
    let mut out: Vec<Value> = Vec::with_capacity(messages.len());
    let mut last_was_result = false;
    let mut number = 0;
    for mut message in messages {
        let is_result = message["role"] == "tool" && !kept.results;
        if is_result {
            let content = message["content"].as_str().unwrap_or_default();
            let result = format!("<tool_response>\n{content}\n</tool_response>");
            // Results of several calls become one message.
            match out.last_mut().filter(|_| last_was_result) {
                Some(last) => {
                    let before = last["content"].as_str().unwrap_or_default();
                    last["content"] = format!("{before}\n{result}").into();
                }
                None => out.push(self::message("user", result)),
            }
        } else {
            match message.get_mut("tool_calls").and_then(Value::as_array_mut) {
                Some(calls) if kept.calls && dialect.takes_text => calls.iter_mut().for_each(as_text),
                Some(calls) if !kept.calls => {
                    let calls: Vec<_> = calls.iter().map(name_and_arguments).collect();
                    let text = written(dialect.format, &calls, number);
                    number += calls.len();
                    let content = message["content"].as_str().unwrap_or_default();
                    let break_before = if content.is_empty() { "" } else { "\n" };
                    message["content"] = format!("{content}{break_before}{text}").into();
                    if let Some(message) = message.as_object_mut() {
                        message.shift_remove("tool_calls");
                    }
                }
                _ => (),
            }
            out.push(message);
        }
        last_was_result = is_result;
    }
    out
}

/// Replaces call ids of other models by ids in the form that the template requires.
fn rewrite_ids(ids: Ids, messages: &mut [Value]) {
    let mut new: HashMap<String, String> = HashMap::new();
    let mut number = 0;
    for message in messages {
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            let old = call["id"].as_str().unwrap_or_default().to_owned();
            let is_nine = old.len() == 9 && old.bytes().all(|byte| byte.is_ascii_alphanumeric());
            let id = match ids {
                Ids::Nine if !is_nine => format!("{number:09}"),
                Ids::Numbered => {
                    format!("functions.{}:{number}", call["function"]["name"].as_str().unwrap_or_default())
                }
                _ => old.clone(),
            };
            number += 1;
            call["id"] = id.clone().into();
            new.insert(old, id);
        }
        let id = message.get("tool_call_id").and_then(Value::as_str).and_then(|old| new.get(old)).cloned();
        if let (Some(id), Some(message)) = (id, message.as_object_mut()) {
            message.insert("tool_call_id".to_owned(), id.into());
        }
    }
}

/// Converts the arguments of a call to text, for templates that need text.
fn as_text(call: &mut Value) {
    if let Some(arguments) = call.pointer_mut("/function/arguments").filter(|value| !value.is_string()) {
        *arguments = arguments.to_string().into();
    }
}

fn name_and_arguments(call: &Value) -> (String, Value) {
    let function = &call["function"];
    (function["name"].as_str().unwrap_or_default().to_owned(), function["arguments"].clone())
}

fn message(role: &str, content: String) -> Value {
    let mut message = Map::new();
    message.insert("role".to_owned(), role.into());
    message.insert("content".to_owned(), content.into());
    Value::Object(message)
}
