//! `/v1/chat/completions`.

use super::fields::Logprobs;
use super::generate::{AnswerOptions, PreparedGeneration, PromptSettings, Route, answer};
use super::messages::{self, Messages};
use super::reasoning::ReasoningOptions;
use super::request_body::RequestBody;
use super::state::HttpState;
use super::text_frontend::{self, TextFrontend};
use super::tools::{self, AnswerForm, CallableTools};
use super::{sampling, structured};
use axum::extract::{self, State};
use axum::response::Response;
use remoe_http::ApiError;
use remoe_model::text::Rendering;
use remoe_proto::ServiceError;
use std::sync::Arc;

pub(super) async fn handle(
    State(state): State<Arc<HttpState>>,
    request: extract::Request,
) -> Result<Response, ApiError> {
    answer(state, request, check).await
}

pub(super) fn check(state: &HttpState, mut body: RequestBody) -> Result<PreparedGeneration, ServiceError> {
    let dialect = &state.dialect;
    let reasoning = match state.text.as_deref() {
        Some(text) => ReasoningOptions::take(&mut body, text, dialect, &state.options.template_variables)?,
        None => ReasoningOptions::default(),
    };
    let shared = PromptSettings::new(state, &body)?;
    if body.echo == Some(true) {
        return Err(ServiceError::invalid("echo", "`echo` is supported by /v1/completions only"));
    }
    let max_tokens = sampling::max_tokens(&body, 1)?;
    let logprobs = logprobs(&body)?;
    let text = state.text.as_ref().ok_or_else(|| {
        let message = "chats need a tokenizer, which this model lacks; use /v1/completions with token ids";
        ServiceError::invalid("messages", message)
    })?;
    let whitespace = structured::whitespace(&body)?;
    let mut structure = structured::take(&mut body)?;
    let tools = CallableTools::take(&mut body)?;
    let messages =
        body.messages.take().ok_or_else(|| ServiceError::invalid("messages", "missing `messages`"))?;
    let rendering = Rendering {
        tools: tools.as_ref().map(|tools| tools.tools.as_slice()),
        reasoning_effort: reasoning.effort,
        kwargs: Some(&reasoning.variables),
        add_generation_prompt: body.add_generation_prompt.unwrap_or(true),
    };
    let prompt = prompt(state, text.as_ref(), messages, rendering)?;
    let thinking = reasoning.thinking(dialect, &prompt);
    // The template contains the special tokens already.
    let special = body.add_special_tokens.unwrap_or(false);
    let context = state.engine.limits().context_length;
    let prompt = text_frontend::encode(text.as_ref(), context, "messages", &prompt, special)?;
    let max_tokens = max_tokens.unwrap_or_else(|| {
        let usual = state.options.defaults.max_new_tokens.unwrap_or(usize::MAX);
        shared.max_completion(&prompt).min(usual.max(1))
    });
    let mut request = shared.request(prompt, max_tokens, logprobs)?;
    let mut options = AnswerOptions::new(state, &body, logprobs.is_some());
    let form = AnswerForm { format: dialect.format, tools: tools.unwrap_or_default(), thinking };
    options.may_lack_content = form.may_lack_content();
    request.thought_budget = reasoning.thought_budget(dialect, thinking, text.as_ref())?;
    let special = |marker: &str| text.token_id(marker).filter(|&id| text.is_special(id));
    structure = form.structure(structure, &whitespace, special)?;
    request.shown = form.markers().filter_map(special).collect();
    Ok(PreparedGeneration {
        route: Route::Chat,
        requests: vec![request],
        structure,
        form: Some(form),
        echoes: None,
        options,
    })
}

/// Renders the prompt of a chat by the model's template.
///
/// # Errors
/// Fails if a message is invalid, or if the template refuses it.
pub(super) fn prompt(
    state: &HttpState,
    text: &dyn TextFrontend,
    messages: Messages,
    rendering: Rendering<'_>,
) -> Result<String, ServiceError> {
    let messages = messages::for_template(messages)?;
    let dialect = &state.dialect;
    let tools = rendering.tools.unwrap_or_default();
    let messages = tools::adapt_messages(dialect, messages, tools);
    let tools = rendering.tools.filter(|_| dialect.shows_tools);
    text.render_chat(&messages, Rendering { tools, ..rendering })
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
