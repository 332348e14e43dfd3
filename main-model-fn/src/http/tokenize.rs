//! `/tokenize` and `/detokenize`: token ids of a text or chat, and the text of token ids.

use super::fields::{Given, Json as JsonField, Object};
use super::messages::Messages;
use super::reasoning::{Reasoning, ReasoningFields, ReasoningOptions};
use super::state::HttpState;
use super::tools::{CallableTools, Tools};
use super::{body, chat, text_frontend};
use axum::Json;
use axum::extract::{self, State};
use remoe_http::ApiError;
use remoe_model::text::Rendering;
use remoe_proto::ServiceError;
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
    tools: Option<Tools>,
    reasoning_effort: Given,
    reasoning: Option<Object<Reasoning>>,
    enable_thinking: Option<bool>,
    chat_template_kwargs: Option<JsonField>,
}

#[derive(Serialize)]
pub(super) struct Tokenized {
    tokens: Vec<u32>,
    count: usize,
    max_model_len: usize,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct DetokenizeBody {
    model: Option<String>,
    tokens: Option<Vec<u32>>,
}

#[derive(Serialize)]
pub(super) struct Detokenized {
    prompt: String,
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
    let text = state.text.as_ref().ok_or_else(|| no_tokenizer(field))?;
    let context = state.engine.limits().context_length;
    let encode =
        |content: &str, special| text_frontend::encode(text.as_ref(), context, field, content, special);
    let tokens = match (body.prompt, body.messages) {
        (Some(prompt), None) => encode(&prompt, body.add_special_tokens.unwrap_or(true))?,
        (None, Some(messages)) => {
            let tools = CallableTools::new(body.tools, None, None)?;
            let variables = &state.options.template_variables;
            let reasoning = ReasoningFields {
                reasoning_effort: body.reasoning_effort,
                reasoning: body.reasoning,
                enable_thinking: body.enable_thinking,
                thinking_token_budget: None,
                chat_template_kwargs: body.chat_template_kwargs,
            };
            let reasoning = ReasoningOptions::new(reasoning, text.as_ref(), &state.dialect, variables)?;
            let rendering = Rendering {
                tools: tools.as_ref().map(|tools| tools.tools.as_slice()),
                reasoning_effort: reasoning.effort,
                kwargs: Some(&reasoning.variables),
                add_generation_prompt: body.add_generation_prompt.unwrap_or(true),
            };
            let prompt = chat::prompt(state, text.as_ref(), messages, rendering)?;
            encode(&prompt, body.add_special_tokens.unwrap_or(false))?
        }
        _ => {
            return Err(ServiceError::invalid("prompt", "expected either `prompt` or `messages`"));
        }
    };
    Ok(Tokenized { count: tokens.len(), tokens, max_model_len: context })
}

fn no_tokenizer(field: &str) -> ServiceError {
    ServiceError::invalid(field, "this route needs a tokenizer, which this model lacks")
}

pub(super) async fn handle_back(
    State(state): State<Arc<HttpState>>,
    request: extract::Request,
) -> Result<Json<Detokenized>, ApiError> {
    body::read(&state, request, detokenize).await.map(Json)
}

/// Includes special tokens, as `/tokenize` accepts them.
fn detokenize(state: &HttpState, body: DetokenizeBody) -> Result<Detokenized, ServiceError> {
    const FIELD: &str = "tokens";
    state.check_model(body.model.as_deref())?;
    let text = state.text.as_ref().ok_or_else(|| no_tokenizer(FIELD))?;
    let tokens = body.tokens.ok_or_else(|| ServiceError::invalid(FIELD, "missing `tokens`"))?;
    // Bounds the text: an id of a few digits may stand for a long text.
    let context = state.engine.limits().context_length;
    if tokens.len() > context {
        let message = format!(
            "too many tokens: expected at most {context} (the model's context), got {}",
            tokens.len()
        );
        return Err(ServiceError::invalid(FIELD, message));
    }
    let prompt = text.decode(&tokens, true);
    Ok(Detokenized {
        prompt: prompt.map_err(|error| if error.field.is_some() { error.about(FIELD) } else { error })?,
    })
}
