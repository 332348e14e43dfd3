//! Errors of services, and their mapping to gRPC and HTTP.

use std::fmt;

/// Class of an error, common to all services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// The request is invalid. The same request will fail again.
    InvalidArgument,
    /// The prompt and the requested tokens exceed the model's context.
    ContextLengthExceeded,
    /// The named object does not exist.
    NotFound,
    /// The caller did not authenticate.
    Unauthenticated,
    /// A bounded queue or buffer is full. Try again later.
    ResourceExhausted,
    /// The service is starting, draining or lacks a dependency. Try again later.
    Unavailable,
    /// The request waited for capacity until its queue deadline.
    QueueDeadlineExceeded,
    /// The deadline of the request has passed.
    DeadlineExceeded,
    /// The service failed.
    Internal,
}

impl ErrorCode {
    /// Returns the HTTP status of this error.
    pub fn http_status(self) -> u16 {
        match self {
            Self::InvalidArgument | Self::ContextLengthExceeded => 400,
            Self::Unauthenticated => 401,
            Self::NotFound => 404,
            Self::ResourceExhausted => 429,
            Self::Internal => 500,
            Self::Unavailable | Self::QueueDeadlineExceeded => 503,
            Self::DeadlineExceeded => 504,
        }
    }

    /// Returns the gRPC status code of this error.
    pub fn grpc_code(self) -> tonic::Code {
        match self {
            Self::InvalidArgument => tonic::Code::InvalidArgument,
            Self::ContextLengthExceeded => tonic::Code::OutOfRange,
            Self::NotFound => tonic::Code::NotFound,
            Self::Unauthenticated => tonic::Code::Unauthenticated,
            Self::ResourceExhausted => tonic::Code::ResourceExhausted,
            Self::Unavailable | Self::QueueDeadlineExceeded => tonic::Code::Unavailable,
            Self::DeadlineExceeded => tonic::Code::DeadlineExceeded,
            Self::Internal => tonic::Code::Internal,
        }
    }

    fn from_grpc(code: tonic::Code) -> Self {
        match code {
            tonic::Code::InvalidArgument => Self::InvalidArgument,
            tonic::Code::OutOfRange => Self::ContextLengthExceeded,
            tonic::Code::NotFound => Self::NotFound,
            tonic::Code::Unauthenticated => Self::Unauthenticated,
            tonic::Code::ResourceExhausted => Self::ResourceExhausted,
            tonic::Code::Unavailable => Self::Unavailable,
            tonic::Code::DeadlineExceeded => Self::DeadlineExceeded,
            _ => Self::Internal,
        }
    }

    /// Returns the `type` of an OpenAI-style error object.
    pub fn openai_type(self) -> &'static str {
        match self {
            Self::InvalidArgument | Self::ContextLengthExceeded | Self::NotFound => "invalid_request_error",
            Self::Unauthenticated => "authentication_error",
            Self::ResourceExhausted => "rate_limit_error",
            Self::Unavailable | Self::QueueDeadlineExceeded => "overloaded_error",
            Self::DeadlineExceeded | Self::Internal => "api_error",
        }
    }

    /// Returns the `code` of an OpenAI-style error object, if clients expect one.
    pub fn openai_code(self) -> Option<&'static str> {
        match self {
            Self::InvalidArgument | Self::Internal => None,
            Self::ContextLengthExceeded => Some("context_length_exceeded"),
            Self::NotFound => Some("model_not_found"),
            Self::Unauthenticated => Some("invalid_api_key"),
            Self::ResourceExhausted => Some("rate_limit_exceeded"),
            Self::Unavailable => Some("service_unavailable"),
            Self::QueueDeadlineExceeded => Some("queue_deadline_exceeded"),
            Self::DeadlineExceeded => Some("timeout"),
        }
    }
}

/// Largest message of an error, in bytes. Messages quote input, which can be as long as a body, and travel in
/// headers.
const MAX_MESSAGE_BYTES: usize = 1000;
/// Largest field name of an error, in bytes.
const MAX_FIELD_BYTES: usize = 200;
/// Largest distance to a space at which a text is cut, in bytes.
const MAX_WORD_BYTES: usize = 40;

/// Truncates `text` to `limit` bytes, at a space if one is near.
fn truncated(text: impl Into<String>, limit: usize) -> String {
    let mut text = text.into();
    if text.len() > limit {
        let mut end = limit - '…'.len_utf8();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        // Half a word may read as another word. Quotes without spaces are cut anywhere.
        let word =
            text.get(..end).and_then(|text| text.rfind(' ')).filter(|space| end - space <= MAX_WORD_BYTES);
        text.truncate(word.unwrap_or(end));
        text.push('…');
    }
    text
}

/// Error that a service returns to its caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceError {
    /// Class of the error.
    pub code: ErrorCode,
    /// Cause and remedy, for users.
    pub message: String,
    /// Invalid parameter or field, if any.
    pub field: Option<String>,
}

impl ServiceError {
    /// Creates an error of class `code`.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: truncated(message, MAX_MESSAGE_BYTES), field: None }
    }

    /// Returns the error as one about the parameter `field`.
    #[must_use]
    pub fn about(self, field: impl Into<String>) -> Self {
        Self { field: Some(truncated(field, MAX_FIELD_BYTES)), ..self }
    }

    /// Creates an [`ErrorCode::InvalidArgument`] about the parameter `field`.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArgument, message).about(field)
    }
}

impl fmt::Display for ServiceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ServiceError {}

impl From<ServiceError> for tonic::Status {
    fn from(error: ServiceError) -> Self {
        let message = match error.field {
            Some(field) => format!("{field}: {}", error.message),
            None => error.message,
        };
        tonic::Status::new(error.code.grpc_code(), message)
    }
}

impl From<tonic::Status> for ServiceError {
    fn from(status: tonic::Status) -> Self {
        Self::new(ErrorCode::from_grpc(status.code()), status.message())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_input_is_truncated_in_errors() {
        let error = ServiceError::invalid("é".repeat(5000), "é".repeat(5000));
        assert!(error.message.len() <= MAX_MESSAGE_BYTES && error.message.ends_with("é…"));
        assert!(error.field.is_some_and(|field| field.len() <= MAX_FIELD_BYTES && field.ends_with("é…")));
        let short = ServiceError::invalid("n", "invalid `n`: expected 1 to 4, got 5");
        assert_eq!(
            (short.field.as_deref(), &*short.message),
            (Some("n"), "invalid `n`: expected 1 to 4, got 5")
        );
    }
}
