//! Test bed: a gateway on a real socket, main functions on real sockets, and a launcher that follows the model's
//! orders.

#![allow(dead_code)] // Not every test program uses all of it.

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::StreamExt;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use remoe_gateway_core::{
    Backend, DesiredState, Gateway, GatewayMetrics, GatewayOptions, Model, ModelOptions, PrefixIndex,
    RunningFunctions, WakeMarks,
};
use remoe_http::ApiError;
use remoe_process::listen;
use remoe_proto::{ErrorCode, ServiceError};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Timeout of waits, far longer than any of them takes.
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// Behaviour of the functions, and what they observed.
pub(crate) struct Functions {
    /// Time of a start.
    pub(crate) start: Mutex<Duration>,
    /// Number of answers that may be given, so that tests can let functions answer one by one.
    pub(crate) turns: Semaphore,
    /// Number of next requests whose connections break off without an answer.
    pub(crate) breaks: AtomicUsize,
    /// Field `x` of each body, in the order of arrival.
    pub(crate) asked: Mutex<Vec<Value>>,
    pub(crate) headers: Mutex<HeaderMap>,
    pub(crate) starts: AtomicUsize,
    pub(crate) stops: AtomicUsize,
    running: AtomicUsize,
    ids: AtomicU64,
}

impl Functions {
    pub(crate) fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }
}

/// Request that a function works on.
struct HeldRequest(Arc<Functions>);

impl Drop for HeldRequest {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn work(State(functions): State<Arc<Functions>>, headers: HeaderMap, body: Bytes) -> Response<Body> {
    functions.running.fetch_add(1, Ordering::SeqCst);
    let work = HeldRequest(functions.clone());
    // Like real main functions: the gateway parses only the fields that it needs.
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        let error = json!({"error": {"message": "invalid JSON", "type": "invalid_request_error"}});
        return (StatusCode::BAD_REQUEST, Json(error)).into_response();
    };
    functions.asked.lock().unwrap().push(body["x"].clone());
    *functions.headers.lock().unwrap() = headers.clone();
    if functions.breaks.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
        // A panic ends the connection without an answer.
        std::panic::resume_unwind(Box::new("breaks off"));
    }
    functions.turns.acquire().await.unwrap().forget();
    if body["refuse"] == true && body["chunked"] == true {
        let pieces = [r#"{"error": {"message": "#, r#""no"}}"#].map(Ok::<_, std::io::Error>);
        let error = Body::from_stream(futures_util::stream::iter(pieces));
        return (StatusCode::BAD_REQUEST, [(header::CONTENT_TYPE, "application/json")], error)
            .into_response();
    }
    if body["refuse"] == true {
        return (StatusCode::BAD_REQUEST, Json(json!({"error": {"message": "no", "type": "invalid_request_error", "param": null, "code": null}}))).into_response();
    }
    if body["overdue"] == true {
        let error = ServiceError::new(ErrorCode::QueueDeadlineExceeded, "waited for too long");
        return ApiError::from(error).into_response();
    }
    if let Some(bytes) = body["bytes"].as_u64() {
        return "x".repeat(usize::try_from(bytes).unwrap()).into_response();
    }
    if let Some(bytes) = body["stalls"].as_u64() {
        // Sends one byte of the declared length.
        let first = futures_util::stream::iter([Ok::<_, std::io::Error>("x")]);
        let answer = Body::from_stream(first.chain(futures_util::stream::pending()));
        return ([(header::CONTENT_LENGTH, bytes.to_string())], answer).into_response();
    }
    if body["stream"] != true {
        drop(work);
        let tokens = body["tokens"].as_str().unwrap_or("3, 4").to_owned();
        let mut answer = ([("x-remoe-tokens", tokens)], Json(json!({"x": body["x"]}))).into_response();
        if let Some(parts) = headers.get("x-remoe-timing").and_then(|parts| parts.to_str().ok()) {
            let all = HeaderValue::from_str(&format!("{parts}, first;dur=250"));
            answer.headers_mut().insert("server-timing", all.unwrap());
        }
        if headers.contains_key("x-remoe-activations") {
            answer.headers_mut().insert("x-remoe-activations", HeaderValue::from_static("AQID"));
        }
        return with_warning(&body, answer);
    }
    let forever = body["forever"] == true;
    let breaks = body["breaks"] == true;
    let events = futures_util::stream::unfold((0, work), move |(number, work)| async move {
        match number {
            0 => Some((Ok("data: {\"n\":0}\n\n"), (1, work))),
            _ if forever => std::future::pending().await,
            1 if breaks => {
                // After the first event was sent.
                tokio::time::sleep(Duration::from_millis(50)).await;
                Some((Err(std::io::Error::other("dies")), (2, work)))
            }
            1 => Some((Ok("data: [DONE]\n\n"), (2, work))),
            _ => None,
        }
    });
    with_warning(
        &body,
        ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(events)).into_response(),
    )
}

/// Adds a warning to `answer` if the request asks for it.
fn with_warning(body: &Value, mut answer: Response<Body>) -> Response<Body> {
    if body["warns"] == true {
        answer.headers_mut().insert("x-remoe-warning", HeaderValue::from_static("a: b"));
    }
    answer
}

/// Answers with a response of one item. Its id contains the number of requests so far.
async fn respond(State(functions): State<Arc<Functions>>, headers: HeaderMap, body: Bytes) -> Response<Body> {
    functions.running.fetch_add(1, Ordering::SeqCst);
    let work = HeldRequest(functions.clone());
    let body: Value = serde_json::from_slice(&body).unwrap();
    let number = {
        let mut asked = functions.asked.lock().unwrap();
        asked.push(body.clone());
        asked.len()
    };
    *functions.headers.lock().unwrap() = headers;
    let status = if body["fails"] == true { "failed" } else { "completed" };
    let output =
        json!([{"type": "message", "text": "x".repeat(body["long"].as_u64().unwrap_or(1) as usize)}]);
    let response = json!({"id": format!("resp_{number}"), "status": status, "output": output});
    if body["stream"] != true {
        drop(work);
        return Json(response).into_response();
    }
    let first = "event: response.created\ndata: {\"response\":{}}\n\n".to_owned();
    let data = json!({"type": format!("response.{status}"), "response": response});
    let last = format!("event: response.{status}\ndata: {data}\n\n");
    // The last event is sent in pieces.
    let pieces: Vec<String> =
        last.as_bytes().chunks(20).map(|piece| String::from_utf8(piece.to_vec()).unwrap()).collect();
    let events = std::iter::once(first).chain(pieces).map(Ok::<_, std::io::Error>);
    let events = futures_util::stream::iter(events.collect::<Vec<_>>());
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(events)).into_response()
}

async fn placement() -> Json<Value> {
    Json(json!({"generation": 7, "groups": [{"experts": "0:0-3", "replicas": 1}]}))
}

/// Gateway with one model, `m`, and its functions.
pub(crate) struct Stage {
    pub(crate) address: SocketAddr,
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) model: Arc<Model>,
    pub(crate) functions: Arc<Functions>,
    pub(crate) client: Client<HttpConnector, Full<Bytes>>,
    launcher: tokio::task::JoinHandle<()>,
}

impl Stage {
    pub(crate) async fn new(
        options: GatewayOptions,
        change: impl FnOnce(&mut ModelOptions),
        capacity: usize,
        idle: Option<Duration>,
    ) -> Self {
        let metrics = GatewayMetrics::new().unwrap();
        let mut model = ModelOptions {
            name: "m".to_owned(),
            short_names: Vec::new(),
            context_length: 64,
            max_requests: 100,
            waiting_bytes: 1 << 20,
            wake_limit: LONG,
        };
        change(&mut model);
        let model = Model::new(model, &metrics, &PrefixIndex::default());
        let functions = Arc::new(Functions {
            start: Mutex::new(Duration::from_millis(5)),
            turns: Semaphore::new(1 << 20),
            breaks: AtomicUsize::new(0),
            asked: Mutex::default(),
            headers: Mutex::default(),
            starts: AtomicUsize::new(0),
            stops: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            ids: AtomicU64::new(0),
        });
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let gateway = Gateway::new(options, vec![model.clone()], metrics);
        tokio::spawn(gateway.clone().serve(listener, CancellationToken::new()));
        let launcher = tokio::spawn(launch(model.clone(), functions.clone(), capacity));
        // No idle connections: the server may close one just when it is used again.
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http();
        let stage = Self { address, gateway, model, functions, client, launcher };
        stage.until(Self::serving).await;
        if let Some(idle) = idle {
            stage.model.sleep_when_idle(idle);
        }
        stage
    }

    fn serving(&self) -> bool {
        self.functions.starts.load(Ordering::SeqCst) > 0
            && self.model.phase() == remoe_gateway_core::ScalingPhase::Active
    }

    /// Stops the launcher. From now on only the test reports what runs.
    pub(crate) async fn stop_launcher(&mut self) {
        self.launcher.abort();
        assert!((&mut self.launcher).await.is_err_and(|error| error.is_cancelled()));
    }

    /// Waits until `condition` is true.
    pub(crate) async fn until(&self, condition: impl Fn(&Self) -> bool) {
        let wait = async {
            while !condition(self) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(LONG, wait).await.expect("condition not reached in time");
    }

    pub(crate) async fn wait_for_sleep(&self) {
        self.until(|stage| stage.model.phase() == remoe_gateway_core::ScalingPhase::Asleep).await;
    }

    pub(crate) async fn send(
        &self,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> Response<hyper::body::Incoming> {
        self.send_to("/v1/completions", body, headers).await
    }

    pub(crate) async fn send_to(
        &self,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> Response<hyper::body::Incoming> {
        let mut request = Request::post(format!("http://{}{path}", self.address))
            .header(header::CONTENT_TYPE, "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::from(body.to_string())).unwrap();
        tokio::time::timeout(LONG, self.client.request(request)).await.expect("an answer").unwrap()
    }

    /// Gets `path` with `key`.
    pub(crate) async fn get(&self, path: &str, key: Option<&str>) -> (Response<()>, String) {
        let mut request = Request::get(format!("http://{}{path}", self.address));
        if let Some(key) = key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let sent = self.client.request(request.body(Full::default()).unwrap());
        let (head, body) = tokio::time::timeout(LONG, sent).await.expect("an answer").unwrap().into_parts();
        let body = tokio::time::timeout(LONG, body.collect()).await.expect("the answer ends").unwrap();
        (Response::from_parts(head, ()), String::from_utf8(body.to_bytes().to_vec()).unwrap())
    }

    pub(crate) async fn ask(&self, body: &Value, headers: &[(&str, &str)]) -> (Response<()>, String) {
        self.ask_at("/v1/completions", body, headers).await
    }

    pub(crate) async fn ask_at(
        &self,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> (Response<()>, String) {
        let (head, body) = self.send_to(path, body, headers).await.into_parts();
        let body = tokio::time::timeout(LONG, body.collect()).await.expect("the answer ends").unwrap();
        (Response::from_parts(head, ()), String::from_utf8(body.to_bytes().to_vec()).unwrap())
    }
}

/// Launcher: starts and stops the functions by the model's orders.
async fn launch(model: Arc<Model>, functions: Arc<Functions>, capacity: usize) {
    let mut orders = model.launcher_orders();
    let mut server: Option<(tokio::task::JoinHandle<()>, Backend, WakeMarks)> = None;
    loop {
        let order = *orders.borrow_and_update();
        match order.wanted {
            DesiredState::Awake if server.is_none() => {
                functions.starts.fetch_add(1, Ordering::SeqCst);
                let mut wake = WakeMarks { started: Some(Instant::now()), ..WakeMarks::default() };
                let time = *functions.start.lock().unwrap();
                tokio::time::sleep(time).await;
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                (wake.listening, wake.serving) = (Some(Instant::now()), Some(Instant::now()));
                let id = functions.ids.fetch_add(1, Ordering::SeqCst);
                let backend = Backend {
                    id,
                    address: listener.local_addr().unwrap(),
                    identity: None,
                    capacity,
                    authorization: None,
                    billing: None,
                };
                let router = Router::new()
                    .route("/v1/completions", post(work))
                    .route("/v1/messages", post(work))
                    .route("/v1/responses", post(respond))
                    .route("/v1/placement", get(placement))
                    .with_state(functions.clone());
                let task = tokio::spawn(async move {
                    drop(axum::serve(listener, router).await);
                });
                server = Some((task, backend, wake));
            }
            DesiredState::Recheck => {
                model.rechecked(order.order, u32::try_from(functions.running()).unwrap());
            }
            DesiredState::Asleep => {
                if let Some((task, ..)) = server.take() {
                    assert_eq!(functions.running(), 0, "stopped with a request in flight");
                    functions.stops.fetch_add(1, Ordering::SeqCst);
                    task.abort();
                }
            }
            DesiredState::Awake => {}
        }
        let running = server.as_ref();
        model.set_running_functions(RunningFunctions {
            order: order.order,
            backends: running.map(|(_, backend, _)| backend.clone()).into_iter().collect(),
            wake: running.map(|(.., wake)| *wake).unwrap_or_default(),
            functions: Vec::new(),
        });
        if orders.changed().await.is_err() {
            return;
        }
    }
}
