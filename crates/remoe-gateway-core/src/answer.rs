//! Handler of requests to models: reads a request, admits it, sends it to a main function and relays the answer.

use crate::access_log::RequestFacts;
use crate::account::RequestAccount;
use crate::api::Api;
use crate::bill::Bill;
use crate::body_budget::{BodyBudgetError, BodyReservation, BudgetHolder};
use crate::budget::check_budgets;
use crate::caller::Caller;
use crate::gateway::Gateway;
use crate::headers::{BUDGET, COLD_START, COST, TRAILERS, forwarded, takes_trailers};
use crate::model::{AdmissionRefusal, AdmissionRequest};
use crate::prefix_index::PromptPrefix;
use crate::privacy::Privacy;
use crate::relay::{Relay, ResponseRelay};
use crate::request_fields::{RequestFields, client_timeout};
use crate::request_spans::RequestSpans;
use crate::responses::{Recording, resolve};
use crate::retry::{UpstreamRequest, send_with_retries};
use crate::usage_bound::UsageBound;
use axum::Extension;
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use remoe_http::internal_headers::RESOLVED;
use remoe_http::{ApiError, REQUEST_ID, RequestId, parse_json, receive_body};
use remoe_otel::SpanRef;
use remoe_proto::{ErrorCode, ServiceError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time after which a stream whose main function has not answered gets its head and comments.
const COMMENTS_AFTER: Duration = Duration::from_secs(10);
/// Largest body that is parsed on the connection's own thread, in bytes.
const MAX_INLINE_PARSE_BYTES: usize = 64 << 10;

/// Answers a request whose body names a model, such as a chat completion.
pub(crate) async fn handle(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let span = request.extensions().get::<SpanRef>().cloned().unwrap_or_default();
    let facts = request.extensions().get::<Arc<RequestFacts>>().cloned().unwrap_or_default();
    let options = gateway.options();
    let mut reservation = reserve_body(&gateway, &request, &caller)?;
    let mut headers = forwarded(request.headers(), &caller);
    if let Some(RequestId(id)) = request.extensions().get() {
        headers.insert(REQUEST_ID, id.clone());
    }
    let target = target(request.uri());
    let takes_trailers = takes_trailers(request.headers());
    let client_headers = request.headers().clone();
    let body = receive_body(request, options.body_limit, options.body_timeout).await?;
    reservation.shrink_to(body.len());
    let fields = parse_fields(&gateway, &body).await?;
    let api = Api::from_target(&target);
    let is_stream = fields.stream.unwrap_or(false) && can_stream(&target);
    let (body, recording) = match api {
        Api::Responses => with_earlier_items(&gateway, &caller, body, &mut headers).await?,
        Api::Completions | Api::Messages => (body, None),
    };
    // The items of earlier responses may make the body larger than what was reserved.
    let added_bytes = body.len().saturating_sub(reservation.bytes());
    let items_reservation = (added_bytes > 0).then(|| reserve(&gateway, &caller, added_bytes)).transpose()?;
    // A timeout beyond the range of the clock is no limit.
    let client_deadline =
        client_timeout(&client_headers, is_stream)?.and_then(|time| arrived.checked_add(time));
    let model = gateway.model(fields.model.as_deref(), &caller)?;
    // Set once: a request has one model.
    let _already_set = facts.model.set(model.name().into());
    let request_spans = RequestSpans::begin(span.clone(), &target, model.name(), &caller);
    let budget_header = check_budgets(&gateway, caller.tenant.as_deref(), &model)?;
    let permit = match &caller.tenant {
        None => None,
        Some(tenant) => Some(
            tenant
                .admit(Instant::now())
                .map_err(|exceeded| ApiError::from(exceeded.error).retry_after(exceeded.retry_after))?,
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
        client_headers.contains_key(COST),
        fields.include_figures == Some(true),
    ));
    let tenant = caller.tenant.as_ref().map_or("", |tenant| tenant.name());
    // The observer gets the request before it may wake the model, so that the wake can use its prediction.
    let privacy = caller.tenant.as_ref().map_or(Privacy::None, |tenant| tenant.privacy());
    let observed_request = model.observe_request(tenant, privacy, &body);
    let is_observed = observed_request.is_some();
    let usage_bound = UsageBound::new(&fields, &target, body.len(), model.longest_context());
    let account =
        RequestAccount::new(bill.clone(), permit, (body.len(), usage_bound), observed_request, (span, facts));
    let relay_options = ResponseRelay { api, recording };
    let prefix = PromptPrefix::new(tenant, &body);
    let max_queue_time = fields.queue_deadline().or(options.queue_deadline);
    let queue_deadline = max_queue_time.and_then(|time| arrived.checked_add(time));
    let admission = AdmissionRequest {
        client: caller.client,
        bytes: body.len(),
        arrived,
        client_deadline,
        queue_deadline,
        is_retry: false,
        prefix,
    };
    let queued = model.admit(&admission)?;
    let is_cold = queued.is_cold();
    let upstream_request = UpstreamRequest {
        gateway: gateway.clone(),
        model,
        method: Method::POST,
        target,
        headers,
        body,
        admission,
        bill,
        is_observed,
        request_spans,
        _reservations: [Some(reservation), items_reservation],
    };
    let mut response_future = Box::pin(send_with_retries(upstream_request, queued));
    let comments_after = match (is_stream, is_cold) {
        (true, true) => Duration::ZERO,
        (true, false) => COMMENTS_AFTER,
        (false, _) => Duration::MAX,
    };
    let mut response = match tokio::time::timeout(comments_after, &mut response_future).await {
        Ok(backend_response) => {
            let (mut head, relay) = Relay::answer(backend_response?, account, relay_options);
            if head.headers.remove(header::TRAILER).is_some() && takes_trailers {
                head.headers.insert(header::TRAILER, HeaderValue::from_static(TRAILERS));
            }
            Response::from_parts(head, Body::new(relay))
        }
        Err(_elapsed) => {
            let head = [
                (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
                (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
                (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
            ];
            let mut response =
                (head, Body::new(Relay::stream(response_future, account, relay_options))).into_response();
            if takes_trailers {
                response.headers_mut().insert(header::TRAILER, HeaderValue::from_static(TRAILERS));
            }
            response
        }
    };
    if let Some(share) = budget_header {
        response.headers_mut().insert(BUDGET, share);
    }
    if is_cold {
        response.headers_mut().insert(COLD_START, HeaderValue::from_static("true"));
    }
    Ok(response)
}

impl From<AdmissionRefusal> for ApiError {
    fn from(refusal: AdmissionRefusal) -> Self {
        Self::from(refusal.error).retry_after(refusal.retry_after)
    }
}

/// Reserves memory for the body before any of it is read.
fn reserve_body(gateway: &Gateway, request: &Request, caller: &Caller) -> Result<BodyReservation, ApiError> {
    let limit = gateway.options().body_limit;
    let upper_bound = request.body().size_hint().upper().and_then(|bytes| usize::try_from(bytes).ok());
    reserve(gateway, caller, upper_bound.unwrap_or(limit).min(limit))
}

fn reserve(gateway: &Gateway, caller: &Caller, bytes: usize) -> Result<BodyReservation, ApiError> {
    gateway.body_budget.take(BudgetHolder::client(&caller.client), bytes).map_err(|error| {
        let message = match error {
            BodyBudgetError::Total => "request body budget exhausted; retry later",
            BodyBudgetError::Client => {
                "request body budget of this client exhausted; retry when your other requests are done"
            }
        };
        ServiceError::new(ErrorCode::ResourceExhausted, message).into()
    })
}

/// Parses the fields of the body that the gateway needs. A large body is parsed on a blocking thread.
async fn parse_fields(gateway: &Arc<Gateway>, body: &Bytes) -> Result<RequestFields, ServiceError> {
    if body.len() <= MAX_INLINE_PARSE_BYTES {
        return parse_json(body);
    }
    let lane = gateway.lanes.acquire(body.len()).await?;
    let body = body.clone();
    let work = tokio::task::spawn_blocking(move || {
        let _until_done = lane;
        parse_json(&body)
    });
    let failed = |_| ServiceError::new(ErrorCode::Internal, "cannot read the request body: internal error");
    work.await.map_err(failed)?
}

/// Inserts the items of the earlier response that `body` continues, and marks that in `headers` for the main
/// function. Returns the body, and the recording that stores its answer, if it is to be stored.
async fn with_earlier_items(
    gateway: &Arc<Gateway>,
    caller: &Caller,
    body: Bytes,
    headers: &mut HeaderMap,
) -> Result<(Bytes, Option<Recording>), ApiError> {
    let lane = gateway.lanes.acquire(body.len()).await?;
    let (store, tenant) = (gateway.options().responses.clone(), Arc::from(caller.tenant_name()));
    let limit = gateway.options().body_limit;
    // Responses of tenants with a stricter privacy are stored only if the request asks for it.
    let is_stored_by_default = caller
        .tenant
        .as_ref()
        .is_none_or(|tenant| matches!(tenant.privacy(), Privacy::Shared | Privacy::None));
    let work = tokio::task::spawn_blocking(move || {
        let _until_done = lane;
        resolve(&store, tenant, body, limit, is_stored_by_default)
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

/// Reports if answers at `target` can be streams. Main functions ignore `stream` at other paths.
fn can_stream(target: &str) -> bool {
    let path = target.split('?').next().unwrap_or_default();
    matches!(path, "/v1/chat/completions" | "/v1/completions" | "/v1/responses" | "/v1/messages")
}
