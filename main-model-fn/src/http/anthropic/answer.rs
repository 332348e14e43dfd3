//! Answer of `/v1/messages`: content blocks, and the events that build them.

use crate::http::answer_shape::{AnswerShape, event};
use crate::http::pieces::ChoicePiece;
use crate::http::running::RunningGeneration;
use crate::http::state::HttpState;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use remoe_http::{messages_error, random_id};
use remoe_proto::ServiceError;
use serde_json::{Map, Value, json};

/// One answer while it grows.
pub(super) struct MessageShape {
    id: String,
    stops: Vec<String>,
    prompt_tokens: usize,
    blocks: Vec<Block>,
    /// True while the last block is open.
    is_open: bool,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
}

/// A content block: its kind, and its text or arguments so far.
struct Block {
    kind: BlockKind,
    text: String,
}

#[derive(Debug, Clone, PartialEq)]
enum BlockKind {
    Thinking,
    Text,
    /// A tool call, with its index in the pieces.
    ToolUse {
        index: usize,
        id: String,
        name: String,
    },
}

impl Block {
    fn json(&self) -> Value {
        match &self.kind {
            BlockKind::Thinking => json!({"type": "thinking", "thinking": self.text, "signature": ""}),
            BlockKind::Text => json!({"type": "text", "text": self.text}),
            BlockKind::ToolUse { id, name, .. } => {
                json!({"type": "tool_use", "id": id, "name": name, "input": input(&self.text)})
            }
        }
    }

    /// Returns the delta that adds `text`.
    fn delta(&self, text: &str) -> Value {
        match self.kind {
            BlockKind::Thinking => json!({"type": "thinking_delta", "thinking": text}),
            BlockKind::Text => json!({"type": "text_delta", "text": text}),
            BlockKind::ToolUse { .. } => json!({"type": "input_json_delta", "partial_json": text}),
        }
    }
}

/// Returns arguments as an object. Invalid arguments, as of an answer that was cut off, become the field `arguments`: an
/// empty object could be mistaken for a valid call.
fn input(arguments: &str) -> Value {
    match serde_json::from_str::<Map<String, Value>>(arguments) {
        Ok(input) => input.into(),
        Err(_) if arguments.is_empty() => json!({}),
        Err(_) => json!({"arguments": arguments}),
    }
}

impl MessageShape {
    pub(super) fn new(stops: Vec<String>, prompt_tokens: usize) -> Self {
        Self {
            id: format!("msg_{}", random_id()),
            stops,
            prompt_tokens,
            blocks: Vec::new(),
            is_open: false,
            stop_reason: None,
            stop_sequence: None,
        }
    }

    fn message(&self, state: &HttpState, usage: Value) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": state.options.model,
            "content": self.blocks.iter().map(Block::json).collect::<Vec<_>>(),
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": usage,
        })
    }

    /// Adds a piece.
    fn add(&mut self, piece: ChoicePiece) -> Result<Vec<Event>, ServiceError> {
        let mut events = Vec::new();
        if !piece.reasoning.is_empty() {
            self.append(BlockKind::Thinking, &piece.reasoning, &mut events)?;
        }
        if !piece.text.is_empty() {
            self.append(BlockKind::Text, &piece.text, &mut events)?;
        }
        for call in piece.calls {
            match call.start {
                Some((id, name)) => {
                    let kind = BlockKind::ToolUse { index: call.index, id, name };
                    self.append(kind, &call.arguments, &mut events)?;
                }
                None => {
                    let is_it = |block: &Block| matches!(block.kind, BlockKind::ToolUse { index, .. } if index == call.index);
                    if let Some(place) = self.blocks.iter().position(is_it) {
                        self.append_at(place, &call.arguments, &mut events)?;
                    }
                }
            }
        }
        if let Some(finish) = piece.finish {
            self.stop_sequence = piece.stopped_by.and_then(|place| self.stops.get(place)).cloned();
            self.stop_reason = Some(match finish {
                "length" => "max_tokens",
                "tool_calls" => "tool_use",
                _ if self.stop_sequence.is_some() => "stop_sequence",
                _ => "end_turn",
            });
            self.close(&mut events)?;
        }
        Ok(events)
    }

    /// Adds `text` to the last block, or to a new one if the last is of another kind.
    fn append(&mut self, kind: BlockKind, text: &str, events: &mut Vec<Event>) -> Result<(), ServiceError> {
        if !self.is_open || self.blocks.last().is_none_or(|block| block.kind != kind) {
            self.close(events)?;
            let block = Block { kind, text: String::new() };
            let fields = json!({"index": self.blocks.len(), "content_block": block.json()});
            events.push(named("content_block_start", fields)?);
            self.blocks.push(block);
            self.is_open = true;
        }
        self.append_at(self.blocks.len() - 1, text, events)
    }

    /// Adds `text` to the block at index `place`.
    fn append_at(&mut self, place: usize, text: &str, events: &mut Vec<Event>) -> Result<(), ServiceError> {
        if let Some(block) = self.blocks.get_mut(place).filter(|_| !text.is_empty()) {
            block.text.push_str(text);
            let fields = json!({"index": place, "delta": block.delta(text)});
            events.push(named("content_block_delta", fields)?);
        }
        Ok(())
    }

    fn close(&mut self, events: &mut Vec<Event>) -> Result<(), ServiceError> {
        if std::mem::take(&mut self.is_open) {
            let fields = json!({"index": self.blocks.len().saturating_sub(1)});
            events.push(named("content_block_stop", fields)?);
        }
        Ok(())
    }
}

/// Creates an event whose data repeats its name, as in all events of this API.
fn named(name: &'static str, fields: Value) -> Result<Event, ServiceError> {
    let mut data = Map::new();
    data.insert("type".to_owned(), name.into());
    if let Value::Object(fields) = fields {
        data.extend(fields);
    }
    event(Some(name), &data)
}

/// Formats the usage. Tokens from the prefix cache do not count as `input_tokens`, as in Anthropic's API.
fn usage(input_tokens: usize, cached_tokens: usize, output_tokens: usize) -> Value {
    json!({
        "input_tokens": input_tokens.saturating_sub(cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    })
}

fn final_usage(running: &RunningGeneration) -> Value {
    let figures = running.figures();
    usage(figures.prompt_tokens, figures.cached_tokens, figures.completion_tokens)
}

impl AnswerShape for MessageShape {
    fn prompt_field(&self) -> &'static str {
        "messages"
    }

    fn begin(&mut self, state: &HttpState) -> Result<Vec<Event>, ServiceError> {
        let message = self.message(state, usage(self.prompt_tokens, 0, 0));
        Ok(vec![named("message_start", json!({"message": message}))?])
    }

    fn piece(&mut self, _state: &HttpState, piece: ChoicePiece) -> Result<Vec<Event>, ServiceError> {
        self.add(piece)
    }

    fn end(&mut self, _state: &HttpState, running: &RunningGeneration) -> Result<Vec<Event>, ServiceError> {
        let delta = json!({"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence});
        let delta = named("message_delta", json!({"delta": delta, "usage": final_usage(running)}))?;
        Ok(vec![delta, named("message_stop", json!({}))?])
    }

    fn failed(&mut self, _state: &HttpState, error: ServiceError) -> Result<Event, ServiceError> {
        event(Some("error"), &messages_error(error.code.http_status(), &error.message))
    }

    fn whole(
        &mut self,
        state: &HttpState,
        pieces: Vec<ChoicePiece>,
        running: &RunningGeneration,
    ) -> Result<Response, ServiceError> {
        for piece in pieces {
            self.add(piece)?;
        }
        Ok(axum::Json(self.message(state, final_usage(running))).into_response())
    }
}
