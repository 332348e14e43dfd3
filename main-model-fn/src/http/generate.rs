//! From a checked request to its answer, for all generation routes.

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

/// Which route answers, and so in which shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    Chat,
    Completions,
}

/// A generation that may start.
pub(super) struct PreparedGeneration {
    pub(super) route: Route,
    /// One per prompt, all with the same number of choices.
    pub(super) requests: Vec<Request>,
    /// Form that their answers must match, to be compiled.
    pub(super) structure: Option<Structure>,
    /// Thoughts and calls that their answers may have.
    pub(super) form: Option<AnswerForm>,
    /// The text that the answer repeats, one per prompt, when asked for.
    pub(super) echoes: Option<Vec<String>>,
    pub(super) options: AnswerOptions,
}

/// Parts of the answer that the client wants to see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AnswerOptions {
    pub(super) stream: bool,
    /// A usage chunk at the end of a stream.
    pub(super) include_usage: bool,
    /// Remoe's figures beside the usage.
    pub(super) include_figures: bool,
    pub(super) logprobs: bool,
    pub(super) token_ids: bool,
    /// Special tokens are written out in the text.
    pub(super) special_text: bool,
    /// There is a tokenizer, so that answers have text.
    pub(super) text: bool,
    /// The answer may have thoughts or calls and no content.
    pub(super) may_lack_content: bool,
}

/// Settings that all prompts of a body share.
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
    /// # Errors
    /// The first field that cannot be honoured.
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

    /// Tokens that context and cache leave after a prompt, at least one: a prompt that leaves none
    /// is refused by the engine with the numbers.
    pub(super) fn room(&self, prompt: &[u32]) -> usize {
        let positions = self.limits.context_length.min(self.limits.cached_positions(self.choices));
        positions.saturating_sub(prompt.len()).max(1)
    }

    /// # Errors
    /// `min_tokens` exceeds `max_tokens`.
    pub(super) fn request(
        &self,
        prompt: Vec<u32>,
        max_tokens: usize,
        logprobs: Option<usize>,
    ) -> Result<Request, ServiceError> {
        sampling::check_min_tokens(&self.stop, max_tokens)?;
        let mut sampling = self.sampling.clone();
        if !self.has_seed {
            // Equal prompts in one body must not get equal answers.
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
            ..Request::of_prompt(prompt)
        })
    }
}

impl AnswerOptions {
    pub(super) fn new(state: &HttpState, body: &RequestBody, logprobs: bool) -> Self {
        let include_figures = body.include_figures.unwrap_or(false);
        let asked = body.stream_options.as_ref().and_then(|options| options.0.include_usage);
        Self {
            stream: body.stream.unwrap_or(false),
            include_usage: asked.unwrap_or(false) || include_figures,
            include_figures,
            logprobs,
            token_ids: body.return_token_ids.unwrap_or(false) || state.text.is_none(),
            special_text: special_text(body),
            text: state.text.is_some(),
            may_lack_content: false,
        }
    }
}

/// Reports if the text has special tokens: `skip_special_tokens` is true unless the body sets it to false.
pub(super) fn special_text(body: &RequestBody) -> bool {
    !body.skip_special_tokens.unwrap_or(true)
}

/// With whose requests one with these headers shares keys and values.
pub(super) fn tenant(headers: &HeaderMap) -> CacheScope {
    headers.get(TENANT).map(|name| CacheScope::named(name.as_bytes())).unwrap_or_default()
}

/// The span of `request`, which is one for the model.
pub(super) fn span(state: &HttpState, request: &extract::Request) -> SpanRef {
    let span = request.extensions().get::<SpanRef>().cloned().unwrap_or_default();
    if span.is_recording() {
        span.set("gen_ai.provider.name", "remoe");
        span.set("gen_ai.request.model", state.options.model.clone());
    }
    span
}

/// Answers in OpenAI's shape of chats and completions.
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

/// Reads and checks the body with `check`, hands the generation to the engine and answers in its shape.
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
