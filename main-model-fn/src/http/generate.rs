//! Generation: from a checked request to its answer, for all routes.

use super::answer_shape::AnswerShape;
use super::pieces::Pieces;
use super::request_body::RequestBody;
use super::running::RunningGeneration;
use super::shapes::ResponseIdentity;
use super::state::HttpState;
use super::structured::Structure;
use super::timing::Timeline;
use super::tools::AnswerForm;
use super::urgency::Urgency;
use super::{body, collect, sampling, stream, unsupported, warning};
use crate::engine::RequestLimits;
use crate::engine::request::{Request, Sampling, StopRules};
use crate::pages::CacheScope;
use axum::extract;
use axum::http::HeaderMap;
use axum::response::Response;
use remoe_http::ApiError;
use remoe_http::internal_headers::TENANT;
use remoe_otel::SpanRef;
use remoe_proto::ServiceError;
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// OpenAI route that answers, which determines the shape of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    Chat,
    Completions,
}

/// A checked generation that can start.
pub(super) struct PreparedGeneration {
    pub(super) route: Route,
    /// Engine requests, one per prompt, all with the same number of choices.
    pub(super) requests: Vec<Request>,
    /// Structure that the answers must match; its grammar is not compiled yet.
    pub(super) structure: Option<Structure>,
    /// Thoughts and tool calls that the answers may have.
    pub(super) form: Option<AnswerForm>,
    /// Text of each prompt, if the answer must repeat it.
    pub(super) echoes: Option<Vec<String>>,
    pub(super) options: AnswerOptions,
}

/// Parts that the client wants in the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AnswerOptions {
    pub(super) stream: bool,
    /// True if a stream ends with a usage chunk.
    pub(super) include_usage: bool,
    /// True if the usage includes Remoe's figures.
    pub(super) include_figures: bool,
    pub(super) logprobs: bool,
    pub(super) token_ids: bool,
    /// True if the text includes special tokens.
    pub(super) special_text: bool,
    /// True if answers have text, because there is a tokenizer.
    pub(super) text: bool,
    /// True if the answer may have thoughts or calls and no content.
    pub(super) may_lack_content: bool,
}

/// Settings that all prompts of a request body share.
pub(super) struct PromptSettings {
    pub(super) choices: usize,
    sampling: Sampling,
    stop: StopRules,
    limits: RequestLimits,
    has_seed: bool,
    special_text: bool,
    urgency: Urgency,
}

impl PromptSettings {
    /// Checks the settings of `body`.
    ///
    /// # Errors
    /// Fails with the first field that is invalid or unsupported.
    pub(super) fn new(state: &HttpState, body: &RequestBody) -> Result<Self, ServiceError> {
        state.check_model(body.model.as_deref())?;
        unsupported::refuse(body)?;
        let limits = state.engine.limits();
        Ok(Self {
            choices: sampling::choices(body, &limits)?,
            sampling: sampling::sampling(body, &state.options.defaults, limits.vocab_size)?,
            stop: sampling::stop_rules(body, state.text.is_some(), limits.vocab_size)?,
            limits,
            has_seed: body.seed.is_some(),
            special_text: special_text(body),
            urgency: Urgency::read(body.priority.as_deref(), body.queue_deadline.as_deref())?,
        })
    }

    /// Returns the tokens that context and KV cache leave for the answer to `prompt`, at least one. The engine refuses a
    /// prompt that leaves none, with the numbers.
    pub(super) fn max_completion(&self, prompt: &[u32]) -> usize {
        let positions = self.limits.context_length.min(self.limits.cached_positions(self.choices));
        positions.saturating_sub(prompt.len()).max(1)
    }

    /// Creates the engine request of one prompt.
    ///
    /// # Errors
    /// Fails if `min_tokens` exceeds `max_tokens`.
    pub(super) fn request(
        &self,
        prompt: Vec<u32>,
        max_tokens: usize,
        logprobs: Option<usize>,
    ) -> Result<Request, ServiceError> {
        sampling::check_min_tokens(&self.stop, max_tokens)?;
        let mut sampling = self.sampling.clone();
        if !self.has_seed {
            // Equal prompts of one body must get different answers.
            sampling.seed = remoe_http::random_u64();
        }
        Ok(Request {
            choices: self.choices,
            max_tokens,
            sampling,
            stop: self.stop.clone(),
            special_text: self.special_text,
            priority: self.urgency.priority,
            queue_deadline: self.urgency.queue_deadline,
            logprobs,
            ..Request::prompt_only(prompt)
        })
    }
}

impl AnswerOptions {
    pub(super) fn new(state: &HttpState, body: &RequestBody, logprobs: bool) -> Self {
        let include_figures = body.include_figures.unwrap_or(false);
        let include_usage = body.stream_options.as_ref().and_then(|options| options.0.include_usage);
        Self {
            stream: body.stream.unwrap_or(false),
            include_usage: include_usage.unwrap_or(false) || include_figures,
            include_figures,
            logprobs,
            token_ids: body.return_token_ids.unwrap_or(false) || state.text.is_none(),
            special_text: special_text(body),
            text: state.text.is_some(),
            may_lack_content: false,
        }
    }
}

/// Reports if the text includes special tokens: if the body sets `skip_special_tokens` to false.
pub(super) fn special_text(body: &RequestBody) -> bool {
    !body.skip_special_tokens.unwrap_or(true)
}

/// Returns the prefix cache scope of the tenant that the headers name.
pub(super) fn tenant(headers: &HeaderMap) -> CacheScope {
    headers.get(TENANT).map(|name| CacheScope::named(name.as_bytes())).unwrap_or_default()
}

/// Returns the tracing span of `request`, with the attributes of a model call.
pub(super) fn span(state: &HttpState, request: &extract::Request) -> SpanRef {
    let span = request.extensions().get::<SpanRef>().cloned().unwrap_or_default();
    if span.is_recording() {
        span.set("gen_ai.provider.name", "remoe");
        span.set("gen_ai.request.model", state.options.model.clone());
    }
    span
}

/// Answers a chat or completion in OpenAI's shape.
pub(super) async fn answer(
    state: Arc<HttpState>,
    request: extract::Request,
    check: fn(&HttpState, RequestBody) -> Result<PreparedGeneration, ServiceError>,
) -> Result<Response, ApiError> {
    let shaped = move |state: &HttpState, body| {
        let generation = check(state, body)?;
        let shape = ResponseIdentity::new(generation.route, generation.options);
        Ok((generation, Box::new(shape) as Box<dyn AnswerShape>))
    };
    answer_shaped(state, request, shaped).await
}

/// Reads and checks the body with `check`, starts the generation, and answers in the shape that `check` returned.
pub(super) async fn answer_shaped<T, C>(
    state: Arc<HttpState>,
    request: extract::Request,
    check: C,
) -> Result<Response, ApiError>
where
    T: DeserializeOwned,
    C: FnOnce(&HttpState, T) -> Result<(PreparedGeneration, Box<dyn AnswerShape>), ServiceError>
        + Send
        + 'static,
{
    state.check_ready()?;
    let timeline = Timeline::begin(request.headers());
    let tenant = tenant(request.headers());
    let span = span(&state, &request);
    let (mut generation, mut shape) = body::read(&state, request, check).await?;
    let activations = timeline.wants_activations().then(|| state.placement.activations()).flatten();
    for request in &mut generation.requests {
        request.tenant = tenant;
        request.activations.clone_from(&activations);
    }
    let mut warning = None;
    if let Some(Structure { source, field, warnings }) = generation.structure.take() {
        let grammar = state.compile(source, &field).await?;
        generation.requests.iter_mut().for_each(|request| request.grammar = Some(grammar.clone()));
        warning = warning::header(&warnings);
    }
    let stream = generation.options.stream;
    let (pieces, requests) = Pieces::new(generation);
    span.set("gen_ai.operation.name", shape.operation());
    let running = RunningGeneration::start(&state, requests, shape.prompt_field(), timeline, span)?;
    let mut response = match stream {
        true => stream::respond(state, shape, pieces, running),
        false => collect::respond(&state, shape.as_mut(), pieces, running).await?,
    };
    if let Some(warning) = warning {
        response.headers_mut().insert(warning::WARNING, warning);
    }
    Ok(response)
}
