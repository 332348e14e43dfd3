//! Tools for models whose template knows none: what they are told, in words, and what has been called, as
//! text. The format is Hermes'.

use serde_json::{Map, Value};
use std::fmt::Write;

/// `messages` with `tools`, if any, in the first of them, and calls and their results as text.
pub(in crate::http) fn in_messages(messages: Vec<Value>, tools: &[Value]) -> Vec<Value> {
    let mut messages = without_tools(messages);
    if tools.is_empty() {
        return messages;
    }
    let mut told = String::from(
        "You may call functions to help the user. These are the functions, with their parameters as JSON Schema:\n<tools>\n",
    );
    for tool in tools {
        // Cannot fail: it is memory.
        let _written = writeln!(told, "{tool}");
    }
    told.push_str(
        "</tools>\nTo call one, write its name and arguments as JSON within tags:\n<tool_call>\n{\"name\": \"function name\", \"arguments\": {\"parameter\": \"value\"}}\n</tool_call>",
    );
    match messages.first_mut() {
        Some(first) if first["role"] == "system" => {
            let content = first["content"].as_str().unwrap_or_default();
            first["content"] = format!("{content}\n\n{told}").trim_start().into();
        }
        _ => messages.insert(0, message("system", told)),
    }
    messages
}

/// `messages` with calls and their results as text.
fn without_tools(messages: Vec<Value>) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::with_capacity(messages.len());
    let mut last_was_result = false;
    for mut message in messages {
        let content = message["content"].as_str().unwrap_or_default().to_owned();
        let is_result = message["role"] == "tool";
        if is_result {
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
            if let Some(Value::Array(calls)) =
                message.as_object_mut().and_then(|it| it.shift_remove("tool_calls"))
            {
                let mut text = content;
                for call in calls {
                    let mut written = Map::new();
                    for name in ["name", "arguments"] {
                        written.insert(name.to_owned(), call["function"][name].clone());
                    }
                    let break_before = if text.is_empty() { "" } else { "\n" };
                    // Cannot fail: it is memory.
                    let _written =
                        write!(text, "{break_before}<tool_call>\n{}\n</tool_call>", Value::Object(written));
                }
                message["content"] = text.into();
            }
            out.push(message);
        }
        last_was_result = is_result;
    }
    out
}

fn message(role: &str, content: String) -> Value {
    let mut message = Map::new();
    message.insert("role".to_owned(), role.into());
    message.insert("content".to_owned(), content.into());
    Value::Object(message)
}
