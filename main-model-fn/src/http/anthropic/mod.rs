//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API of content blocks.
//!
//! ```text
//! body (types) -> chat (translated to a chat) -> chat::check -> answer (blocks and events of the pieces)
//! ```
//!
//! Errors get Anthropic's format in `remoe_http::shape_messages_errors`.

mod answer;
mod block;
mod body;
mod chat;

use super::answer_shape::AnswerShape;
use super::body as request_bytes;
use super::generate::{PreparedGeneration, answer_shaped};
use super::state::HttpState;
use super::translated::checked;
use answer::MessageShape;
use axum::Json;
use axum::extract::{self, State};
use axum::response::Response;
use body::MessagesBody;
use remoe_http::ApiError;
use remoe_proto::ServiceError;
use serde::Serialize;
use std::sync::Arc;

/// Fields of chats, and their names in this API.
const NAMES: [(&str, &str); 10] = [
    ("].function.parameters", "].input_schema"),
    ("].function.", "]."),
    ("].function", "]"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("reasoning.enabled", "thinking.type"),
    ("reasoning.max_tokens", "thinking.budget_tokens"),
    ("max_completion_tokens", "max_tokens"),
    ("stop", "stop_sequences"),
];

/// Body of an answer of `/v1/messages/count_tokens`.
#[derive(Debug, Serialize)]
pub(super) struct TokenCount {
    input_tokens: usize,
}

pub(super) async fn handle(
    State(state): State<Arc<HttpState>>,
    request: extract::Request,
) -> Result<Response, ApiError> {
    answer_shaped(state, request, check).await
}

pub(super) async fn handle_count(
    State(state): State<Arc<HttpState>>,
    request: extract::Request,
) -> Result<Json<TokenCount>, ApiError> {
    request_bytes::read(&state, request, count).await.map(Json)
}

/// Checks `body`.
pub(super) fn check(
    state: &HttpState,
    body: MessagesBody,
) -> Result<(PreparedGeneration, Box<dyn AnswerShape>), ServiceError> {
    if body.max_tokens.is_none() {
        return Err(ServiceError::invalid("max_tokens", "missing `max_tokens`"));
    }
    body.refuse()?;
    let stops = body.stop_sequences.clone().unwrap_or_default();
    let generation = checked(state, body.into_chat()?, &NAMES)?;
    let prompt_tokens = generation.requests.first().map_or(0, |request| request.prompt.len());
    Ok((generation, Box::new(MessageShape::new(stops, prompt_tokens))))
}

fn count(state: &HttpState, body: MessagesBody) -> Result<TokenCount, ServiceError> {
    body.refuse()?;
    let generation = checked(state, body.into_chat()?, &NAMES)?;
    Ok(TokenCount { input_tokens: generation.requests.iter().map(|request| request.prompt.len()).sum() })
}
