//! Spans of a request: each wait for a place, with the parts of a wake, and each time that it was sent.

use crate::caller::Caller;
use crate::model::{Grant, QueuedRequest};
use axum::http::StatusCode;
use remoe_otel::{Kind, Span, SpanRef};
use remoe_proto::ServiceError;
use std::net::SocketAddr;
use std::time::Instant;

/// Spans of one request.
pub(crate) struct RequestSpans {
    /// Span of the request as a whole.
    span: SpanRef,
    operation: &'static str,
    /// The model that it is for; empty where nothing is recorded.
    model: Box<str>,
}

impl RequestSpans {
    /// The request of `caller` for `model` at `target`.
    pub(crate) fn begin(span: SpanRef, target: &str, model: &str, caller: &Caller) -> Self {
        let operation = operation(target);
        if !span.is_recording() {
            return Self { span, operation, model: Box::default() };
        }
        let request_spans = Self { span, operation, model: model.into() };
        request_spans.describe(&request_spans.span);
        // As in the access log.
        let whose = if caller.tenant.is_some() { "remoe.tenant" } else { "client.address" };
        request_spans.span.set(whose, caller.client.clone());
        request_spans
    }

    /// Waits for a place, the first time since it `arrived`.
    ///
    /// # Errors
    /// As [`QueuedRequest::granted`].
    pub(crate) async fn wait(
        &self,
        waiter: QueuedRequest,
        arrived: Option<Instant>,
    ) -> Result<Grant, ServiceError> {
        if !self.span.is_recording() {
            return waiter.granted().await;
        }
        let begun = arrived.unwrap_or_else(Instant::now);
        let wait = self.span.child_at("wait", Kind::Internal, begun);
        let is_cold = waiter.is_cold();
        wait.set("remoe.cold_start", is_cold);
        let granted = waiter.granted().await;
        match &granted {
            Ok(grant) => {
                let parts = grant.parts().each().filter(|_| is_cold);
                for (name, from, until) in parts.filter(|(_, from, until)| *until > begun.max(*from)) {
                    wait.child_at(name, Kind::Internal, from.max(begun)).end_at(until);
                }
            }
            Err(error) => {
                wait.fail(error.code.http_status().to_string(), "no main function had a free slot");
            }
        }
        wait.end();
        granted
    }

    /// The request is sent to the function at `address`, for the `attempt`th time.
    pub(crate) fn send(&self, address: SocketAddr, attempt: usize) -> Span {
        if !self.span.is_recording() {
            return self.span.child(self.operation, Kind::Client);
        }
        let span = self.span.child(format!("{} {}", self.operation, self.model), Kind::Client);
        self.describe(&span);
        span.set("http.request.method", "POST");
        span.set("server.address", address.ip().to_string());
        span.set("server.port", i64::from(address.port()));
        if attempt > 1 {
            span.set("http.request.resend_count", attempt as i64 - 1);
        }
        span
    }

    /// The function that it was sent to by `span` has begun its answer.
    pub(crate) fn answered(&self, span: &SpanRef, status: StatusCode) {
        span.set("http.response.status_code", i64::from(status.as_u16()));
        // For the caller, an invalid request is an error as well.
        if (status.is_client_error() || status.is_server_error()) && span.is_recording() {
            span.fail(status.as_u16().to_string(), "main function answered with an error");
        }
    }

    fn describe(&self, span: &SpanRef) {
        span.set("gen_ai.operation.name", self.operation);
        span.set("gen_ai.provider.name", "remoe");
        span.set("gen_ai.request.model", self.model.to_string());
    }
}

/// Returns the operation at `target`, by the names of the semantic conventions.
fn operation(target: &str) -> &'static str {
    match target.split('?').next() {
        Some("/v1/chat/completions" | "/v1/responses" | "/v1/messages") => "chat",
        Some("/v1/embeddings") => "embeddings",
        Some("/v1/completions") => "text_completion",
        // Tokens and back: no convention has a word for it.
        _ => "tokenize",
    }
}
