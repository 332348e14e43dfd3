//! `/tokenize`: the ids of a text or of a chat.

use super::body;
use super::messages::{self, Messages};
use super::state::HttpState;
use super::text;
use axum::Json;
use axum::extract::{self, State};
use remoe_http::ApiError;
use remoe_wire::ServiceError;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TokenizeBody {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Messages>,
    add_special_tokens: Option<bool>,
    add_generation_prompt: Option<bool>,
}

#[derive(Serialize)]
pub(super) struct Tokenized {
    tokens: Vec<u32>,
    count: usize,
    max_model_len: usize,
}

pub(super) async fn handle(
    State(state): State<Arc<HttpState>>,
    request: extract::Request,
) -> Result<Json<Tokenized>, ApiError> {
    body::read(&state, request, tokenize).await.map(Json)
}

fn tokenize(state: &HttpState, body: TokenizeBody) -> Result<Tokenized, ServiceError> {
    state.check_model(body.model.as_deref())?;
    let field = if body.messages.is_some() { "messages" } else { "prompt" };
    let text =
        state.text.as_ref().ok_or_else(|| ServiceError::invalid(field, "the model has no tokenizer"))?;
    let context = state.engine.limits().context_length;
    let encode = |content: &str, special| text::encode(text.as_ref(), context, field, content, special);
    let tokens = match (body.prompt, body.messages) {
        (Some(prompt), None) => encode(&prompt, body.add_special_tokens.unwrap_or(true))?,
        (None, Some(messages)) => {
            let messages = messages::for_template(messages)?;
            let prompt = text.render_chat(&messages, None, body.add_generation_prompt.unwrap_or(true))?;
            encode(&prompt, body.add_special_tokens.unwrap_or(false))?
        }
        _ => {
            return Err(ServiceError::invalid("prompt", "either `prompt` or `messages` is needed, not both"));
        }
    };
    Ok(Tokenized { count: tokens.len(), tokens, max_model_len: context })
}
