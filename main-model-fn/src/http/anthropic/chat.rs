//! Translates a request of `/v1/messages` to a chat with the same meaning.

use super::block::{Block, Content, Message};
use super::body::{MessagesBody, OutputFormat, Thinking, ToolChoice};
use crate::http::fields::{BoundedList, Json, Object, TextOr};
use crate::http::transcript::Transcript;
use remoe_proto::ServiceError;
use serde_json::{Map, Value, json};

impl MessagesBody {
    /// Translates the request.
    ///
    /// # Errors
    /// Fails with the first field that has no counterpart in chats.
    pub(super) fn into_chat(self) -> Result<Map<String, Value>, ServiceError> {
        let mut transcript = Transcript::default();
        if let Some(system) = self.system {
            transcript.system(text("system", system)?);
        }
        let BoundedList(messages) =
            self.messages.ok_or_else(|| ServiceError::invalid("messages", "missing `messages`"))?;
        let last = messages.len().saturating_sub(1);
        for (index, Object(message)) in messages.into_iter().enumerate() {
            if index == last && message.role.as_deref() == Some("assistant") {
                let field = format!("messages[{index}].role");
                let message = format!(
                    "unsupported `{field}`: expected user in the last message, got assistant: answers cannot be \
                     prefilled"
                );
                return Err(ServiceError::invalid(field, message));
            }
            add(&mut transcript, &format!("messages[{index}]"), message)?;
        }
        let (choice, parallel) = self.tool_choice.map(|choice| tool_choice(choice.0)).transpose()?.unzip();
        let config = self.output_config.map(|config| config.0).unwrap_or_default();
        let format = config.format.map(|format| response_format(format.0)).transpose()?;
        let fields = [
            ("model", self.model.map(Value::from)),
            ("messages", Some(transcript.finish().into())),
            ("max_completion_tokens", self.max_tokens.map(Value::from)),
            ("stop", self.stop_sequences.map(Value::from)),
            ("temperature", self.temperature.map(Value::from)),
            ("top_p", self.top_p.map(Value::from)),
            ("top_k", self.top_k.map(Value::from)),
            ("seed", self.seed.map(|seed| json!(seed.0))),
            ("tools", self.tools.map(tools).transpose()?),
            ("tool_choice", choice),
            ("parallel_tool_calls", parallel.flatten().map(Value::from)),
            ("response_format", format),
            ("reasoning_effort", config.effort.map(Value::from)),
            ("reasoning", self.thinking.and_then(|thinking| thinking_field(&thinking.0))),
            ("stream", self.stream.map(Value::from)),
            ("priority", self.priority.map(Value::from)),
            ("queue_deadline", self.queue_deadline.map(Value::from)),
        ];
        Ok(fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect())
    }
}

/// Translates `thinking` to the field of chats.
fn thinking_field(thinking: &Thinking) -> Option<Value> {
    let is_on = match thinking.kind.as_deref() {
        Some("enabled") => true,
        Some("disabled") => false,
        // The model decides.
        _ => return None,
    };
    Some(json!({"enabled": is_on, "max_tokens": thinking.budget_tokens.filter(|_| is_on)}))
}

fn add(transcript: &mut Transcript, at: &str, message: Message) -> Result<(), ServiceError> {
    let content = match required(message.content, at, "content")? {
        TextOr::Text(text) => {
            let block = Block { kind: Some("text".to_owned()), text: Some(text), ..Block::default() };
            vec![Object(block)]
        }
        TextOr::List(blocks) => blocks,
    };
    let is_assistant = match required(message.role, at, "role")?.as_str() {
        "assistant" => true,
        "user" => false,
        "system" => {
            transcript.system(text(&format!("{at}.content"), TextOr::List(content))?);
            return Ok(());
        }
        other => {
            let field = format!("{at}.role");
            let message = format!("invalid `{field}`: expected user or assistant, got {other:?}");
            return Err(ServiceError::invalid(field, message));
        }
    };
    let push_texts = |transcript: &mut Transcript, texts: &mut Vec<String>| {
        if !texts.is_empty() {
            let text = std::mem::take(texts).join("\n");
            if is_assistant { transcript.assistant_text(text) } else { transcript.user(text) }
        }
    };
    let mut texts = Vec::new();
    let mut is_empty = true;
    for (index, Object(block)) in content.into_iter().enumerate() {
        is_empty = false;
        let at = format!("{at}.content[{index}]");
        let kind = required(block.kind, &at, "type")?;
        if kind == "text" {
            texts.push(required(block.text, &at, "text")?);
            continue;
        }
        push_texts(transcript, &mut texts);
        match (kind.as_str(), is_assistant) {
            ("tool_result", false) => {
                // A function without a result has no content.
                let content = block.content.map_or_else(|| TextOr::Text(String::new()), |content| *content);
                let text = text(&format!("{at}.content"), content)?;
                transcript.tool_result(required(block.tool_use_id, &at, "tool_use_id")?, text);
            }
            ("tool_use", true) => {
                let Json(input) = block.input.unwrap_or_else(|| Json(json!({})));
                if !input.is_object() {
                    let field = format!("{at}.input");
                    let message = format!("invalid `{field}`: expected an object");
                    return Err(ServiceError::invalid(field, message));
                }
                let (id, name) = (required(block.id, &at, "id")?, required(block.name, &at, "name")?);
                transcript.tool_call(id, name, input.to_string());
            }
            ("thinking", true) => transcript.reasoning(required(block.thinking, &at, "thinking")?),
            // Only the server that wrote it can read it.
            ("redacted_thinking", true) => (),
            (other, _) => {
                let expected =
                    if is_assistant { "text, thinking or tool_use" } else { "text or tool_result" };
                let field = format!("{at}.type");
                let message = format!("unsupported `{field}`: expected {expected}, got {other:?}");
                return Err(ServiceError::invalid(field, message));
            }
        }
    }
    if is_empty {
        texts.push(String::new());
    }
    push_texts(transcript, &mut texts);
    Ok(())
}

/// Returns the text of a content of text blocks; blocks are joined as lines.
fn text(at: &str, content: Content) -> Result<String, ServiceError> {
    let blocks = match content {
        TextOr::Text(text) => return Ok(text),
        TextOr::List(blocks) => blocks,
    };
    let block = |(index, Object(block)): (usize, Object<Block>)| {
        let at = format!("{at}[{index}]");
        match block.kind.as_deref() {
            Some("text") => required(block.text, &at, "text"),
            kind => {
                let field = format!("{at}.type");
                let message =
                    format!("unsupported `{field}`: expected text, got {:?}", kind.unwrap_or_default());
                Err(ServiceError::invalid(field, message))
            }
        }
    };
    Ok(blocks.into_iter().enumerate().map(block).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

fn required<T>(value: Option<T>, at: &str, name: &str) -> Result<T, ServiceError> {
    let field = format!("{at}.{name}");
    let message = format!("missing `{field}`");
    value.ok_or_else(|| ServiceError::invalid(field, message))
}

fn tools(BoundedList(tools): BoundedList<Json, 128>) -> Result<Value, ServiceError> {
    let tool = |(index, Json(tool)): (usize, Json)| {
        let is_function = |kind: &Value| kind.is_null() || kind == "custom";
        match tool {
            Value::Object(mut tool) if tool.get("type").is_none_or(is_function) => {
                let fields = [
                    ("name", "name"),
                    ("description", "description"),
                    ("input_schema", "parameters"),
                    ("strict", "strict"),
                ];
                let fields =
                    fields.into_iter().filter_map(|(name, to)| Some((to.to_owned(), tool.remove(name)?)));
                Ok(json!({"type": "function", "function": fields.collect::<Map<_, _>>()}))
            }
            tool => {
                let field = format!("tools[{index}].type");
                let kind = tool.get("type").and_then(Value::as_str).unwrap_or_default();
                let message = format!("unsupported `{field}`: expected custom, got {kind:?}; omit this tool");
                Err(ServiceError::invalid(field, message))
            }
        }
    };
    Ok(tools.into_iter().enumerate().map(tool).collect::<Result<Vec<_>, _>>()?.into())
}

/// Translates `tool_choice`. Also returns if calls may be parallel, if the client says so.
fn tool_choice(choice: ToolChoice) -> Result<(Value, Option<bool>), ServiceError> {
    let parallel = choice.disable_parallel_tool_use.map(|is_disabled| !is_disabled);
    let choice = match choice.kind.as_deref() {
        Some("auto") => "auto".into(),
        Some("any") => "required".into(),
        Some("none") => "none".into(),
        Some("tool") => {
            json!({"type": "function", "function": {"name": required(choice.name, "tool_choice", "name")?}})
        }
        other => {
            let message = format!(
                "invalid `tool_choice.type`: expected auto, any, tool or none, got {:?}",
                other.unwrap_or_default()
            );
            return Err(ServiceError::invalid("tool_choice.type", message));
        }
    };
    Ok((choice, parallel))
}

fn response_format(format: OutputFormat) -> Result<Value, ServiceError> {
    match format.kind.as_deref() {
        Some("json_schema") => {
            let Json(schema) = required(format.schema, "output_config.format", "schema")?;
            Ok(json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}))
        }
        other => {
            let message = format!(
                "invalid `output_config.format.type`: expected json_schema, got {:?}",
                other.unwrap_or_default()
            );
            Err(ServiceError::invalid("output_config.format.type", message))
        }
    }
}
