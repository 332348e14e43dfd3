//! Messages as a model's template takes them: with tools in words, calls as content and results as messages of the
//! user where the template has no place for them.

use super::dialect::Dialect;
use super::writing::written;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// `messages` with what the template of `dialect` does not write itself; `tools` are those of the request.
pub(in crate::http) fn in_messages(dialect: &Dialect, messages: Vec<Value>, tools: &[Value]) -> Vec<Value> {
    let mut messages = without_tools(dialect, messages);
    if tools.is_empty() || dialect.shows_tools {
        return messages;
    }
    let mut told = String::from(
        "You may call functions to help the user. These are the functions, with their parameters as JSON Schema:\n<tools>\n",
    );
    for tool in tools {
        // Writing to memory cannot fail.
        let _written = writeln!(told, "{tool}");
    }
    let example = [("function_name".to_owned(), json!({"parameter": "value"}))];
    let example = written(dialect.format, &example, 0);
    // Writing to memory cannot fail.
    let _written = write!(told, "</tools>\nTo call one, write its name and arguments like this:\n{example}");
    match messages.first_mut() {
        Some(first) if first["role"] == "system" => {
            let content = first["content"].as_str().unwrap_or_default();
            first["content"] = format!("{content}\n\n{told}").trim_start().into();
        }
        _ => messages.insert(0, message("system", told)),
    }
    messages
}

/// `messages` with calls and results as the template writes them.
fn without_tools(dialect: &Dialect, messages: Vec<Value>) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::with_capacity(messages.len());
    let mut last_was_result = false;
    let mut number = 0;
    for mut message in messages {
        let is_result = message["role"] == "tool" && !dialect.writes_results;
        if is_result {
            let content = message["content"].as_str().unwrap_or_default();
            let result = format!("<tool_response>\n{content}\n</tool_response>");
            // Results of several calls are one turn.
            match out.last_mut().filter(|_| last_was_result) {
                Some(last) => {
                    let before = last["content"].as_str().unwrap_or_default();
                    last["content"] = format!("{before}\n{result}").into();
                }
                None => out.push(self::message("user", result)),
            }
        } else {
            match message.get_mut("tool_calls").and_then(Value::as_array_mut) {
                Some(calls) if dialect.writes_calls && dialect.takes_text => {
                    calls.iter_mut().for_each(as_text)
                }
                Some(calls) if !dialect.writes_calls => {
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

/// Arguments of a call as the text that some templates join.
fn as_text(call: &mut Value) {
    if let Some(arguments) = call.pointer_mut("/function/arguments").filter(|it| !it.is_string()) {
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
