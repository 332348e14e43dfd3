//! Errors in the form that OpenAI clients expect.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use remoe_proto::{ErrorCode, ServiceError};
use serde::Serialize;
use std::time::Duration;

/// Default of `Retry-After` with 429 and 503, in seconds.
const RETRY_AFTER_S: u64 = 1;

/// Header that tells clients and gateways whether to retry automatically. OpenAI's client libraries read it.
pub const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// Error answer.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    /// Seconds after which a retry may succeed, if it may.
    retry_after: Option<u64>,
    /// Set if clients and gateways must not retry automatically, because the client prefers an error to a wait.
    is_final: bool,
    body: ErrorBody,
}

/// Body `{"error": {...}}`, always with all four keys.
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
    /// Makes an error that has no [`ErrorCode`].
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

    /// Sets `Retry-After` to `wait`, rounded up to whole seconds, at least one.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some((wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1));
        self
    }

    /// Sets the parameter that the error is about.
    #[must_use]
    pub fn about(mut self, param: impl Into<String>) -> Self {
        self.body.error.param = Some(param.into());
        self
    }

    /// Returns the HTTP status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns the body that the client reads.
    pub fn body(&self) -> &ErrorBody {
        &self.body
    }
}

impl ErrorBody {
    /// Returns the message for people.
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
            // Logged at debug level: probes poll every second during a start, and clients retry under load.
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
        // For middleware of APIs with another error format.
        response.extensions_mut().insert(self.body);
        response
    }
}
