//! Translates a request of `/v1/responses` to a chat with the same meaning.

use super::body::{ResponsesBody, TextFormat};
use super::item::{Content, ContentPart, Input, Item};
use crate::http::fields::{BoundedList, Json, Object, TextOr};
use crate::http::transcript::Transcript;
use remoe_proto::ServiceError;
use serde_json::{Map, Value, json};

/// Fields of a tool that belong to its function in chats.
const FUNCTION_FIELDS: [&str; 4] = ["name", "description", "parameters", "strict"];

impl ResponsesBody {
    /// Translates the request.
    ///
    /// # Errors
    /// Fails with the first field that has no counterpart in chats.
    pub(super) fn into_chat(self) -> Result<Map<String, Value>, ServiceError> {
        let messages = messages(self.instructions, self.input)?;
        let format = self.text.and_then(|text| text.0.format).map(|format| response_format(format.0));
        let effort = self.reasoning.and_then(|reasoning| reasoning.0.effort);
        let seed = self.seed.map(|seed| json!(seed.0));
        let fields = [
            ("model", self.model.map(Value::from)),
            ("messages", Some(messages.into())),
            ("max_completion_tokens", self.max_output_tokens.map(Value::from)),
            ("temperature", self.temperature.map(Value::from)),
            ("top_p", self.top_p.map(Value::from)),
            ("top_k", self.top_k.map(Value::from)),
            ("min_p", self.min_p.map(Value::from)),
            ("seed", seed),
            ("tools", self.tools.map(tools).transpose()?),
            ("tool_choice", self.tool_choice.map(|choice| tool_choice(choice.0)).transpose()?),
            ("parallel_tool_calls", self.parallel_tool_calls.map(Value::from)),
            ("response_format", format.transpose()?),
            ("reasoning_effort", effort.map(Value::from)),
            ("enable_thinking", self.enable_thinking.map(Value::from)),
            ("thinking_token_budget", self.thinking_token_budget.map(Value::from)),
            ("chat_template_kwargs", self.chat_template_kwargs.map(|variables| variables.0)),
            ("stream", self.stream.map(Value::from)),
            ("priority", self.priority.map(Value::from)),
            ("queue_deadline", self.queue_deadline.map(Value::from)),
        ];
        Ok(fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect())
    }
}

fn messages(instructions: Option<String>, input: Option<Input>) -> Result<Vec<Value>, ServiceError> {
    let mut transcript = Transcript::default();
    if let Some(instructions) = instructions {
        transcript.system(instructions);
    }
    match input {
        None => return Err(ServiceError::invalid("input", "missing `input`")),
        Some(TextOr::Text(text)) => transcript.user(text),
        Some(TextOr::List(items)) => {
            for (index, Object(item)) in items.into_iter().enumerate() {
                add(&mut transcript, &format!("input[{index}]"), item)?;
            }
        }
    }
    Ok(transcript.finish())
}

fn add(transcript: &mut Transcript, at: &str, item: Item) -> Result<(), ServiceError> {
    match item.kind.as_deref().unwrap_or("message") {
        "message" => {
            let content = required(item.content, at, "content")?;
            let text = text(&format!("{at}.content"), content)?;
            match required(item.role, at, "role")?.as_str() {
                "user" => transcript.user(text),
                "system" | "developer" => transcript.system(text),
                "assistant" => transcript.assistant_text(text),
                other => {
                    let field = format!("{at}.role");
                    let message = format!(
                        "invalid `{field}`: expected user, system, developer or assistant, got {other:?}"
                    );
                    return Err(ServiceError::invalid(field, message));
                }
            }
        }
        // Clients may send only the summary of the reasoning.
        "reasoning" => {
            for (name, content) in [("content", item.content), ("summary", item.summary)] {
                let text = content.map(|content| text(&format!("{at}.{name}"), content)).transpose()?;
                if let Some(text) = text.filter(|text| !text.is_empty()) {
                    transcript.reasoning(text);
                    break;
                }
            }
        }
        "function_call" => transcript.tool_call(
            required(item.call_id, at, "call_id")?,
            required(item.name, at, "name")?,
            required(item.arguments, at, "arguments")?,
        ),
        "function_call_output" => {
            let output = text(&format!("{at}.output"), required(item.output, at, "output")?)?;
            transcript.tool_result(required(item.call_id, at, "call_id")?, output);
        }
        other => {
            let field = format!("{at}.type");
            let message = format!(
                "unsupported `{field}`: expected message, reasoning, function_call or function_call_output, got \
                 {other:?}"
            );
            return Err(ServiceError::invalid(field, message));
        }
    }
    Ok(())
}

fn required<T>(value: Option<T>, at: &str, name: &str) -> Result<T, ServiceError> {
    let field = format!("{at}.{name}");
    let message = format!("missing `{field}`");
    value.ok_or_else(|| ServiceError::invalid(field, message))
}

/// Returns the text of a content; parts are joined as lines.
fn text(at: &str, content: Content) -> Result<String, ServiceError> {
    let parts = match content {
        TextOr::Text(text) => return Ok(text),
        TextOr::List(parts) => parts,
    };
    let part = |(index, Object(part)): (usize, Object<ContentPart>)| {
        let at = format!("{at}[{index}]");
        match part.kind.as_deref() {
            Some("input_text" | "output_text" | "text" | "reasoning_text" | "summary_text") => {
                required(part.text, &at, "text")
            }
            Some("refusal") => required(part.refusal, &at, "refusal"),
            kind => {
                let field = format!("{at}.type");
                let message = format!(
                    "unsupported `{field}`: expected input_text, output_text or refusal, got {:?}",
                    kind.unwrap_or_default()
                );
                Err(ServiceError::invalid(field, message))
            }
        }
    };
    Ok(parts.into_iter().enumerate().map(part).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

fn tools(BoundedList(tools): BoundedList<Json, 128>) -> Result<Value, ServiceError> {
    let tool = |(index, Json(tool)): (usize, Json)| match tool {
        Value::Object(mut tool) if tool.get("type").is_some_and(|kind| kind == "function") => {
            let fields =
                FUNCTION_FIELDS.into_iter().filter_map(|name| Some((name.to_owned(), tool.remove(name)?)));
            Ok(json!({"type": "function", "function": fields.collect::<Map<_, _>>()}))
        }
        tool => {
            let field = format!("tools[{index}].type");
            let kind = tool.get("type").and_then(Value::as_str).unwrap_or_default();
            let message = format!("unsupported `{field}`: expected function, got {kind:?}; omit this tool");
            Err(ServiceError::invalid(field, message))
        }
    };
    Ok(tools.into_iter().enumerate().map(tool).collect::<Result<Vec<_>, _>>()?.into())
}

fn tool_choice(choice: Value) -> Result<Value, ServiceError> {
    match &choice {
        Value::String(_) | Value::Null => Ok(choice),
        Value::Object(tool) if tool.get("type").is_some_and(|kind| kind == "function") => {
            match tool.get("name").and_then(Value::as_str) {
                Some(name) => Ok(json!({"type": "function", "function": {"name": name}})),
                None => Err(ServiceError::invalid("tool_choice.name", "missing `tool_choice.name`")),
            }
        }
        other => {
            let kind = other.get("type").and_then(Value::as_str).unwrap_or_default();
            let message = format!(
                "unsupported `tool_choice`: expected none, auto, required or a function, got {kind:?}"
            );
            Err(ServiceError::invalid("tool_choice", message))
        }
    }
}

fn response_format(format: TextFormat) -> Result<Value, ServiceError> {
    match format.kind.as_deref() {
        Some("json_schema") => {
            let Json(schema) = required(format.schema, "text.format", "schema")?;
            let named = json!({"name": format.name, "schema": schema, "strict": format.strict});
            Ok(json!({"type": "json_schema", "json_schema": named}))
        }
        Some(kind @ ("text" | "json_object")) => Ok(json!({"type": kind})),
        other => {
            let message = format!(
                "invalid `text.format.type`: expected text, json_object or json_schema, got {:?}",
                other.unwrap_or_default()
            );
            Err(ServiceError::invalid("text.format.type", message))
        }
    }
}
