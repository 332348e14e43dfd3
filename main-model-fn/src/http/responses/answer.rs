//! Answer of `/v1/responses`: output items, and the events that build them.

use super::body::ResponsesBody;
use crate::http::answer_shape::{AnswerShape, event};
use crate::http::fields::{BoundedList, Json, Object};
use crate::http::pieces::ChoicePiece;
use crate::http::running::RunningGeneration;
use crate::http::state::{HttpState, unix_seconds};
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use remoe_http::random_id;
use remoe_proto::ServiceError;
use serde_json::{Map, Value, json};

/// One answer while it grows.
pub(super) struct ResponseShape {
    id: String,
    created: u64,
    /// Request fields that the answer repeats.
    repeated: Map<String, Value>,
    items: Vec<Item>,
    /// Finish reason, once the answer has ended.
    finish: Option<&'static str>,
    /// Number of events so far.
    sequence: u64,
}

/// An output item.
struct Item {
    id: String,
    kind: ItemKind,
    /// Text or arguments so far.
    text: String,
    status: &'static str,
}

#[derive(Debug, Clone, PartialEq)]
enum ItemKind {
    Reasoning,
    Message,
    /// A tool call, with its index in the pieces.
    Call {
        index: usize,
        call_id: String,
        name: String,
    },
}

const IN_PROGRESS: &str = "in_progress";
const COMPLETED: &str = "completed";
const INCOMPLETE: &str = "incomplete";

impl Item {
    fn new(kind: ItemKind) -> Self {
        let prefix = match kind {
            ItemKind::Reasoning => "rs",
            ItemKind::Message => "msg",
            ItemKind::Call { .. } => "fc",
        };
        Self { id: format!("{prefix}_{}", random_id()), kind, text: String::new(), status: IN_PROGRESS }
    }

    /// Returns the only content part; calls have none.
    fn part(&self, text: &str) -> Option<Value> {
        match self.kind {
            ItemKind::Reasoning => Some(json!({"type": "reasoning_text", "text": text})),
            ItemKind::Message => {
                Some(json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}))
            }
            ItemKind::Call { .. } => None,
        }
    }

    /// Returns the item as JSON; without its text while it is in progress.
    fn json(&self) -> Value {
        let is_open = self.status == IN_PROGRESS;
        let parts: Vec<Value> = self.part(&self.text).into_iter().filter(|_| !is_open).collect();
        match &self.kind {
            ItemKind::Reasoning => {
                json!({"id": self.id, "type": "reasoning", "summary": [], "content": parts, "status": self.status})
            }
            ItemKind::Message => {
                json!({"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": parts})
            }
            ItemKind::Call { call_id, name, .. } => {
                let arguments = if is_open { "" } else { self.text.as_str() };
                json!({
                    "id": self.id, "type": "function_call", "status": self.status, "call_id": call_id,
                    "name": name, "arguments": arguments,
                })
            }
        }
    }
}

impl ResponseShape {
    pub(super) fn new(body: &ResponsesBody) -> Self {
        let id = format!("resp_{}", random_id());
        let (created, repeated) = (unix_seconds(), repeated(body));
        Self { id, created, repeated, items: Vec::new(), finish: None, sequence: 0 }
    }

    /// Returns the response in `status`, with its output once it has ended.
    fn response(&self, state: &HttpState, status: &str, usage: Value, error: Value) -> Value {
        let incomplete = match status {
            INCOMPLETE => json!({"reason": "max_output_tokens"}),
            _ => Value::Null,
        };
        let output: Vec<Value> = match status {
            IN_PROGRESS => Vec::new(),
            _ => self.items.iter().map(Item::json).collect(),
        };
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": false,
            "error": error,
            "incomplete_details": incomplete,
            "model": state.options.model,
            "output": output,
        });
        if let Value::Object(fields) = &mut response {
            fields.extend(self.repeated.clone());
            fields.insert("usage".to_owned(), usage);
        }
        response
    }

    fn ended(&self) -> &'static str {
        if self.finish == Some("length") { INCOMPLETE } else { COMPLETED }
    }

    fn event(&mut self, name: &'static str, fields: Value) -> Result<Event, ServiceError> {
        let mut data = Map::new();
        data.insert("type".to_owned(), name.into());
        data.insert("sequence_number".to_owned(), self.sequence.into());
        self.sequence += 1;
        if let Value::Object(fields) = fields {
            data.extend(fields);
        }
        event(Some(name), &data)
    }

    /// Adds a piece.
    fn add(&mut self, piece: ChoicePiece) -> Result<Vec<Event>, ServiceError> {
        let mut events = Vec::new();
        if !piece.reasoning.is_empty() {
            self.append(ItemKind::Reasoning, &piece.reasoning, &mut events)?;
        }
        if !piece.text.is_empty() {
            self.append(ItemKind::Message, &piece.text, &mut events)?;
        }
        for call in piece.calls {
            match call.start {
                Some((call_id, name)) => {
                    let kind = ItemKind::Call { index: call.index, call_id, name };
                    self.append(kind, &call.arguments, &mut events)?;
                }
                None => {
                    let is_it = |item: &Item| matches!(item.kind, ItemKind::Call { index, .. } if index == call.index);
                    if let Some(place) = self.items.iter().position(is_it) {
                        self.append_at(place, &call.arguments, &mut events)?;
                    }
                }
            }
        }
        if piece.finish.is_some() {
            self.finish = piece.finish;
            self.close(self.ended(), &mut events)?;
            let has_answer = self.items.iter().any(|item| item.kind != ItemKind::Reasoning);
            if !has_answer && self.ended() == COMPLETED {
                self.append(ItemKind::Message, "", &mut events)?;
                self.close(COMPLETED, &mut events)?;
            }
        }
        Ok(events)
    }

    /// Adds `text` to the last item, or to a new one if the last is of another kind.
    fn append(&mut self, kind: ItemKind, text: &str, events: &mut Vec<Event>) -> Result<(), ServiceError> {
        let goes_on = |item: &Item| item.kind == kind && item.status == IN_PROGRESS;
        if !self.items.last().is_some_and(goes_on) {
            self.close(COMPLETED, events)?;
            let item = Item::new(kind);
            let place = self.items.len();
            events.push(
                self.event(
                    "response.output_item.added",
                    json!({"output_index": place, "item": item.json()}),
                )?,
            );
            if let Some(part) = item.part("") {
                let fields = json!({
                    "item_id": item.id, "output_index": place, "content_index": 0, "part": part,
                });
                events.push(self.event("response.content_part.added", fields)?);
            }
            self.items.push(item);
        }
        self.append_at(self.items.len() - 1, text, events)
    }

    /// Adds `text` to the item at index `place`.
    fn append_at(&mut self, place: usize, text: &str, events: &mut Vec<Event>) -> Result<(), ServiceError> {
        let Some(item) = self.items.get_mut(place).filter(|_| !text.is_empty()) else { return Ok(()) };
        item.text.push_str(text);
        let mut fields = json!({"item_id": item.id, "output_index": place, "delta": text});
        let name = match item.kind {
            ItemKind::Reasoning => "response.reasoning_text.delta",
            ItemKind::Message => "response.output_text.delta",
            ItemKind::Call { .. } => "response.function_call_arguments.delta",
        };
        of_content(&item.kind, &mut fields);
        events.push(self.event(name, fields)?);
        Ok(())
    }

    /// Ends the last item.
    fn close(&mut self, status: &'static str, events: &mut Vec<Event>) -> Result<(), ServiceError> {
        let place = self.items.len().saturating_sub(1);
        let Some(item) = self.items.last_mut().filter(|item| item.status == IN_PROGRESS) else {
            return Ok(());
        };
        item.status = status;
        let (name, field) = match item.kind {
            ItemKind::Reasoning => ("response.reasoning_text.done", "text"),
            ItemKind::Message => ("response.output_text.done", "text"),
            ItemKind::Call { .. } => ("response.function_call_arguments.done", "arguments"),
        };
        let mut done = json!({"item_id": item.id, "output_index": place});
        of_content(&item.kind, &mut done);
        done[field] = item.text.clone().into();
        if let ItemKind::Call { name, .. } = &item.kind {
            done["name"] = name.clone().into();
        }
        let part = item
            .part(&item.text)
            .map(|part| json!({"item_id": item.id, "output_index": place, "content_index": 0, "part": part}));
        let whole = json!({"output_index": place, "item": item.json()});
        events.push(self.event(name, done)?);
        if let Some(part) = part {
            events.push(self.event("response.content_part.done", part)?);
        }
        events.push(self.event("response.output_item.done", whole)?);
        Ok(())
    }
}

/// Adds the fields that events of content parts have in addition.
fn of_content(kind: &ItemKind, fields: &mut Value) {
    if !matches!(kind, ItemKind::Call { .. }) {
        fields["content_index"] = 0.into();
    }
    if *kind == ItemKind::Message {
        fields["logprobs"] = json!([]);
    }
}

impl AnswerShape for ResponseShape {
    fn prompt_field(&self) -> &'static str {
        "input"
    }

    fn begin(&mut self, state: &HttpState) -> Result<Vec<Event>, ServiceError> {
        let response = self.response(state, IN_PROGRESS, Value::Null, Value::Null);
        let created = self.event("response.created", json!({"response": response}))?;
        Ok(vec![created, self.event("response.in_progress", json!({"response": response}))?])
    }

    fn piece(&mut self, _state: &HttpState, piece: ChoicePiece) -> Result<Vec<Event>, ServiceError> {
        self.add(piece)
    }

    fn end(&mut self, state: &HttpState, running: &RunningGeneration) -> Result<Vec<Event>, ServiceError> {
        let status = self.ended();
        let response = self.response(state, status, usage(running), Value::Null);
        let name = if status == COMPLETED { "response.completed" } else { "response.incomplete" };
        Ok(vec![self.event(name, json!({"response": response}))?])
    }

    fn failed(&mut self, state: &HttpState, error: ServiceError) -> Result<Event, ServiceError> {
        // OpenAI's only code for server faults.
        let error = json!({"code": "server_error", "message": error.message});
        let response = self.response(state, "failed", Value::Null, error);
        self.event("response.failed", json!({"response": response}))
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
        Ok(axum::Json(self.response(state, self.ended(), usage(running), Value::Null)).into_response())
    }
}

fn usage(running: &RunningGeneration) -> Value {
    let figures = running.figures();
    json!({
        "input_tokens": figures.prompt_tokens,
        "input_tokens_details": {"cached_tokens": figures.cached_tokens},
        "output_tokens": figures.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": running.reasoning_tokens},
        "total_tokens": figures.prompt_tokens + figures.completion_tokens,
    })
}

/// Returns the fields of `body` that the answer repeats.
fn repeated(body: &ResponsesBody) -> Map<String, Value> {
    let tools: Vec<&Value> = match &body.tools {
        Some(BoundedList(tools)) => tools.iter().map(|Json(tool)| tool).collect(),
        None => Vec::new(),
    };
    let format = body.text.as_ref().and_then(|text| text.0.format.as_ref());
    let format = match format {
        None => json!({"type": "text"}),
        Some(Object(format)) => {
            let mut repeated = json!({"type": format.kind});
            if let Some(Json(schema)) = &format.schema {
                repeated["name"] = json!(format.name);
                repeated["schema"] = schema.clone();
                repeated["strict"] = json!(format.strict);
            }
            repeated
        }
    };
    let reasoning = body.reasoning.as_ref().map(|Object(reasoning)| reasoning);
    let choice = body.tool_choice.as_ref().map(|Json(choice)| choice).filter(|choice| !choice.is_null());
    let fields = json!({
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata.as_ref().map_or_else(|| json!({}), |Json(metadata)| metadata.clone()),
        "parallel_tool_calls": body.parallel_tool_calls.unwrap_or(true),
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": reasoning.and_then(|reasoning| reasoning.effort.as_deref()),
            "summary": reasoning.and_then(|reasoning| reasoning.summary.as_deref()),
        },
        "service_tier": "default",
        "store": body.store.unwrap_or(true),
        "temperature": body.temperature,
        "text": {"format": format},
        "tool_choice": choice.cloned().unwrap_or_else(|| "auto".into()),
        "tools": tools,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}
