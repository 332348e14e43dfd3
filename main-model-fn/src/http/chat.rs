//! `/v1/chat/completions`.

use super::fields::Logprobs;
use super::generate::{AnswerOptions, Generation, Route, Shared, answer};
use super::messages::{self, Messages};
use super::request_body::RequestBody;
use super::state::HttpState;
use super::text_frontend::{self, TextFrontend};
use super::tools::{self, Asked, Calls, Format};
use super::{effort, sampling, structured};
use axum::extract::{self, State};
use axum::response::Response;
use remoe_http::ApiError;
use remoe_model::text::Rendering;
use remoe_wire::ServiceError;
use std::sync::Arc;

pub(super) async fn handle(
    State(state): State<Arc<HttpState>>,
    request: extract::Request,
) -> Result<Response, ApiError> {
    answer(state, request, check).await
}

pub(super) fn check(state: &HttpState, mut body: RequestBody) -> Result<Generation, ServiceError> {
    let effort = std::mem::take(&mut body.reasoning_effort);
    let shared = Shared::new(state, &body)?;
    if body.echo == Some(true) {
        return Err(ServiceError::invalid("echo", "`echo` is supported by /v1/completions only"));
    }
    let max_tokens = sampling::max_tokens(&body, 1)?;
    let logprobs = logprobs(&body)?;
    let text = state.text.as_ref().ok_or_else(|| {
        let message = "chats need a tokenizer, which this model lacks; use /v1/completions with token ids";
        ServiceError::invalid("messages", message)
    })?;
    let mut structure = structured::take(&mut body)?;
    let asked = Asked::take(&mut body)?;
    let messages =
        body.messages.take().ok_or_else(|| ServiceError::invalid("messages", "missing `messages`"))?;
    let rendering = Rendering {
        tools: asked.as_ref().map(|asked| asked.tools.as_slice()),
        reasoning_effort: effort::of(&effort, text.template())?,
        add_generation_prompt: body.add_generation_prompt.unwrap_or(true),
    };
    let prompt = prompt(state, text.as_ref(), messages, rendering)?;
    // The template has written the special tokens.
    let special = body.add_special_tokens.unwrap_or(false);
    let context = state.engine.limits().context_length;
    let prompt = text_frontend::encode(text.as_ref(), context, "messages", &prompt, special)?;
    let max_tokens = max_tokens.unwrap_or_else(|| {
        let usual = state.options.defaults.max_new_tokens.unwrap_or(usize::MAX);
        shared.room(&prompt).min(usual.max(1))
    });
    let mut request = shared.request(prompt, max_tokens, logprobs)?;
    let mut options = AnswerOptions::new(state, &body, logprobs.is_some());
    options.tools = asked.is_some();
    let format = state.tool_format.unwrap_or(Format::Hermes);
    // The answers of gpt-oss have several voices, whether it may call or not.
    let asked = asked.or_else(|| (format == Format::Harmony).then(Asked::default));
    let tools = asked.map(|asked| Calls { format, asked });
    if let Some(calls) = &tools {
        let special = |marker: &str| text.token_id(marker).filter(|&id| text.is_special(id));
        structure = calls.structure(structure, special)?;
        request.shown = calls.format.markers().iter().filter_map(|marker| special(marker)).collect();
    }
    Ok(Generation { route: Route::Chat, requests: vec![request], structure, tools, echoes: None, options })
}

/// The prompt of a chat: `messages`, and what `rendering` has beside them, as the model's template writes them.
///
/// # Errors
/// A message cannot be used, or the template refuses.
pub(super) fn prompt(
    state: &HttpState,
    text: &dyn TextFrontend,
    messages: Messages,
    rendering: Rendering<'_>,
) -> Result<String, ServiceError> {
    let messages = messages::for_template(messages)?;
    match state.tool_format {
        // The template shows nothing of tools and their calls: the messages do.
        None => {
            let messages = tools::in_messages(messages, rendering.tools.unwrap_or_default());
            text.render_chat(&messages, Rendering { tools: None, ..rendering })
        }
        Some(_) => text.render_chat(&messages, rendering),
    }
}

fn logprobs(body: &RequestBody) -> Result<Option<usize>, ServiceError> {
    let wanted = match body.logprobs {
        None => false,
        Some(Logprobs::Flag(flag)) => flag,
        Some(Logprobs::Count(_)) => {
            return Err(ServiceError::invalid(
                "logprobs",
                "invalid `logprobs`: expected true or false; `top_logprobs` sets their number",
            ));
        }
    };
    let top = sampling::alternatives("top_logprobs", body.top_logprobs)?;
    if top.is_some_and(|top| top > 0) && !wanted {
        return Err(ServiceError::invalid("top_logprobs", "`top_logprobs` requires `logprobs: true`"));
    }
    Ok(wanted.then(|| top.unwrap_or(0)))
}
