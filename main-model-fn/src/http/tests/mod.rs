//! Tests of the router with a scripted engine and a byte tokenizer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod access;
mod anthropic;
mod bodies;
mod chats;
mod completions;
mod embeddings;
mod engine;
mod families;
mod formats;
mod hostile;
mod logprobs;
mod parameters;
mod places;
mod reasoning;
mod responses;
mod service;
mod sockets;
mod streams;
mod structured;
mod tools;

use super::router::routes;
use super::{HttpOptions, HttpState, PlacementView, TextFrontend};
use crate::engine::request::{Delta, Event, ExpertTally, ExpertTime, Figures, FinishReason, Request};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{self, HeaderMap, StatusCode};
use engine::Engine;
use prometheus::Registry;
use remoe_model::text::Rendering;
use remoe_plan::PlanAccount;
use remoe_proto::{ErrorCode, ServiceError};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tower_service::Service;

/// Token at the beginning of texts with special tokens.
pub(super) const BOS: u32 = 256;

/// Tokenizer whose tokens 0 to 255 are bytes.
struct ByteTokenizer;

impl TextFrontend for ByteTokenizer {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, ServiceError> {
        Ok(special.then_some(BOS).into_iter().chain(text.bytes().map(u32::from)).collect())
    }

    fn bytes_per_token(&self) -> Option<usize> {
        Some(1)
    }

    fn decode(&self, ids: &[u32], special: bool) -> Result<String, ServiceError> {
        let mut bytes = Vec::new();
        for &id in ids.iter().filter(|&&id| special || !self.is_special(id)) {
            bytes.extend(self.token_bytes(id)?);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn token_bytes(&self, id: u32) -> Result<Vec<u8>, ServiceError> {
        Ok(u8::try_from(id).map_or_else(|_| b"<s>".to_vec(), |byte| vec![byte]))
    }

    fn is_special(&self, id: u32) -> bool {
        id >= BOS
    }

    fn token_id(&self, token: &str) -> Option<u32> {
        (token == "<s>").then_some(BOS)
    }

    fn template(&self) -> Option<&str> {
        None
    }

    fn reads(&self, _name: &str) -> bool {
        false
    }

    fn render_chat(&self, messages: &[Value], rendering: Rendering<'_>) -> Result<String, ServiceError> {
        let Rendering { tools, reasoning_effort, add_generation_prompt, .. } = rendering;
        let mut text = tools.map(|tools| json!(tools).to_string()).unwrap_or_default();
        text += &reasoning_effort.map(|effort| format!("<{effort}>")).unwrap_or_default();
        for message in messages {
            let field = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
            if field("content") == "REFUSE" {
                return Err(ServiceError::invalid("messages", "the template refuses"));
            }
            text += &format!("[{}]{}", field("role"), field("content"));
            if let Some(calls) = message.get("tool_calls") {
                text += &calls.to_string();
            }
        }
        Ok(text + if add_generation_prompt { "[assistant]" } else { "" })
    }
}

/// [`ByteTokenizer`] with methods that a test overrides.
trait TextOverride: Send + Sync {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, ServiceError> {
        ByteTokenizer.encode(text, special)
    }

    fn bytes_per_token(&self) -> Option<usize> {
        ByteTokenizer.bytes_per_token()
    }

    fn token_bytes(&self, id: u32) -> Result<Vec<u8>, ServiceError> {
        ByteTokenizer.token_bytes(id)
    }

    fn template(&self) -> Option<&str> {
        None
    }

    fn reads(&self, name: &str) -> bool {
        TextOverride::template(self).is_some_and(|template| template.contains(name))
    }

    fn render_chat(&self, messages: &[Value], rendering: Rendering<'_>) -> Result<String, ServiceError> {
        ByteTokenizer.render_chat(messages, rendering)
    }

    /// Special tokens besides [`BOS`], with the ids after it.
    fn special(&self) -> &[&str] {
        &[]
    }
}

impl<T: TextOverride> TextFrontend for T {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, ServiceError> {
        TextOverride::encode(self, text, special)
    }

    fn bytes_per_token(&self) -> Option<usize> {
        TextOverride::bytes_per_token(self)
    }

    fn decode(&self, ids: &[u32], special: bool) -> Result<String, ServiceError> {
        ByteTokenizer.decode(ids, special)
    }

    fn token_bytes(&self, id: u32) -> Result<Vec<u8>, ServiceError> {
        let special = id.checked_sub(BOS + 1).and_then(|index| self.special().get(index as usize));
        special.map_or_else(|| TextOverride::token_bytes(self, id), |text| Ok(text.as_bytes().to_vec()))
    }

    fn is_special(&self, id: u32) -> bool {
        ByteTokenizer.is_special(id)
    }

    fn token_id(&self, token: &str) -> Option<u32> {
        let special = (BOS + 1..).zip(self.special()).find(|(_, text)| **text == token);
        special.map(|(id, _)| id).or_else(|| ByteTokenizer.token_id(token))
    }

    fn template(&self) -> Option<&str> {
        TextOverride::template(self)
    }

    fn reads(&self, name: &str) -> bool {
        TextOverride::reads(self, name)
    }

    fn render_chat(&self, messages: &[Value], rendering: Rendering<'_>) -> Result<String, ServiceError> {
        TextOverride::render_chat(self, messages, rendering)
    }
}

/// The HTTP API with a scripted engine.
pub(super) struct TestServer {
    pub(super) router: Router,
    pub(super) engine: Engine,
    pub(super) ready: watch::Sender<bool>,
    pub(super) account: watch::Sender<Option<Arc<PlanAccount>>>,
    state: Arc<HttpState>,
}

impl TestServer {
    /// Creates a server with a tokenizer that is ready.
    fn new() -> Self {
        Self::with(|_| ())
    }

    fn with(change: impl FnOnce(&mut HttpOptions)) -> Self {
        Self::build(Some(Arc::new(ByteTokenizer)), Engine::limits(), change)
    }

    fn build(
        text: Option<Arc<dyn TextFrontend>>,
        limits: crate::engine::RequestLimits,
        change: impl FnOnce(&mut HttpOptions),
    ) -> Self {
        let mut options = HttpOptions::new("org/tiny");
        change(&mut options);
        let (ready, is_ready) = watch::channel(true);
        let (handle, engine) = Engine::new(limits);
        let (account, account_receiver) = watch::channel(None);
        let state = HttpState::new(
            handle,
            text,
            options,
            is_ready,
            account_receiver,
            PlacementView::default(),
            Registry::new(),
        )
        .unwrap();
        let state = Arc::new(state);
        Self { router: routes(state.clone()), engine, ready, account, state }
    }

    /// Serves the routes on `listener` in the background.
    fn serve(&self, listener: TcpListener) {
        let (limits, metrics) = (self.state.options.connections, self.state.metrics.connections.clone());
        let routes = self.router.clone();
        tokio::spawn(remoe_http::serve(listener, None, routes, limits, metrics, CancellationToken::new()));
    }

    /// Sends `request` to the router; adds a host if it has none.
    async fn send(&self, mut request: http::Request<Body>) -> Reply {
        request.headers_mut().entry(http::header::HOST).or_insert(http::HeaderValue::from_static("test"));
        let mut router = self.router.clone();
        let response = tokio::time::timeout(Duration::from_secs(20), router.call(request))
            .await
            .expect("an answer comes")
            .unwrap();
        let (parts, body) = response.into_parts();
        let bytes = tokio::time::timeout(Duration::from_secs(20), to_bytes(body, 1 << 26))
            .await
            .expect("the answer ends")
            .unwrap();
        Reply {
            status: parts.status,
            headers: parts.headers,
            text: String::from_utf8(bytes.to_vec()).unwrap(),
        }
    }

    async fn get(&self, path: &str) -> Reply {
        self.send(http::Request::get(path).body(Body::empty()).unwrap()).await
    }

    async fn post(&self, path: &str, body: Value) -> Reply {
        self.post_raw(path, body.to_string()).await
    }

    async fn post_raw(&self, path: &str, body: impl Into<Body>) -> Reply {
        let request =
            http::Request::post(path).header("content-type", "application/json").body(body.into()).unwrap();
        self.send(request).await
    }

    /// Sends a completion that the engine answers with "ok".
    async fn complete(&self, body: Value) -> (Reply, Vec<Request>) {
        self.post_with_script("/v1/completions", body, |_| text_events(0, "ok", FinishReason::Stop)).await
    }

    /// Sends a chat that the engine answers with "ok".
    async fn chat(&self, body: Value) -> (Reply, Vec<Request>) {
        self.post_with_script("/v1/chat/completions", body, |_| text_events(0, "ok", FinishReason::Stop))
            .await
    }

    /// Sends `body`. Returns the reply and the engine's requests. The engine sends figures after the events of `script`.
    async fn post_with_script(
        &self,
        path: &str,
        body: Value,
        script: impl Fn(&Request) -> Vec<Event>,
    ) -> (Reply, Vec<Request>) {
        let mut requests = Vec::new();
        let serve = self.engine.serve(|request| {
            let mut events = script(request);
            events.push(Event::Done(figures(request)));
            requests.push(request.clone());
            events
        });
        let reply = tokio::select! {
            reply = self.post(path, body) => reply,
            () = serve => unreachable!("the engine serves for ever"),
        };
        (reply, requests)
    }
}

/// Reply of the server.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) text: String,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()
    }

    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// Asserts an error in OpenAI's format and returns its fields.
    fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text);
        let error = self.json()["error"].clone();
        let mut keys: Vec<&str> = error.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, ["code", "message", "param", "type"], "{error}");
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()));
        error
    }

    /// Asserts that the status is 400 and the error names `param`.
    fn refuses(&self, param: &str) {
        let error = self.error(400);
        assert_eq!(error["param"], param, "{error}");
        assert_eq!(error["type"], "invalid_request_error");
    }

    /// Asserts that a stream ended regularly and returns its chunks.
    fn chunks(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text);
        assert_eq!(self.header("content-type"), "text/event-stream");
        let mut events: Vec<&str> = self.text.split("\n\n").collect();
        assert_eq!(events.pop(), Some(""), "every event ends with an empty line: {}", self.text);
        assert_eq!(events.pop(), Some("data: [DONE]"), "{}", self.text);
        let chunk = |event: &&str| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        events.iter().map(chunk).collect()
    }
}

/// Returns deltas of one character each, then the end.
pub(super) fn text_events(choice: usize, text: &str, reason: FinishReason) -> Vec<Event> {
    let delta = |character: char| {
        let token = u8::try_from(character).map_or(0, u32::from);
        Event::Delta(Delta { choice, token: Some(token), text: character.to_string(), logprobs: None })
    };
    let finished = Event::Finished { choice, reason };
    text.chars().map(delta).chain([finished]).collect()
}

/// Returns figures whose fields have different values.
pub(super) fn figures(request: &Request) -> Figures {
    Figures {
        work: Default::default(),
        activations: None,
        prompt_tokens: request.prompt.len(),
        cached_tokens: request.prompt.len() / 2,
        completion_tokens: 2 * request.choices,
        forwarded_positions: 9,
        experts: ExpertTally { local: 40, remote: 30, fallback: 2, retries: 1 },
        queued: Duration::from_millis(125),
        ttft: Duration::from_millis(500),
        prefill: Duration::from_millis(375),
        decode: Duration::from_millis(250),
        prefill_experts: expert_time(50, 60),
        decode_experts: expert_time(70, 80),
    }
}

fn expert_time(local: u64, waited: u64) -> ExpertTime {
    ExpertTime {
        local: Duration::from_millis(local),
        waited: Duration::from_millis(waited),
        remote: Duration::from_millis(2 * waited),
        calls: 3,
    }
}

/// Returns an error of the engine.
pub(super) fn failure() -> Event {
    Event::Failed(ServiceError::new(ErrorCode::Unavailable, "no replica answered"))
}

/// Returns a minimal body of a completion with `extra` fields.
pub(super) fn body_with(extra: Value) -> Value {
    merged(json!({"model": "org/tiny", "prompt": "hi"}), extra)
}

/// Returns a minimal body of a chat with `extra` fields.
pub(super) fn chat_body_with(extra: Value) -> Value {
    merged(json!({"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}), extra)
}

fn merged(mut body: Value, extra: Value) -> Value {
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Replaces each value in `body` by values of all types; each request must be answered or refused.
async fn check_all_types(server: &TestServer, path: &str, body: &Value) {
    let replacements = [
        Value::Null,
        json!(true),
        json!(-1),
        json!(1e300),
        json!(""),
        json!("\u{0}`x`"),
        json!([]),
        json!({}),
        json!([[], 1]),
        json!({"type": {"type": []}}),
    ];
    let mut pointers = Vec::new();
    pointers_in(body, String::new(), &mut pointers);
    for pointer in pointers {
        for value in &replacements {
            let mut body = body.clone();
            *body.pointer_mut(&pointer).unwrap() = value.clone();
            let (reply, _) =
                server.post_with_script(path, body, |_| text_events(0, "x", FinishReason::Stop)).await;
            assert!([200, 400, 404].contains(&reply.status.as_u16()), "{pointer} {value}: {}", reply.text);
        }
    }
}

fn pointers_in(value: &Value, at: String, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            map.iter().for_each(|(name, value)| pointers_in(value, format!("{at}/{name}"), found));
        }
        Value::Array(list) => {
            list.iter()
                .enumerate()
                .for_each(|(index, value)| pointers_in(value, format!("{at}/{index}"), found));
        }
        _ => (),
    }
    if !at.is_empty() {
        found.push(at);
    }
}
