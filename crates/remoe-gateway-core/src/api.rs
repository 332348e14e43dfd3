//! Client APIs: the form of error events and of last events in their streams.

use bytes::Bytes;
use remoe_http::{ApiError, is_messages_path, messages_error};
use serde::Serialize;
use serde_json::{Value, json};

/// Path of OpenAI's Responses API.
pub(crate) const RESPONSES_PATH: &str = "/v1/responses";

/// First lines of the last event of a stream, for each API.
const CHAT_LAST_EVENTS: &[&[u8]] = &[b"data: [DONE]\n"];
const RESPONSES_LAST_EVENTS: &[&[u8]] = &[b"event: response.completed\n", b"event: response.incomplete\n"];
const MESSAGES_LAST_EVENTS: &[&[u8]] = &[b"event: message_stop\n"];

/// API of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Api {
    /// OpenAI's chat completions and completions, and all other paths.
    Completions,
    /// OpenAI's Responses.
    Responses,
    /// Anthropic's Messages.
    Messages,
}

impl Api {
    /// Returns the API of `target`, a path with or without a query.
    pub(crate) fn from_target(target: &str) -> Self {
        let path = target.split('?').next().unwrap_or_default();
        match path {
            RESPONSES_PATH => Self::Responses,
            path if is_messages_path(path) => Self::Messages,
            _ => Self::Completions,
        }
    }

    /// Returns the possible first lines of a stream's last event.
    pub(crate) fn last_event_lines(self) -> &'static [&'static [u8]] {
        match self {
            Self::Completions => CHAT_LAST_EVENTS,
            Self::Responses => RESPONSES_LAST_EVENTS,
            Self::Messages => MESSAGES_LAST_EVENTS,
        }
    }

    /// Returns `error` as the last event of a stream.
    pub(crate) fn error_event(self, error: &ApiError) -> Bytes {
        match self {
            Self::Completions => event(None, error.body()),
            Self::Responses => {
                event(Some("error"), &response_error(&serde_json::to_value(error.body()).unwrap_or_default()))
            }
            Self::Messages => {
                event(Some("error"), &messages_error(error.status().as_u16(), error.body().message()))
            }
        }
    }

    /// Returns `body`, a main function's answer that is an error, as the last event of a stream.
    pub(crate) fn error_body_event(self, body: &[u8]) -> Bytes {
        match self {
            Self::Completions => [b"data: ", body, b"\n\n"].concat().into(),
            Self::Messages => [b"event: error\ndata: ", body, b"\n\n"].concat().into(),
            Self::Responses => {
                event(Some("error"), &response_error(&serde_json::from_slice(body).unwrap_or_default()))
            }
        }
    }
}

/// Returns the data of an `error` event of the Responses API. Some clients read its own fields, others those of the
/// nested error body.
fn response_error(body: &Value) -> Value {
    let error = &body["error"];
    json!({
        "type": "error",
        "code": error["code"],
        "message": error["message"],
        "param": error["param"],
        "sequence_number": 0,
        "error": error,
    })
}

fn event(name: Option<&str>, data: &impl Serialize) -> Bytes {
    let name = name.map(|name| format!("event: {name}\n")).unwrap_or_default();
    let data = serde_json::to_vec(data).unwrap_or_default();
    [name.as_bytes(), b"data: ", &data, b"\n\n"].concat().into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use remoe_proto::{ErrorCode, ServiceError};

    #[test]
    fn paths_belong_to_their_api() {
        let api = |path: &str| Api::from_target(path);
        assert_eq!(api("/v1/responses?a=b"), Api::Responses);
        assert_eq!(api("/v1/messages"), Api::Messages);
        assert_eq!(api("/v1/messages/count_tokens"), Api::Messages);
        assert_eq!(api("/v1/chat/completions"), Api::Completions);
    }

    #[test]
    fn error_is_an_event_of_the_api() {
        let error: ApiError = ServiceError::new(ErrorCode::Unavailable, "m").into();
        let text = |api: Api| String::from_utf8(api.error_event(&error).to_vec()).unwrap();
        let openai = r#"{"message":"m","type":"overloaded_error","param":null,"code":"service_unavailable"}"#;
        assert_eq!(text(Api::Completions), format!("data: {{\"error\":{openai}}}\n\n"));
        assert_eq!(
            text(Api::Messages),
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"m\"}}\n\n"
        );
        let responses = format!(
            "event: error\ndata: {{\"type\":\"error\",\"code\":\"service_unavailable\",\"message\":\"m\",\
             \"param\":null,\"sequence_number\":0,\"error\":{openai}}}\n\n"
        );
        assert_eq!(text(Api::Responses), responses);
        assert_eq!(Api::Responses.error_body_event(format!("{{\"error\":{openai}}}").as_bytes()), responses);
    }
}
