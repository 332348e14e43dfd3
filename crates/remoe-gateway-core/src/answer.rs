//! Requests from their heads to their answers: read, admitted, sent to a main function, relayed.

use crate::access_log::RequestFacts;
use crate::account::RequestAccount;
use crate::api::Api;
use crate::bill::Bill;
use crate::body_budget::{BodyBudgetError, BodyReservation, Holder};
use crate::budget::within_budget;
use crate::caller::Caller;
use crate::gateway::Gateway;
use crate::headers::{BUDGET, COLD_START, COST, TRAILERS, forwarded, takes_trailers};
use crate::model::{AdmissionRequest, Refused};
use crate::prefix_index::PromptPrefix;
use crate::privacy::Privacy;
use crate::relay::{Relay, ResponseRelay};
use crate::request_fields::{RequestFields, timeout};
use crate::request_spans::RequestSpans;
use crate::responses::{Recording, resolve};
use crate::retry::{Call, obtain};
use crate::usage_bound::UsageBound;
use axum::Extension;
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use remoe_http::internal_headers::RESOLVED;
use remoe_http::{ApiError, REQUEST_ID, RequestId, parse, receive};
use remoe_otel::SpanRef;
use remoe_proto::{ErrorCode, ServiceError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A stream that has not begun by then gets its head, and comments.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bodies up to this size are read where they came in.
const SMALL: usize = 64 << 10;

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
    let mut reservation = reservation(&gateway, &request, &caller)?;
    let mut headers = forwarded(request.headers(), &caller);
    if let Some(RequestId(id)) = request.extensions().get() {
        headers.insert(REQUEST_ID, id.clone());
    }
    let target = target(request.uri());
    let takes_trailers = takes_trailers(request.headers());
    let asked_headers = request.headers().clone();
    let body = receive(request, options.body_limit, options.body_timeout).await?;
    reservation.keep(body.len());
    let asked = read(&gateway, &body).await?;
    let api = Api::of(&target);
    let stream = asked.stream.unwrap_or(false) && streams(&target);
    let (body, recording) = match api {
        Api::Responses => with_earlier_items(&gateway, &caller, body, &mut headers).await?,
        Api::Completions | Api::Messages => (body, None),
    };
    // Earlier items take room as well.
    let grown = body.len().saturating_sub(reservation.bytes());
    let more = (grown > 0).then(|| take_room(&gateway, &caller, grown)).transpose()?;
    // A time that no clock can show is no limit.
    let until = timeout(&asked_headers, stream)?.and_then(|time| arrived.checked_add(time));
    let model = gateway.model(asked.model.as_deref(), &caller)?;
    // One model per request.
    let _first = facts.model.set(model.name().into());
    let request_spans = RequestSpans::begin(span.clone(), &target, model.name(), &caller);
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
    let observed_request = model.sight(tenant, privacy, &body);
    let is_sighted = observed_request.is_some();
    let bound = UsageBound::new(&asked, &target, body.len(), model.longest_context());
    let account =
        RequestAccount::new(bill.clone(), permit, (body.len(), bound), observed_request, (span, facts));
    let answering = ResponseRelay { api, recording };
    let beginning = PromptPrefix::of(tenant, &body);
    let queue_deadline = asked.queue_deadline().or(options.queue_deadline);
    let queue_until = queue_deadline.and_then(|time| arrived.checked_add(time));
    let entry = AdmissionRequest {
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
        request_spans,
        _room: [Some(reservation), more],
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
fn reservation(gateway: &Gateway, request: &Request, caller: &Caller) -> Result<BodyReservation, ApiError> {
    let limit = gateway.options().body_limit;
    let most = request.body().size_hint().upper().and_then(|most| usize::try_from(most).ok());
    take_room(gateway, caller, most.unwrap_or(limit).min(limit))
}

fn take_room(gateway: &Gateway, caller: &Caller, bytes: usize) -> Result<BodyReservation, ApiError> {
    gateway.body_budget.take(Holder::client(&caller.client), bytes).map_err(|full| {
        let message = match full {
            BodyBudgetError::Everybody => "request body budget exhausted; retry later",
            BodyBudgetError::Client => {
                "request body budget of this client exhausted; retry when your other requests are done"
            }
        };
        ServiceError::new(ErrorCode::ResourceExhausted, message).into()
    })
}

/// Reads what decides where the body goes.
async fn read(gateway: &Arc<Gateway>, body: &Bytes) -> Result<RequestFields, ServiceError> {
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

fn target(uri: &Uri) -> String {
    uri.path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string)
}

/// Reports if the answer at `target` may be a stream. Main functions ignore `stream` elsewhere.
fn streams(target: &str) -> bool {
    let path = target.split('?').next().unwrap_or_default();
    matches!(path, "/v1/chat/completions" | "/v1/completions" | "/v1/responses" | "/v1/messages")
}
