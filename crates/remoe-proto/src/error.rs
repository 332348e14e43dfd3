use std::fmt;

/// Class of an error, in the one vocabulary of all services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// The request contradicts the contract; the same request will fail again.
    InvalidArgument,
    /// The prompt and the tokens asked for exceed the model's context.
    ContextLengthExceeded,
    /// The named thing does not exist here.
    NotFound,
    /// The caller did not prove who it is.
    Unauthenticated,
    /// A bounded queue or buffer is full; try again later.
    ResourceExhausted,
    /// The service is starting, draining or cannot reach what it needs; try again later.
    Unavailable,
    /// The request has waited for capacity for as long as it may.
    QueueDeadlineExceeded,
    /// The time allowed has passed.
    DeadlineExceeded,
    /// A fault of the service itself.
    Internal,
}

impl ErrorCode {
    /// The HTTP status of this error.
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

    /// The gRPC status code of this error.
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

    /// The `type` of an OpenAI-style error object.
    pub fn openai_type(self) -> &'static str {
        match self {
            Self::InvalidArgument | Self::ContextLengthExceeded | Self::NotFound => "invalid_request_error",
            Self::Unauthenticated => "authentication_error",
            Self::ResourceExhausted => "rate_limit_error",
            Self::Unavailable | Self::QueueDeadlineExceeded => "overloaded_error",
            Self::DeadlineExceeded | Self::Internal => "api_error",
        }
    }

    /// The `code` of an OpenAI-style error object, where clients expect one.
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

/// Longest message and longest field of an error in bytes: they quote what a caller sent, which can be
/// as long as a body, and travel in headers.
const MESSAGE_BYTES: usize = 1000;
const FIELD_BYTES: usize = 200;
/// No word is longer, in bytes.
const LONGEST_WORD: usize = 40;

/// At most `limit` bytes of `text`.
fn shown(text: impl Into<String>, limit: usize) -> String {
    let mut text = text.into();
    if text.len() > limit {
        let mut end = limit - '…'.len_utf8();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        // A word in half reads as another one; quotes of what has no spaces are cut anywhere.
        let word =
            text.get(..end).and_then(|text| text.rfind(' ')).filter(|space| end - space <= LONGEST_WORD);
        text.truncate(word.unwrap_or(end));
        text.push('…');
    }
    text
}

/// An error as a service answers it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceError {
    /// The class of the error.
    pub code: ErrorCode,
    /// Cause and remedy, for users.
    pub message: String,
    /// Parameter or field that was wrong, if one was.
    pub field: Option<String>,
}

impl ServiceError {
    /// Creates an error of class `code`.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: shown(message, MESSAGE_BYTES), field: None }
    }

    /// Returns the error as one about the parameter `field`.
    #[must_use]
    pub fn about(self, field: impl Into<String>) -> Self {
        Self { field: Some(shown(field, FIELD_BYTES)), ..self }
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
    fn what_a_caller_sent_is_not_sent_back_whole() {
        let error = ServiceError::invalid("é".repeat(5000), "é".repeat(5000));
        assert!(error.message.len() <= MESSAGE_BYTES && error.message.ends_with("é…"));
        assert!(error.field.is_some_and(|field| field.len() <= FIELD_BYTES && field.ends_with("é…")));
        let short = ServiceError::invalid("n", "invalid `n`: expected 1 to 4, got 5");
        assert_eq!(
            (short.field.as_deref(), &*short.message),
            (Some("n"), "invalid `n`: expected 1 to 4, got 5")
        );
    }
}
