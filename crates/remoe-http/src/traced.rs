//! Server spans of requests, from the arrival of the head until the last bytes of the answer are passed to the
//! connection.

use crate::route::route_name;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};
use remoe_otel::{Span, Traces};
use std::pin::Pin;
use std::task::{Context, Poll};
use tracing::Instrument;

/// Middleware that gives every request below `/v1/` a span, as a [`SpanRef`](remoe_otel::SpanRef) in its extensions.
/// Log lines of the request have its trace id.
pub async fn trace_request(State(traces): State<Traces>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if !path.starts_with("/v1/") {
        return next.run(request).await;
    }
    let (method, route) =
        (known_method(request.method()), Some(route_name(path)).filter(|route| *route != "other"));
    let name = match route {
        Some(route) => format!("{} {route}", method.unwrap_or("HTTP")),
        None => method.unwrap_or("HTTP").to_owned(),
    };
    let is_head = request.method() == Method::HEAD;
    let span = traces.server(name, request.headers());
    span.set("http.request.method", method.unwrap_or("_OTHER"));
    span.set("url.scheme", "http");
    if let Some(route) = route {
        span.set("http.route", route);
    }
    request.extensions_mut().insert(span.reference());
    let log_span = match span.trace_id() {
        // At error level, so that no filter drops the trace id from a line that it lets through.
        Some(trace_id) => tracing::error_span!("request", %trace_id),
        None => tracing::Span::none(),
    };
    let response = next.run(request).instrument(log_span.clone()).await;
    let status = response.status();
    span.set("http.response.status_code", i64::from(status.as_u16()));
    if status.is_server_error() {
        span.fail(status.as_u16().to_string(), "the server answered with an error");
    }
    // The body of a HEAD answer is never polled, so its end would not be seen.
    if is_head || response.body().is_end_stream() {
        span.end();
        return response;
    }
    response.map(|body| Body::new(TracedBody { body, span: Some(span), log_span }))
}

/// Returns the name of `method` if it is a known one; clients may send any word.
fn known_method(method: &Method) -> Option<&'static str> {
    let known = [
        Method::GET,
        Method::POST,
        Method::HEAD,
        Method::OPTIONS,
        Method::PUT,
        Method::DELETE,
        Method::PATCH,
    ];
    let names = ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"];
    known.iter().zip(names).find(|(known, _)| *known == method).map(|(_, name)| name)
}

/// Body that ends its span when its last bytes are passed on, before they are sent. So the span of the receiver ends
/// later.
struct TracedBody {
    body: Body,
    span: Option<Span>,
    log_span: tracing::Span,
}

impl HttpBody for TracedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        let frame = this.log_span.in_scope(|| Pin::new(&mut this.body).poll_frame(context));
        let is_last = match &frame {
            Poll::Pending => false,
            Poll::Ready(None) => true,
            Poll::Ready(Some(Ok(frame))) => frame.is_trailers() || this.body.is_end_stream(),
            Poll::Ready(Some(Err(_))) => {
                if let Some(span) = &this.span {
                    span.fail("broken_off", "the answer ended early");
                }
                true
            }
        };
        if is_last && let Some(span) = this.span.take() {
            span.end();
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
