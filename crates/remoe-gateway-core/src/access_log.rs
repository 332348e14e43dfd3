//! Access log: one line per request, with tenant, model, tokens and times. Never prompts, answers or keys.

mod line;
mod target;
mod writer;

pub use line::AccessLogFormat;
pub(crate) use line::RequestFacts;
pub use target::{AccessLogTarget, AccessLogTargetError};
pub use writer::AccessLog;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};
use line::AccessRecord;
use remoe_http::{RequestId, route_name};
use remoe_otel::SpanRef;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

/// Status of a request whose client disconnected before the answer began. nginx logs the same one.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Request in progress. Dropping it writes its line: at the end of the answer, or when the client has disconnected.
struct PendingRecord {
    log: AccessLog,
    time: SystemTime,
    started: Instant,
    request_id: Option<RequestId>,
    span: SpanRef,
    facts: Arc<RequestFacts>,
    method: Method,
    route: &'static str,
    status: u16,
    /// Time from the request's arrival until the answer began.
    time_to_head: Option<Duration>,
    bytes: u64,
    is_complete: bool,
}

impl PendingRecord {
    /// Returns the record to write. `left_out` is the number of lines that were dropped before it.
    fn line(&self, left_out: u64) -> AccessRecord<'_> {
        let caller = self.facts.caller.get();
        let tokens = self.facts.tokens.get();
        AccessRecord {
            time: self.time,
            request_id: self.request_id.as_ref().and_then(|RequestId(id)| id.to_str().ok()),
            trace_id: self.span.trace_id().map(|id| id.to_string()),
            client: caller.map_or("", |caller| &*caller.client),
            tenant: caller.and_then(|caller| caller.tenant.as_deref()).map(|tenant| &**tenant.name()),
            model: self.facts.model.get().map(|model| &**model),
            method: self.method.as_str(),
            route: self.route,
            status: self.status,
            bytes: self.bytes,
            prompt_tokens: tokens.map(|(prompt, _)| *prompt),
            completion_tokens: tokens.map(|(_, completion)| *completion),
            first_token: self.facts.first_token.get().copied(),
            time_to_head: self.time_to_head.unwrap_or_else(|| self.started.elapsed()),
            total_time: self.started.elapsed(),
            is_complete: self.is_complete,
            left_out,
        }
    }
}

impl Drop for PendingRecord {
    fn drop(&mut self) {
        self.log.write(|left_out| self.line(left_out));
    }
}

/// Body of an answer that counts its bytes for the access log.
struct LoggedBody {
    body: Body,
    record: PendingRecord,
}

impl HttpBody for LoggedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        match &frame {
            Poll::Ready(Some(Ok(frame))) => {
                self.record.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
                self.record.is_complete = self.body.is_end_stream();
            }
            Poll::Ready(None) => self.record.is_complete = true,
            Poll::Ready(Some(Err(_))) | Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Middleware that writes a line for the request to `log`, if there is an access log.
pub(crate) async fn log(State(log): State<Option<AccessLog>>, mut request: Request, next: Next) -> Response {
    let Some(log) = log else { return next.run(request).await };
    let facts = Arc::new(RequestFacts::default());
    request.extensions_mut().insert(facts.clone());
    let mut record = PendingRecord {
        log,
        time: SystemTime::now(),
        started: Instant::now(),
        request_id: request.extensions().get::<RequestId>().cloned(),
        span: request.extensions().get::<SpanRef>().cloned().unwrap_or_default(),
        facts,
        method: request.method().clone(),
        route: route_name(request.uri().path()),
        status: CLIENT_CLOSED_REQUEST,
        time_to_head: None,
        bytes: 0,
        is_complete: false,
    };
    let response = next.run(request).await;
    record.status = response.status().as_u16();
    record.time_to_head = Some(record.started.elapsed());
    record.is_complete = response.body().is_end_stream();
    response.map(|body| Body::new(LoggedBody { body, record }))
}
