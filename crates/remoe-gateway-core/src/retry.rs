//! Retries: sends a request to a main function, and to another one if that fails before anything was sent to the
//! client.

use crate::bill::Bill;
use crate::body_budget::{BodyReservation, MAX_HELD_BYTES, UNCOUNTED_BYTES};
use crate::gateway::Gateway;
use crate::headers::strip_internal;
use crate::model::{AdmissionRequest, Grant, Model, QueuedRequest};
use crate::relay::{BackendResponse, BackendResponseBody, SILENCE_TIMEOUT, is_stream};
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

/// Largest number of attempts. A request that crashes main functions must not crash all of them.
const MAX_ATTEMPTS: usize = 3;
/// Timeout of the head of an answer.
const HEAD_TIMEOUT: Duration = Duration::from_secs(3600);
/// Time within which a 503 means that the main function is shutting down, so that the request can be sent to another
/// one.
const PROMPT_REJECTION: Duration = Duration::from_secs(1);

/// Request that was parsed and checked, and can be sent to a main function.
pub(crate) struct UpstreamRequest {
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) model: Arc<Model>,
    pub(crate) method: Method,
    pub(crate) target: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) admission: AdmissionRequest,
    pub(crate) bill: Arc<Bill>,
    /// Set if the main function is asked for the request's expert usage.
    pub(crate) is_observed: bool,
    pub(crate) request_spans: RequestSpans,
    /// Reserved memory of the body and of earlier items in it.
    pub(crate) _reservations: [Option<BodyReservation>; 2],
}

/// Waits for a slot of a main function and sends it the request. If the main function fails before anything was sent
/// to the client, repeats that.
///
/// Failures to connect are no attempts, because the main function may just be replaced. The request then waits for
/// one that can be reached, for as long as a cold start may take.
///
/// # Errors
/// The request got no slot in time, no main function could be reached in time, or each attempt failed.
pub(crate) async fn send_with_retries(
    request: UpstreamRequest,
    mut queued: QueuedRequest,
) -> Result<BackendResponse, ApiError> {
    let mut attempt = 1;
    let mut admission = AdmissionRequest { is_retry: true, ..request.admission.clone() };
    let (mut arrived, mut was_unreached) = (Some(admission.arrived), false);
    loop {
        let grant = request.request_spans.wait(queued, arrived.take()).await?;
        match send(&request, grant, attempt).await {
            Ok(response) => return Ok(response),
            Err(AttemptFailure::Unreachable(problem)) => {
                let now = Instant::now();
                if !std::mem::replace(&mut was_unreached, true) {
                    tracing::warn!(model = request.model.name(), problem, "main function unreachable");
                    let limit = now + request.model.wake_limit();
                    let deadline = admission.client_deadline;
                    admission.client_deadline = Some(deadline.map_or(limit, |deadline| deadline.min(limit)));
                }
                if admission.client_deadline.is_some_and(|deadline| deadline <= now) {
                    let message = "cannot reach a main function in time; retry later";
                    return Err(ServiceError::new(ErrorCode::Unavailable, message).into());
                }
            }
            Err(AttemptFailure::Failed { problem, rejection }) => {
                tracing::warn!(
                    model = request.model.name(),
                    attempt,
                    problem,
                    "main function failed before answering"
                );
                request.bill.record_lost(0);
                if rejection.is_none() {
                    // The request has left the queue once: its queue deadline is kept.
                    admission.queue_deadline = None;
                }
                if attempt == MAX_ATTEMPTS {
                    let no_attempts_left = || {
                        let message =
                            "cannot answer: every main function that got this request failed; retry later";
                        ServiceError::new(ErrorCode::Unavailable, message).into()
                    };
                    return rejection.map(|response| *response).ok_or_else(no_attempts_left);
                }
                attempt += 1;
                request.gateway.metrics().count_retry(request.model.name());
            }
        }
        queued = request.model.admit(&admission)?;
    }
}

/// Reason why an attempt gave no answer.
enum AttemptFailure {
    /// No connection: the main function got nothing.
    Unreachable(String),
    /// The main function failed, and may have begun to work.
    Failed {
        problem: String,
        /// Answer by which the main function rejected the request.
        rejection: Option<Box<BackendResponse>>,
    },
}

async fn send(
    request: &UpstreamRequest,
    grant: Grant,
    attempt: usize,
) -> Result<BackendResponse, AttemptFailure> {
    let sent_at = Instant::now();
    let backend = grant.backend();
    let span = request.request_spans.send(backend.address, attempt);
    let failed = |grant: &Grant, problem: String| {
        grant.report_failure();
        span.fail("broken_off", "main function failed before answering");
        AttemptFailure::Failed { problem, rejection: None }
    };
    let mut outgoing = axum::http::Request::new(Full::new(request.body.clone()));
    *outgoing.method_mut() = request.method.clone();
    match backend.uri(&request.target) {
        Ok(uri) => *outgoing.uri_mut() = uri,
        Err(error) => {
            return Err(AttemptFailure::Failed {
                problem: format!("invalid target URI: {error}"),
                rejection: None,
            });
        }
    }
    *outgoing.headers_mut() = request.headers.clone();
    if let Some(authorization) = &backend.authorization {
        outgoing.headers_mut().insert(header::AUTHORIZATION, authorization.clone());
    }
    if let Ok(timing) = HeaderValue::from_str(&grant.timeline().to_string()) {
        outgoing.headers_mut().insert(TIMING, timing);
    }
    if let Some(billing) = &backend.billing
        && let Ok(rates) = HeaderValue::from_str(&billing.rates.to_string())
    {
        outgoing.headers_mut().insert(RATES, rates);
        let placeholder = request.bill.placeholder().and_then(|text| HeaderValue::from_str(text).ok());
        if let Some(placeholder) = placeholder {
            outgoing.headers_mut().insert(COST_PLACEHOLDER, placeholder);
        }
    }
    if request.is_observed {
        outgoing.headers_mut().insert(ACTIVATIONS, HeaderValue::from_static("counts"));
    }
    span.inject(outgoing.headers_mut());
    let previously_sent = request.bill.sent_to(backend);
    let result = tokio::time::timeout(HEAD_TIMEOUT, request.gateway.upstream().request(outgoing)).await;
    let upstream = match result {
        Ok(Ok(response)) => response,
        // A main function that refused the gateway's certificate has read nothing of the request.
        Ok(Err(error)) if error.is_connect() || is_refusal(&error) => {
            request.bill.undo_sent(previously_sent);
            grant.report_failure();
            span.fail("unreached", "main function unreachable");
            return Err(AttemptFailure::Unreachable(error_chain(&error)));
        }
        Ok(Err(error)) => return Err(failed(&grant, error_chain(&error))),
        Err(_late) => return Err(failed(&grant, format!("no response head within {HEAD_TIMEOUT:?}"))),
    };
    let (mut head, body) = upstream.into_parts();
    request.request_spans.record_status(&span, head.status);
    strip_internal(&mut head);
    let silence_deadline = tokio::time::Instant::now() + SILENCE_TIMEOUT;
    let silence = || format!("no data for {SILENCE_TIMEOUT:?} after the response head");
    let body = match timeout_at(silence_deadline, read_beginning(&request.bill, is_stream(&head), body)).await
    {
        Ok(Ok(body)) => body,
        Ok(Err(error)) => return Err(failed(&grant, error_chain(&error))),
        Err(_late) => return Err(failed(&grant, silence())),
    };
    let response = BackendResponse::new(head, body, grant, span);
    let is_final = response.head.headers.get(SHOULD_RETRY).is_some_and(|value| value == "false");
    if response.head.status == StatusCode::SERVICE_UNAVAILABLE
        && !is_final
        && sent_at.elapsed() < PROMPT_REJECTION
    {
        response.grant.report_failure();
        return Err(AttemptFailure::Failed {
            problem: "rejected the request with 503".to_owned(),
            rejection: Some(Box::new(response)),
        });
    }
    Ok(response)
}

/// Reads the beginning of an answer's `body`. Reads all of it if it is no stream and small, or if its length is known
/// and memory can be reserved.
async fn read_beginning(
    bill: &Bill,
    is_stream: bool,
    mut body: Incoming,
) -> Result<BackendResponseBody, hyper::Error> {
    let mut reservation = bill.gateway.answer_budget.empty(bill.holder());
    let length = body.size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok());
    if let Some(bytes) = length.filter(|bytes| *bytes <= MAX_HELD_BYTES)
        && reservation.resize(bytes).is_ok()
    {
        return Ok(BackendResponseBody::Whole(body.collect().await?.to_bytes(), reservation));
    }
    // A body of unknown length may be small.
    let max_bytes = if is_stream || length.is_some() { 0 } else { UNCOUNTED_BYTES };
    let mut beginning = BytesMut::new();
    while beginning.len() <= max_bytes {
        let data = match body.frame().await.transpose()?.map(Frame::into_data) {
            // A stream ends with its trailers, which the client gets.
            Some(Err(trailers)) if is_stream => return Ok(BackendResponseBody::Stream(trailers, body)),
            Some(Err(_trailers)) => continue,
            None => {
                // Always succeeds for so few bytes: they are not counted.
                let _reserved = reservation.resize(beginning.len());
                return Ok(BackendResponseBody::Whole(beginning.freeze(), reservation));
            }
            Some(Ok(data)) => data,
        };
        if is_stream {
            return Ok(BackendResponseBody::Stream(Frame::data(data), body));
        }
        beginning.extend_from_slice(&data);
    }
    Ok(BackendResponseBody::Stream(Frame::data(beginning.freeze()), body))
}

/// Returns the message of `error` with its causes.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}
