//! Errors as OpenAI clients expect them.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use remoe_proto::{ErrorCode, ServiceError};
use serde::Serialize;
use std::time::Duration;

/// Default of `Retry-After` with 429 and 503, in seconds.
const RETRY_AFTER_S: u64 = 1;

/// Tells clients, and gateways, if they may repeat the request without being asked to, as OpenAI's clients read it.
pub const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// An error on its way to a client.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    /// In seconds, where the same request may succeed later.
    retry_after: Option<u64>,
    /// True for a request that clients and gateways are not to repeat unless asked: its client prefers an error to a
    /// wait.
    is_final: bool,
    body: ErrorBody,
}

/// `{"error": {...}}`, all four keys always there.
#[derive(Debug, Clone, Serialize)]
pub struct ErrorBody {
    error: ErrorFields,
}

#[derive(Debug, Clone, Serialize)]
struct ErrorFields {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    /// An error that only HTTP knows.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            retry_after: None,
            is_final: false,
            body: ErrorBody {
                error: ErrorFields {
                    message: message.into(),
                    kind: "invalid_request_error",
                    param: None,
                    code: Some(code),
                },
            },
        }
    }

    /// Says that the same request may succeed after `wait`: in whole seconds, at least one.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some((wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1));
        self
    }

    /// The error is about the parameter `param`.
    #[must_use]
    pub fn about(mut self, param: impl Into<String>) -> Self {
        self.body.error.param = Some(param.into());
        self
    }

    /// Status of the answer.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns the body that the client reads.
    pub fn body(&self) -> &ErrorBody {
        &self.body
    }
}

impl ErrorBody {
    /// Message for people.
    pub fn message(&self) -> &str {
        &self.error.message
    }
}

impl From<ServiceError> for ErrorBody {
    fn from(error: ServiceError) -> Self {
        Self {
            error: ErrorFields {
                message: error.message,
                kind: error.code.openai_type(),
                param: error.field,
                code: error.code.openai_code(),
            },
        }
    }
}

impl From<ServiceError> for ApiError {
    fn from(error: ServiceError) -> Self {
        let status = StatusCode::from_u16(error.code.http_status());
        Self {
            status: status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            retry_after: matches!(error.code, ErrorCode::ResourceExhausted | ErrorCode::Unavailable)
                .then_some(RETRY_AFTER_S),
            is_final: error.code == ErrorCode::QueueDeadlineExceeded,
            body: error.into(),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let message = self.body.error.message.as_str();
        let status = self.status.as_u16();
        if self.retry_after.is_some() {
            // Probes ask once a second while functions start, clients more often under load.
            tracing::debug!(status, message, "request rejected, retryable");
        } else if self.status.is_server_error() {
            tracing::warn!(status, message, "request failed");
        }
        let mut response = (self.status, Json(&self.body)).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.is_final {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // For APIs that write errors in another shape.
        response.extensions_mut().insert(self.body);
        response
    }
}
