//! Access log: one line per request, with tenant, model, tokens and times. Never prompts, answers or keys.

mod line;
mod target;

pub use line::AccessLogFormat;
pub(crate) use line::RequestFacts;
pub use target::{AccessLogTarget, AccessLogTargetError};

use crate::gateway::Gateway;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};
use line::Line;
use remoe_http::{RequestId, route_name};
use remoe_otel::SpanRef;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

/// Lines that wait for the disk; further ones are left out and counted.
const WAITING: usize = 4096;
/// Status of a request whose client left before the answer began, as nginx logs it.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Destination of lines. A thread writes them, so that no answer waits for a disk.
#[derive(Debug, Clone)]
pub struct AccessLog {
    format: AccessLogFormat,
    lines: SyncSender<String>,
    left_out: Arc<AtomicU64>,
}

impl AccessLog {
    /// Appends lines of JSON to the file at `path`.
    ///
    /// # Errors
    /// The file cannot be opened, or no thread be started.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        Self::to(AccessLogFormat::Json, move |line| file.write_all(format!("{line}\n").as_bytes()))
    }

    /// Gives lines to `write`, without their ends, on a thread of their own.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn to(
        format: AccessLogFormat,
        mut write: impl FnMut(&str) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let (lines, waiting) = sync_channel::<String>(WAITING);
        std::thread::Builder::new().name("access log".to_owned()).spawn(move || {
            for line in waiting {
                if let Err(error) = write(&line) {
                    tracing::warn!(%error, "access log write failed");
                }
            }
        })?;
        Ok(Self { format, lines, left_out: Arc::default() })
    }

    fn write(&self, answered: &Answered) {
        let left_out = self.left_out.swap(0, Ordering::Relaxed);
        let caller = answered.facts.caller.get();
        let tokens = answered.facts.tokens.get();
        let line = Line {
            time: answered.time,
            request_id: answered.request_id.as_ref().and_then(|RequestId(id)| id.to_str().ok()),
            trace_id: answered.span.trace_id().map(|id| id.to_string()),
            client: caller.map_or("", |caller| &*caller.client),
            tenant: caller.and_then(|caller| caller.tenant.as_deref()).map(|tenant| &**tenant.name()),
            model: answered.facts.model.get().map(|model| &**model),
            method: answered.method.as_str(),
            route: answered.route,
            status: answered.status,
            bytes: answered.bytes,
            prompt_tokens: tokens.map(|(prompt, _)| *prompt),
            completion_tokens: tokens.map(|(_, completion)| *completion),
            first_token: answered.facts.first_token.get().copied(),
            head: answered.head.unwrap_or_else(|| answered.began.elapsed()),
            whole: answered.began.elapsed(),
            is_complete: answered.is_complete,
            left_out,
        };
        let sent = match line.render(self.format) {
            None => return,
            Some(text) => self.lines.try_send(text),
        };
        if sent.is_err() {
            self.left_out.fetch_add(left_out + 1, Ordering::Relaxed);
        }
    }
}

/// Request in progress. Its line is written when it is dropped: at the end of the answer, or when the client has left.
struct Answered {
    log: AccessLog,
    time: SystemTime,
    began: Instant,
    request_id: Option<RequestId>,
    span: SpanRef,
    facts: Arc<RequestFacts>,
    method: Method,
    route: &'static str,
    status: u16,
    /// Time until the answer began.
    head: Option<Duration>,
    bytes: u64,
    is_complete: bool,
}

impl Drop for Answered {
    fn drop(&mut self) {
        self.log.write(self);
    }
}

struct Logged {
    body: Body,
    answered: Answered,
}

impl HttpBody for Logged {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        match &frame {
            Poll::Ready(Some(Ok(frame))) => {
                self.answered.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
                self.answered.is_complete = self.body.is_end_stream();
            }
            Poll::Ready(None) => self.answered.is_complete = true,
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

/// Writes a line for the request if there is an access log.
pub(crate) async fn log(State(gateway): State<Arc<Gateway>>, mut request: Request, next: Next) -> Response {
    let Some(log) = gateway.options().access_log.clone() else { return next.run(request).await };
    let facts = Arc::new(RequestFacts::default());
    request.extensions_mut().insert(facts.clone());
    let mut answered = Answered {
        log,
        time: SystemTime::now(),
        began: Instant::now(),
        request_id: request.extensions().get::<RequestId>().cloned(),
        span: request.extensions().get::<SpanRef>().cloned().unwrap_or_default(),
        facts,
        method: request.method().clone(),
        route: route_name(request.uri().path()),
        status: CLIENT_CLOSED_REQUEST,
        head: None,
        bytes: 0,
        is_complete: false,
    };
    let response = next.run(request).await;
    answered.status = response.status().as_u16();
    answered.head = Some(answered.began.elapsed());
    answered.is_complete = response.body().is_end_stream();
    response.map(|body| Body::new(Logged { body, answered }))
}
