//! Spans of a request: each wait for a slot, with the parts of a cold start, and each attempt at a main function.

use crate::caller::Caller;
use crate::model::{Grant, QueuedRequest};
use axum::http::StatusCode;
use remoe_otel::{Span, SpanRef, SpanRole};
use remoe_proto::ServiceError;
use std::net::SocketAddr;
use std::time::Instant;

/// Spans of one request.
pub(crate) struct RequestSpans {
    /// Span of the request as a whole.
    span: SpanRef,
    operation: &'static str,
    /// Name of the model; empty if spans are not recorded.
    model: Box<str>,
}

impl RequestSpans {
    /// Begins the spans of a request of `caller` to `model` at `target`.
    pub(crate) fn begin(span: SpanRef, target: &str, model: &str, caller: &Caller) -> Self {
        let operation = operation(target);
        if !span.is_recording() {
            return Self { span, operation, model: Box::default() };
        }
        let request_spans = Self { span, operation, model: model.into() };
        request_spans.describe(&request_spans.span);
        // As in the access log.
        let attribute = if caller.tenant.is_some() { "remoe.tenant" } else { "client.address" };
        request_spans.span.set(attribute, caller.client.clone());
        request_spans
    }

    /// Waits for a slot, in a span. `arrived` is the time of arrival if this is the first wait.
    ///
    /// # Errors
    /// As [`QueuedRequest::granted`].
    pub(crate) async fn wait(
        &self,
        queued: QueuedRequest,
        arrived: Option<Instant>,
    ) -> Result<Grant, ServiceError> {
        if !self.span.is_recording() {
            return queued.granted().await;
        }
        let started = arrived.unwrap_or_else(Instant::now);
        let wait = self.span.child_at("wait", SpanRole::Internal, started);
        let is_cold = queued.is_cold();
        wait.set("remoe.cold_start", is_cold);
        let granted = queued.granted().await;
        match &granted {
            Ok(grant) => {
                let parts = grant.timeline().parts().filter(|_| is_cold);
                for (name, start, end) in parts.filter(|(_, start, end)| *end > started.max(*start)) {
                    wait.child_at(name, SpanRole::Internal, start.max(started)).end_at(end);
                }
            }
            Err(error) => {
                wait.fail(error.code.http_status().to_string(), "no main function had a free slot");
            }
        }
        wait.end();
        granted
    }

    /// Begins the span of the `attempt`th attempt, at the function at `address`. `attempt` counts from 1.
    pub(crate) fn send(&self, address: SocketAddr, attempt: usize) -> Span {
        if !self.span.is_recording() {
            return self.span.child(self.operation, SpanRole::Client);
        }
        let span = self.span.child(format!("{} {}", self.operation, self.model), SpanRole::Client);
        self.describe(&span);
        span.set("http.request.method", "POST");
        span.set("server.address", address.ip().to_string());
        span.set("server.port", i64::from(address.port()));
        if attempt > 1 {
            span.set("http.request.resend_count", attempt as i64 - 1);
        }
        span
    }

    /// Records the status of the answer in `span`, the span of an attempt.
    pub(crate) fn record_status(&self, span: &SpanRef, status: StatusCode) {
        span.set("http.response.status_code", i64::from(status.as_u16()));
        // The conventions for client spans count 4xx as errors, too.
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
        // The conventions have no name for tokenizing.
        _ => "tokenize",
    }
}
