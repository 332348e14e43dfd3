//! A line for every answer, for who wants them: who asked for what, what came of it and how long it took. Never
//! what was said, and no key.

use crate::caller::Caller;
use crate::gateway::Gateway;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};
use remoe_http::{RequestId, route_name};
use remoe_traces::SpanRef;
use serde::Serialize;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Lines that wait for the disk; further ones are left out and counted.
const WAITING: usize = 4096;

/// Where lines go: a thread writes them, so that no answer waits for a disk.
#[derive(Debug, Clone)]
pub struct AccessLog {
    lines: SyncSender<String>,
    left_out: Arc<AtomicU64>,
}

#[derive(Serialize)]
struct Line<'a> {
    /// Seconds since 1970.
    time: f64,
    request_id: Option<&'a str>,
    /// Where the request is part of a trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
    /// The tenant, or where there are no keys the client's address.
    client: &'a str,
    method: &'a str,
    route: &'static str,
    status: u16,
    /// Bytes of the answer's body that were sent.
    bytes: u64,
    /// Milliseconds until the answer began, and until it ended.
    head_ms: f64,
    whole_ms: f64,
    /// Whether the client had all of it.
    complete: bool,
    /// Lines before this one that could not be written in time.
    #[serde(skip_serializing_if = "is_zero")]
    left_out: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // As serde asks for it.
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl AccessLog {
    /// Lines go to the end of the file at `path`; `-` is standard error.
    ///
    /// # Errors
    /// The file cannot be opened, or no thread be started.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut out: Box<dyn Write + Send> = match path.to_str() {
            Some("-") => Box::new(io::stderr()),
            _ => Box::new(OpenOptions::new().create(true).append(true).open(path)?),
        };
        let (lines, waiting) = sync_channel::<String>(WAITING);
        std::thread::Builder::new().name("access log".to_owned()).spawn(move || {
            for line in waiting {
                if let Err(error) = out.write_all(line.as_bytes()) {
                    tracing::warn!(%error, "access log write failed");
                }
            }
        })?;
        Ok(Self { lines, left_out: Arc::default() })
    }

    fn write(&self, line: &Answered) {
        let left_out = self.left_out.swap(0, Ordering::Relaxed);
        let milliseconds = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        let line = Line {
            time: line.time,
            request_id: line.request_id.as_ref().and_then(|RequestId(id)| id.to_str().ok()),
            trace_id: line.span.trace_id().map(|id| id.to_string()),
            client: &line.client,
            method: line.method.as_str(),
            route: line.route,
            status: line.status,
            bytes: line.bytes,
            head_ms: milliseconds(line.head),
            whole_ms: milliseconds(line.began.elapsed()),
            complete: line.complete,
            left_out,
        };
        let Ok(mut text) = serde_json::to_string(&line) else { return };
        text.push('\n');
        if self.lines.try_send(text).is_err() {
            self.left_out.fetch_add(left_out + 1, Ordering::Relaxed);
        }
    }
}

/// An answer on its way; its line is written when it is over.
struct Answered {
    log: AccessLog,
    time: f64,
    began: Instant,
    request_id: Option<RequestId>,
    span: SpanRef,
    client: Arc<str>,
    method: Method,
    route: &'static str,
    status: u16,
    head: Duration,
    bytes: u64,
    complete: bool,
}

impl Drop for Answered {
    fn drop(&mut self) {
        self.log.clone().write(self);
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
                self.answered.complete = self.body.is_end_stream();
            }
            Poll::Ready(None) => self.answered.complete = true,
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

/// Writes a line for the answer, where lines are wanted.
pub(crate) async fn log(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    let Some(log) = gateway.options().access_log.clone() else { return next.run(request).await };
    let began = Instant::now();
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let (method, route) = (request.method().clone(), route_name(request.uri().path()));
    let request_id = request.extensions().get::<RequestId>().cloned();
    let span = request.extensions().get::<SpanRef>().cloned().unwrap_or_default();
    let response = next.run(request).await;
    // Who was not let in has no name.
    let client =
        response.extensions().get::<Caller>().map_or_else(|| "".into(), |caller| caller.client.clone());
    let answered = Answered {
        log,
        time,
        began,
        request_id,
        span,
        client,
        method,
        route,
        status: response.status().as_u16(),
        head: began.elapsed(),
        bytes: 0,
        complete: response.body().is_end_stream(),
    };
    response.map(|body| Body::new(Logged { body, answered }))
}
