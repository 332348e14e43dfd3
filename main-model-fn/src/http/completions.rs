//! `/v1/completions`.

use super::fields::{BoundedList, Given, Logprobs, PromptInput};
use super::fill_in::FillIn;
use super::generate::{AnswerOptions, PreparedGeneration, PromptSettings, Route, answer, special_text};
use super::request_body::RequestBody;
use super::state::HttpState;
use super::tools::ToolChoice;
use super::unsupported::unsupported;
use super::{sampling, structured, text_frontend};
use axum::extract::{self, State};
use axum::response::Response;
use remoe_http::ApiError;
use remoe_proto::ServiceError;
use std::sync::Arc;

/// Default of `max_tokens`, as in OpenAI's API.
const MAX_TOKENS: usize = 16;

pub(super) async fn handle(
    State(state): State<Arc<HttpState>>,
    request: extract::Request,
) -> Result<Response, ApiError> {
    answer(state, request, check).await
}

pub(super) fn check(state: &HttpState, mut body: RequestBody) -> Result<PreparedGeneration, ServiceError> {
    let fill_in = fill_in(state, &mut body)?;
    let shared = PromptSettings::new(state, &body)?;
    let echo = body.echo.unwrap_or(false);
    if echo && fill_in.is_some() {
        return Err(ServiceError::invalid("echo", "invalid `echo`: expected false beside `suffix`"));
    }
    let max_tokens = sampling::max_tokens(&body, 0)?;
    let logprobs = logprobs(&body)?;
    let structure = structured::take(&mut body)?;
    if body.tools.take().is_some_and(|BoundedList(tools)| !tools.is_empty()) {
        return Err(unsupported("tools"));
    }
    if body.tool_choice.take().is_some_and(|choice| choice != ToolChoice::Named("none".to_owned())) {
        return Err(unsupported("tool_choice"));
    }
    let prompts = body.prompt.take().ok_or_else(|| ServiceError::invalid("prompt", "missing `prompt`"))?.0;
    let most = state.engine.limits().max_requests;
    if prompts.len() > most {
        return Err(ServiceError::invalid(
            "prompt",
            format!("too many prompts: expected at most {most}, got {}", prompts.len()),
        ));
    }
    let mut requests = Vec::with_capacity(prompts.len());
    let mut echoes = Vec::new();
    let many = prompts.len() > 1;
    for (index, prompt) in prompts.into_iter().enumerate() {
        let field = if many { format!("prompt[{index}]") } else { "prompt".to_owned() };
        if echo {
            echoes.push(echo_of(state, &prompt, special_text(&body))?);
        }
        let prompt = match (&fill_in, prompt) {
            (None, prompt) => prompt,
            (Some((fill_in, suffix)), PromptInput::Text(prefix)) => {
                PromptInput::Text(fill_in.prompt(&prefix, suffix))
            }
            (Some(_), PromptInput::Ids(_)) => {
                let message = format!("invalid `{field}`: expected a text beside `suffix`, got token ids");
                return Err(ServiceError::invalid(&field, message));
            }
        };
        let ids = ids_of(state, &field, prompt, body.add_special_tokens.unwrap_or(true))?;
        let usual = MAX_TOKENS.min(state.options.defaults.max_new_tokens.unwrap_or(MAX_TOKENS)).max(1);
        let max_tokens = max_tokens.unwrap_or_else(|| shared.max_completion(&ids).min(usual));
        let mut request = shared.request(ids, max_tokens, logprobs)?;
        request.prompt_logprobs = logprobs.filter(|_| echo);
        if let Some((fill_in, _)) = fill_in.as_ref().filter(|_| !request.stop.ignore_eos) {
            request.stop.token_ids.extend(&fill_in.ends);
        }
        requests.push(request);
    }
    Ok(PreparedGeneration {
        route: Route::Completions,
        requests,
        structure,
        form: None,
        echoes: echo.then_some(echoes),
        options: AnswerOptions::new(state, &body, logprobs.is_some()),
    })
}

/// Takes `suffix`. Returns it with the model's format of fill-in-the-middle prompts.
///
/// # Errors
/// Fails if it is no text, or if the model has no such format.
fn fill_in(state: &HttpState, body: &mut RequestBody) -> Result<Option<(FillIn, String)>, ServiceError> {
    match std::mem::take(&mut body.suffix) {
        Given::Nothing => Ok(None),
        Given::Text(suffix) => {
            let fill_in = FillIn::of(|token| state.text.as_ref()?.token_id(token))?;
            Ok(Some((fill_in, suffix)))
        }
        Given::Something => Err(ServiceError::invalid("suffix", "invalid `suffix`: expected a text")),
    }
}

/// Encodes `prompt`, the value of `field`. If `special`, adds the tokens of the tokenizer's post-processor.
///
/// # Errors
/// Fails if there is no tokenizer, if it fails, or if the text is too long.
pub(super) fn ids_of(
    state: &HttpState,
    field: &str,
    prompt: PromptInput,
    special: bool,
) -> Result<Vec<u32>, ServiceError> {
    match (prompt, &state.text) {
        (PromptInput::Ids(ids), _) => Ok(ids),
        (PromptInput::Text(prompt), Some(text)) => text_frontend::encode(
            text.as_ref(),
            state.engine.limits().context_length,
            field,
            &prompt,
            special,
        ),
        (PromptInput::Text(_), None) => {
            let message = format!("invalid `{field}`: expected token ids, as this model has no tokenizer");
            Err(ServiceError::invalid(field, message))
        }
    }
}

fn echo_of(state: &HttpState, prompt: &PromptInput, special: bool) -> Result<String, ServiceError> {
    match (prompt, &state.text) {
        (PromptInput::Text(prompt), _) => Ok(prompt.clone()),
        // An id of a few digits may stand for a long text, so a prompt that the engine refuses as too long is not decoded.
        (PromptInput::Ids(ids), Some(_)) if ids.len() > state.engine.limits().context_length => {
            Ok(String::new())
        }
        (PromptInput::Ids(ids), Some(text)) => text.decode(ids, special),
        (PromptInput::Ids(_), None) => Ok(String::new()),
    }
}

fn logprobs(body: &RequestBody) -> Result<Option<usize>, ServiceError> {
    match body.logprobs {
        None => Ok(None),
        Some(Logprobs::Count(count)) => sampling::alternatives("logprobs", Some(count)),
        Some(Logprobs::Flag(_)) => {
            Err(ServiceError::invalid("logprobs", "invalid `logprobs`: expected the number of alternatives"))
        }
    }
}
