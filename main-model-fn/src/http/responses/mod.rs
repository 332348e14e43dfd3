//! `/v1/responses`: OpenAI's API of items.
//!
//! ```text
//! body (types) -> chat (translated to a chat) -> chat::check -> answer (items and events of the pieces)
//! ```
//!
//! This function stores no responses: a gateway replaces `previous_response_id` by the items of that response.

mod answer;
mod body;
mod chat;
mod item;

use super::answer_shape::AnswerShape;
use super::generate::{PreparedGeneration, answer_shaped};
use super::state::HttpState;
use super::translated::checked;
use answer::ResponseShape;
use axum::extract::{self, State};
use axum::response::Response;
use body::ResponsesBody;
use remoe_http::ApiError;
use remoe_http::internal_headers::RESOLVED;
use remoe_proto::ServiceError;
use std::sync::Arc;

/// Fields of chats, and their names in this API.
const NAMES: [(&str, &str); 8] = [
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("].function.", "]."),
    ("].function", "]"),
    ("messages", "input"),
];

pub(super) async fn handle(
    State(state): State<Arc<HttpState>>,
    request: extract::Request,
) -> Result<Response, ApiError> {
    let is_resolved = request.headers().contains_key(RESOLVED);
    answer_shaped(state, request, move |state, body| check(state, body, is_resolved)).await
}

/// Checks `body`. `is_resolved`: a gateway has put the items of a previous response before the input.
pub(super) fn check(
    state: &HttpState,
    mut body: ResponsesBody,
    is_resolved: bool,
) -> Result<(PreparedGeneration, Box<dyn AnswerShape>), ServiceError> {
    body.refuse(is_resolved)?;
    let shape = ResponseShape::new(&body);
    let generation = checked(state, body.into_chat()?, &NAMES)?;
    Ok((generation, Box::new(shape)))
}
