//! Requests on their way to a main function: sent to another one if it fails before the client saw anything.

use crate::bill::Bill;
use crate::body_budget::{BodyReservation, FLOOR, WHOLE};
use crate::gateway::Gateway;
use crate::headers::strip;
use crate::model::{AdmissionRequest, Grant, Model, QueuedRequest};
use crate::relay::{BackendResponse, BackendResponseBody, SILENCE, is_stream};
use crate::request_spans::RequestSpans;
use axum::body::HttpBody;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use bytes::{Bytes, BytesMut};
use http_body::Frame;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use remoe_http::internal_headers::{ACTIVATIONS, COST_PLACEHOLDER, RATES, TIMING};
use remoe_http::{ApiError, SHOULD_RETRY};
use remoe_proto::identity::is_refusal;
use remoe_proto::{ErrorCode, ServiceError};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout_at;

/// Most times that a request is sent. One that crashes main functions must not crash all of them.
const ATTEMPTS: usize = 3;
/// Longest wait for the head of an answer.
const BEGIN: Duration = Duration::from_secs(3600);
/// Time within which a rejection means that the main function was about to end.
const SENT_AWAY: Duration = Duration::from_secs(1);

/// A request that was read and checked.
pub(crate) struct Call {
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) model: Arc<Model>,
    pub(crate) method: Method,
    pub(crate) target: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) entry: AdmissionRequest,
    pub(crate) bill: Arc<Bill>,
    /// Asks main functions for its expert usage.
    pub(crate) is_sighted: bool,
    pub(crate) request_spans: RequestSpans,
    /// Room of its body, until it is over.
    pub(crate) _room: [Option<BodyReservation>; 2],
}

/// Waits for a main function and sends it the request. If it fails before the client saw anything, does so again.
///
/// A main function that cannot be reached, as while it is replaced, is no attempt: the request waits for the next one that can,
/// for as long as a wake may take.
///
/// # Errors
/// The request got no turn in time, no main function could be reached in time, or each that got it failed.
pub(crate) async fn obtain(call: Call, mut waiter: QueuedRequest) -> Result<BackendResponse, ApiError> {
    let mut attempt = 1;
    let mut entry = AdmissionRequest { again: true, ..call.entry.clone() };
    let (mut arrived, mut is_unreached) = (Some(entry.arrived), false);
    loop {
        let grant = call.request_spans.wait(waiter, arrived.take()).await?;
        match send(&call, grant, attempt).await {
            Ok(obtained) => return Ok(obtained),
            Err(AttemptFailure::Unreached(problem)) => {
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
            Err(AttemptFailure::Broken { problem, sent_away }) => {
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

/// Reason why a main function gave no answer.
enum AttemptFailure {
    /// No connection: it got nothing.
    Unreached(String),
    /// It may have begun.
    Broken {
        problem: String,
        /// Answer with which it rejected the request.
        sent_away: Option<Box<BackendResponse>>,
    },
}

async fn send(call: &Call, grant: Grant, attempt: usize) -> Result<BackendResponse, AttemptFailure> {
    let sent = Instant::now();
    let backend = grant.backend();
    let span = call.request_spans.send(backend.address, attempt);
    let broken = |grant: &Grant, problem: String| {
        grant.failed();
        span.fail("broken_off", "main function failed before answering");
        AttemptFailure::Broken { problem, sent_away: None }
    };
    let mut request = axum::http::Request::new(Full::new(call.body.clone()));
    *request.method_mut() = call.method.clone();
    match backend.uri(&call.target) {
        Ok(uri) => *request.uri_mut() = uri,
        Err(error) => {
            return Err(AttemptFailure::Broken {
                problem: format!("invalid target URI: {error}"),
                sent_away: None,
            });
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
            return Err(AttemptFailure::Unreached(chain(&error)));
        }
        Ok(Err(error)) => return Err(broken(&grant, chain(&error))),
        Err(_late) => return Err(broken(&grant, format!("no response head within {BEGIN:?}"))),
    };
    let (mut head, body) = response.into_parts();
    call.request_spans.answered(&span, head.status);
    strip(&mut head);
    let silent = tokio::time::Instant::now() + SILENCE;
    let nothing_came = || format!("no data for {SILENCE:?} after the response head");
    let body = match timeout_at(silent, begin(&call.bill, is_stream(&head), body)).await {
        Ok(Ok(body)) => body,
        Ok(Err(error)) => return Err(broken(&grant, chain(&error))),
        Err(_late) => return Err(broken(&grant, nothing_came())),
    };
    let obtained = BackendResponse::new(head, body, grant, span);
    let is_final = obtained.head.headers.get(SHOULD_RETRY).is_some_and(|value| value == "false");
    if obtained.head.status == StatusCode::SERVICE_UNAVAILABLE && !is_final && sent.elapsed() < SENT_AWAY {
        obtained.grant.failed();
        return Err(AttemptFailure::Broken {
            problem: "rejected the request with 503".to_owned(),
            sent_away: Some(Box::new(obtained)),
        });
    }
    Ok(obtained)
}

/// Waits for the beginning of an answer's `body`. If the length is known and there is room, or if it is small and no stream,
/// waits for all of it.
async fn begin(
    bill: &Bill,
    is_stream: bool,
    mut body: Incoming,
) -> Result<BackendResponseBody, hyper::Error> {
    let mut reservation = bill.gateway.answers.empty(bill.holder());
    let length = body.size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok());
    if let Some(bytes) = length.filter(|bytes| *bytes <= WHOLE)
        && reservation.resize(bytes).is_ok()
    {
        return Ok(BackendResponseBody::Whole(body.collect().await?.to_bytes(), reservation));
    }
    // Of an unknown length it may be small.
    let (mut begun, most) = (BytesMut::new(), if is_stream || length.is_some() { 0 } else { FLOOR });
    while begun.len() <= most {
        let data = match body.frame().await.transpose()?.map(Frame::into_data) {
            // A stream is over with its trailers, which the client gets.
            Some(Err(trailers)) if is_stream => return Ok(BackendResponseBody::Stream(trailers, body)),
            Some(Err(_trailers)) => continue,
            None => {
                // There always is for so few bytes.
                let _fits = reservation.resize(begun.len());
                return Ok(BackendResponseBody::Whole(begun.freeze(), reservation));
            }
            Some(Ok(data)) => data,
        };
        if is_stream {
            return Ok(BackendResponseBody::Stream(Frame::data(data), body));
        }
        begun.extend_from_slice(&data);
    }
    Ok(BackendResponseBody::Stream(Frame::data(begun.freeze()), body))
}

/// Returns the message of `error` with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}
