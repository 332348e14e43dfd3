//! From a request to its answer: read, let in, sent to a backend, again where that broke off.

use crate::access_log::RequestFacts;
use crate::account::Account;
use crate::api::Api;
use crate::ask::{Asked, timeout};
use crate::beginnings::Beginning;
use crate::bill::Bill;
use crate::budget::within_budget;
use crate::caller::Caller;
use crate::course::Course;
use crate::gateway::Gateway;
use crate::keys::Privacy;
use crate::model::{Entry, Grant, Model, Refused, Waiter};
use crate::relay::{Answering, Obtained, ObtainedBody, Relay, SILENCE, is_stream};
use crate::responses::{Recording, resolve};
use crate::room::{Holder, NoRoom, Room};
use crate::usage_bound::UsageBound;
use axum::Extension;
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header, response};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use http_body::Frame;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use remoe_http::between::{ACTIVATIONS, COST_PLACEHOLDER, RATES, RESOLVED, TENANT, TIMING};
use remoe_http::{ApiError, REQUEST_ID, RequestId, SHOULD_RETRY, parse, receive};
use remoe_otel::{SpanRef, TRACEPARENT, TRACESTATE, is_valid};
use remoe_proto::identity::is_refusal;
use remoe_proto::{ErrorCode, ServiceError};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout_at;

/// Says that a request waited for functions to start.
const COLD_START: HeaderName = HeaderName::from_static("x-remoe-cold-start");

/// Asks for what the answer cost, and says it.
pub(crate) const COST: HeaderName = HeaderName::from_static("x-remoe-cost");
/// The share of the day's budget that is spent, where that is most of it.
const BUDGET: HeaderName = HeaderName::from_static("x-remoe-budget");

/// What follows a stream.
const TRAILERS: &str = "server-timing, x-remoe-cost";

/// Times that a request is sent, all together. A request that ends the functions which have it must not
/// end one after the other.
const ATTEMPTS: usize = 3;
/// Until a backend begins its answer.
const BEGIN: Duration = Duration::from_secs(3600);
/// A backend that sends a request away within this time was about to end.
const SENT_AWAY: Duration = Duration::from_secs(1);
/// A stream that has not begun by then gets its head, and comments.
const PATIENCE: Duration = Duration::from_secs(10);
/// Answers up to this size are read whole before the client gets any of them: until then a backend that
/// breaks off costs nothing. Without room for that they are handed on as they come.
pub(crate) const WHOLE: usize = 1 << 20;
/// Bytes of each held answer for which there is always room: errors are smaller. The connections bound them: 480 unless set.
pub(crate) const FLOOR: usize = 16 << 10;
/// Bodies up to this size are read where they came in.
const SMALL: usize = 64 << 10;

/// Headers that are one connection's own, and keys of this gateway.
const OWN: [&str; 13] = [
    "authorization",
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-api-key",
];

/// A request that was read and checked.
pub(crate) struct Call {
    gateway: Arc<Gateway>,
    model: Arc<Model>,
    method: Method,
    target: String,
    headers: HeaderMap,
    body: Bytes,
    entry: Entry,
    bill: Arc<Bill>,
    /// What its experts do is asked for.
    is_sighted: bool,
    course: Course,
    _room: [Option<Room>; 2],
}

/// Answers a generation, or another request with a body that names its model.
pub(crate) async fn handle(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let span = request.extensions().get::<SpanRef>().cloned().unwrap_or_default();
    let facts = request.extensions().get::<Arc<RequestFacts>>().cloned().unwrap_or_default();
    let options = gateway.options();
    let mut room = room(&gateway, &request, &caller)?;
    let mut headers = forwarded(request.headers(), &caller);
    if let Some(RequestId(id)) = request.extensions().get() {
        headers.insert(REQUEST_ID, id.clone());
    }
    let target = target(request.uri());
    let takes_trailers = takes_trailers(request.headers());
    let asked_headers = request.headers().clone();
    let body = receive(request, options.body_limit, options.body_timeout).await?;
    room.keep(body.len());
    let asked = read(&gateway, &body).await?;
    let api = Api::of(&target);
    let stream = asked.stream.unwrap_or(false) && streams(&target);
    let (body, recording) = match api {
        Api::Responses => with_earlier_items(&gateway, &caller, body, &mut headers).await?,
        Api::Completions | Api::Messages => (body, None),
    };
    // Earlier items take room as well.
    let grown = body.len().saturating_sub(room.bytes());
    let more = (grown > 0).then(|| take_room(&gateway, &caller, grown)).transpose()?;
    // A time that no clock can show is no limit.
    let until = timeout(&asked_headers, stream)?.and_then(|time| arrived.checked_add(time));
    let model = gateway.model(asked.model.as_deref(), &caller)?;
    // One model per request.
    let _first = facts.model.set(model.name().into());
    let course = Course::begin(span.clone(), &target, model.name(), &caller);
    let budget = within_budget(&gateway, caller.tenant.as_deref(), &model)?;
    let permit = match &caller.tenant {
        None => None,
        Some(tenant) => Some(
            tenant
                .admit(Instant::now())
                .map_err(|limited| ApiError::from(limited.error).retry_after(limited.retry_after))?,
        ),
    };
    let bill = Arc::new(Bill::new(
        gateway.clone(),
        headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).unwrap_or_default(),
        model.clone(),
        (
            caller.tenant.as_ref().map_or_else(|| "".into(), |tenant| tenant.name().clone()),
            caller.client.clone(),
        ),
        asked_headers.contains_key(COST),
        asked.include_figures == Some(true),
    ));
    let tenant = caller.tenant.as_ref().map_or("", |tenant| tenant.name());
    // Before it may wake the model.
    let privacy = caller.tenant.as_ref().map_or(Privacy::None, |tenant| tenant.privacy());
    let sighting = model.sight(tenant, privacy, &body);
    let is_sighted = sighting.is_some();
    let bound = UsageBound::new(&asked, &target, body.len(), model.longest_context());
    let account = Account::new(bill.clone(), permit, (body.len(), bound), sighting, (span, facts));
    let answering = Answering { api, recording };
    let beginning = Beginning::of(tenant, &body);
    let queue_deadline = asked.queue_deadline().or(options.queue_deadline);
    let queue_until = queue_deadline.and_then(|time| arrived.checked_add(time));
    let entry = Entry {
        client: caller.client,
        bytes: body.len(),
        arrived,
        until,
        queue_until,
        again: false,
        beginning,
    };
    let waiter = model.enter(&entry)?;
    let cold = waiter.is_cold();
    let call = Call {
        gateway: gateway.clone(),
        model,
        method: Method::POST,
        target,
        headers,
        body,
        entry,
        bill,
        is_sighted,
        course,
        _room: [Some(room), more],
    };
    let mut obtaining = Box::pin(obtain(call, waiter));
    let patience = match (stream, cold) {
        (true, true) => Duration::ZERO,
        (true, false) => PATIENCE,
        (false, _) => Duration::MAX,
    };
    let mut response = match tokio::time::timeout(patience, &mut obtaining).await {
        Ok(obtained) => {
            let (mut head, relay) = Relay::answer(obtained?, account, answering);
            if head.headers.remove(header::TRAILER).is_some() && takes_trailers {
                head.headers.insert(header::TRAILER, HeaderValue::from_static(TRAILERS));
            }
            Response::from_parts(head, Body::new(relay))
        }
        Err(_waits) => {
            let head = [
                (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
                (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
                (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
            ];
            let mut response =
                (head, Body::new(Relay::stream(obtaining, account, answering))).into_response();
            if takes_trailers {
                response.headers_mut().insert(header::TRAILER, HeaderValue::from_static(TRAILERS));
            }
            response
        }
    };
    if let Some(share) = budget {
        response.headers_mut().insert(BUDGET, share);
    }
    if cold {
        response.headers_mut().insert(COLD_START, HeaderValue::from_static("true"));
    }
    Ok(response)
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        Self::from(refused.error).retry_after(refused.retry_after)
    }
}

/// Room for the body, before any of it is read.
fn room(gateway: &Gateway, request: &Request, caller: &Caller) -> Result<Room, ApiError> {
    let limit = gateway.options().body_limit;
    let most = request.body().size_hint().upper().and_then(|most| usize::try_from(most).ok());
    take_room(gateway, caller, most.unwrap_or(limit).min(limit))
}

fn take_room(gateway: &Gateway, caller: &Caller, bytes: usize) -> Result<Room, ApiError> {
    gateway.rooms.take(Holder::client(&caller.client), bytes).map_err(|full| {
        let message = match full {
            NoRoom::Everybody => "request body budget exhausted; retry later",
            NoRoom::Client => {
                "request body budget of this client exhausted; retry when your other requests are done"
            }
        };
        ServiceError::new(ErrorCode::ResourceExhausted, message).into()
    })
}

/// What decides where the body goes.
async fn read(gateway: &Arc<Gateway>, body: &Bytes) -> Result<Asked, ServiceError> {
    if body.len() <= SMALL {
        return parse(body);
    }
    let pass = gateway.lanes.enter(body.len()).await?;
    let body = body.clone();
    let work = tokio::task::spawn_blocking(move || {
        let _until_done = pass;
        parse(&body)
    });
    let failed = |_| ServiceError::new(ErrorCode::Internal, "cannot read the request body: internal error");
    work.await.map_err(failed)?
}

/// The body with the items of the response that it goes on from, and what stores its answer. The headers tell the main
/// function.
async fn with_earlier_items(
    gateway: &Arc<Gateway>,
    caller: &Caller,
    body: Bytes,
    headers: &mut HeaderMap,
) -> Result<(Bytes, Option<Recording>), ApiError> {
    let pass = gateway.lanes.enter(body.len()).await?;
    let (store, tenant) = (gateway.options().responses.clone(), Arc::from(caller.tenant_name()));
    let limit = gateway.options().body_limit;
    // Of tenants whose requests are not to be known, only what they ask for is stored.
    let by_default = caller
        .tenant
        .as_ref()
        .is_none_or(|tenant| matches!(tenant.privacy(), Privacy::Shared | Privacy::None));
    let work = tokio::task::spawn_blocking(move || {
        let _until_done = pass;
        resolve(&store, tenant, body, limit, by_default)
    });
    let failed = |_| ServiceError::new(ErrorCode::Internal, "cannot read the request body: internal error");
    let resolved = work.await.map_err(failed)??;
    if resolved.has_previous {
        headers.insert(RESOLVED, HeaderValue::from_static("1"));
    }
    Ok((resolved.body, resolved.recording))
}

/// The headers that a backend gets.
fn forwarded(headers: &HeaderMap, caller: &Caller) -> HeaderMap {
    let named = connection_headers(headers);
    let pairs = headers.iter().filter(|(name, _)| !is_own(name, &named));
    let mut headers: HeaderMap = pairs.map(|(name, value)| (name.clone(), value.clone())).collect();
    headers.insert(header::TE, HeaderValue::from_static("trailers"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("te"));
    let tenant = caller.tenant.as_ref().and_then(|tenant| HeaderValue::from_str(tenant.name()).ok());
    if let Some(tenant) = tenant {
        headers.insert(TENANT, tenant);
    }
    // What names no span by the rules is nobody's business.
    if !is_valid(&headers) {
        headers.remove(TRACEPARENT);
        headers.remove(TRACESTATE);
    }
    headers
}

/// Names that `Connection` declares to be this connection's own.
fn connection_headers(headers: &HeaderMap) -> Vec<String> {
    let values = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(|name| name.trim().to_ascii_lowercase()).collect()
}

fn is_own(name: &HeaderName, connection: &[String]) -> bool {
    // The gateway writes these itself.
    [TENANT, TIMING, RATES, COST_PLACEHOLDER, ACTIVATIONS, RESOLVED].contains(name)
        || OWN.contains(&name.as_str())
        || connection.iter().any(|own| own == name.as_str())
}

fn target(uri: &Uri) -> String {
    uri.path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string)
}

/// Whether what is asked for at `target` may be a stream. Main functions take `stream` for nothing elsewhere.
fn streams(target: &str) -> bool {
    let path = target.split('?').next().unwrap_or_default();
    matches!(path, "/v1/chat/completions" | "/v1/completions" | "/v1/responses" | "/v1/messages")
}

fn takes_trailers(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::TE).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|value| value.trim().eq_ignore_ascii_case("trailers"))
}

/// Waits for a backend and has it answer; another time where it broke off before the client saw anything. One that cannot be
/// reached, as while it is replaced, is no attempt: the request waits for the next that can, for as long as a wake may take.
async fn obtain(call: Call, mut waiter: Waiter) -> Result<Obtained, ApiError> {
    let mut attempt = 1;
    let mut entry = Entry { again: true, ..call.entry.clone() };
    let (mut arrived, mut is_unreached) = (Some(entry.arrived), false);
    loop {
        let grant = call.course.wait(waiter, arrived.take()).await?;
        match send(&call, grant, attempt).await {
            Ok(obtained) => return Ok(obtained),
            Err(Failure::Unreached(problem)) => {
                let now = Instant::now();
                if !std::mem::replace(&mut is_unreached, true) {
                    tracing::warn!(model = call.model.name(), problem, "main function unreachable");
                    let last = now + call.model.wake_limit();
                    entry.until = Some(entry.until.map_or(last, |until| until.min(last)));
                }
                if entry.until.is_some_and(|until| until <= now) {
                    let message = "cannot reach a main function in time; retry later";
                    return Err(ServiceError::new(ErrorCode::Unavailable, message).into());
                }
            }
            Err(Failure::Broken { problem, sent_away }) => {
                tracing::warn!(
                    model = call.model.name(),
                    attempt,
                    problem,
                    "main function failed before answering"
                );
                call.bill.lost(0);
                if sent_away.is_none() {
                    // It had its turn.
                    entry.queue_until = None;
                }
                if attempt == ATTEMPTS {
                    let lost = || {
                        let message =
                            "cannot answer: every main function that got this request failed; retry later";
                        ServiceError::new(ErrorCode::Unavailable, message).into()
                    };
                    return sent_away.map(|obtained| *obtained).ok_or_else(lost);
                }
                attempt += 1;
                call.gateway.metrics().retried(call.model.name());
            }
        }
        waiter = call.model.enter(&entry)?;
    }
}

/// Why a backend gave no answer.
enum Failure {
    /// There is no connection to it: it got nothing.
    Unreached(String),
    /// It may have begun.
    Broken {
        problem: String,
        /// Its answer, where it sent the request away.
        sent_away: Option<Box<Obtained>>,
    },
}

async fn send(call: &Call, grant: Grant, attempt: usize) -> Result<Obtained, Failure> {
    let sent = Instant::now();
    let backend = grant.backend();
    let span = call.course.send(backend.address, attempt);
    let broken = |grant: &Grant, problem: String| {
        grant.failed();
        span.fail("broken_off", "main function failed before answering");
        Failure::Broken { problem, sent_away: None }
    };
    let mut request = axum::http::Request::new(Full::new(call.body.clone()));
    *request.method_mut() = call.method.clone();
    match backend.uri(&call.target) {
        Ok(uri) => *request.uri_mut() = uri,
        Err(error) => {
            return Err(Failure::Broken { problem: format!("invalid target URI: {error}"), sent_away: None });
        }
    }
    *request.headers_mut() = call.headers.clone();
    if let Some(authorization) = &backend.authorization {
        request.headers_mut().insert(header::AUTHORIZATION, authorization.clone());
    }
    if let Ok(timing) = HeaderValue::from_str(&grant.parts().to_string()) {
        request.headers_mut().insert(TIMING, timing);
    }
    if let Some(billing) = &backend.billing
        && let Ok(rates) = HeaderValue::from_str(&billing.rates.to_string())
    {
        request.headers_mut().insert(RATES, rates);
        let placeholder = call.bill.placeholder().and_then(|text| HeaderValue::from_str(text).ok());
        if let Some(placeholder) = placeholder {
            request.headers_mut().insert(COST_PLACEHOLDER, placeholder);
        }
    }
    if call.is_sighted {
        request.headers_mut().insert(ACTIVATIONS, HeaderValue::from_static("counts"));
    }
    span.inject(request.headers_mut());
    let before = call.bill.sent_to(backend);
    let begun = tokio::time::timeout(BEGIN, call.gateway.upstream().request(request)).await;
    let response = match begun {
        Ok(Ok(response)) => response,
        // Whom it did not let in it has not read anything of.
        Ok(Err(error)) if error.is_connect() || is_refusal(&error) => {
            call.bill.not_sent(before);
            grant.failed();
            span.fail("unreached", "main function unreachable");
            return Err(Failure::Unreached(chain(&error)));
        }
        Ok(Err(error)) => return Err(broken(&grant, chain(&error))),
        Err(_late) => return Err(broken(&grant, format!("no response head within {BEGIN:?}"))),
    };
    let (mut head, body) = response.into_parts();
    call.course.answered(&span, head.status);
    strip(&mut head);
    let silent = tokio::time::Instant::now() + SILENCE;
    let nothing_came = || format!("no data for {SILENCE:?} after the response head");
    let body = match timeout_at(silent, begin(&call.bill, is_stream(&head), body)).await {
        Ok(Ok(body)) => body,
        Ok(Err(error)) => return Err(broken(&grant, chain(&error))),
        Err(_late) => return Err(broken(&grant, nothing_came())),
    };
    let obtained = Obtained::new(head, body, grant, span);
    let is_final = obtained.head.headers.get(SHOULD_RETRY).is_some_and(|value| value == "false");
    if obtained.head.status == StatusCode::SERVICE_UNAVAILABLE && !is_final && sent.elapsed() < SENT_AWAY {
        obtained.grant.failed();
        return Err(Failure::Broken {
            problem: "rejected the request with 503".to_owned(),
            sent_away: Some(Box::new(obtained)),
        });
    }
    Ok(obtained)
}

/// Waits for the beginning of an answer's `body`, or for all of it: where it states its length and there is room, or where it
/// is small and no stream.
async fn begin(bill: &Bill, is_stream: bool, mut body: Incoming) -> Result<ObtainedBody, hyper::Error> {
    let mut room = bill.gateway.answers.empty(bill.holder());
    let length = body.size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok());
    if let Some(bytes) = length.filter(|bytes| *bytes <= WHOLE)
        && room.resize(bytes).is_ok()
    {
        return Ok(ObtainedBody::Whole(body.collect().await?.to_bytes(), room));
    }
    // Of an unknown length it may be small.
    let (mut begun, most) = (BytesMut::new(), if is_stream || length.is_some() { 0 } else { FLOOR });
    while begun.len() <= most {
        let data = match body.frame().await.transpose()?.map(Frame::into_data) {
            // A stream is over with its trailers, which the client gets.
            Some(Err(trailers)) if is_stream => return Ok(ObtainedBody::Stream(trailers, body)),
            Some(Err(_trailers)) => continue,
            None => {
                // There always is for so few bytes.
                let _fits = room.resize(begun.len());
                return Ok(ObtainedBody::Whole(begun.freeze(), room));
            }
            Some(Ok(data)) => data,
        };
        if is_stream {
            return Ok(ObtainedBody::Stream(Frame::data(data), body));
        }
        begun.extend_from_slice(&data);
    }
    Ok(ObtainedBody::Stream(Frame::data(begun.freeze()), body))
}

/// Takes the headers away that were the backend's connection's.
fn strip(head: &mut response::Parts) {
    let named = connection_headers(&head.headers);
    for name in OWN.iter().copied().filter(|name| !matches!(*name, "content-length" | "trailer")) {
        head.headers.remove(name);
    }
    for name in named {
        head.headers.remove(name);
    }
    for name in [TENANT, TIMING, RATES] {
        head.headers.remove(name);
    }
    // It is the connection to the client that decides.
    head.version = axum::http::Version::HTTP_11;
    head.extensions.clear();
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}
