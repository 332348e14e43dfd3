//! Errors in the form that Anthropic's clients expect, on the routes of `/v1/messages`.

use crate::error::ErrorBody;
use axum::Json;
use axum::extract::Request;
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// Path of the Messages API. Paths below it belong to the API, too.
const PATH: &str = "/v1/messages";

/// `{"type": "error", "error": {"type", "message"}}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MessagesError {
    #[serde(rename = "type")]
    kind: &'static str,
    error: MessagesErrorFields,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct MessagesErrorFields {
    #[serde(rename = "type")]
    kind: &'static str,
    message: String,
}

/// Returns the error body for HTTP status `status`.
pub fn messages_error(status: u16, message: &str) -> MessagesError {
    let kind = match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        504 => "timeout_error",
        status if status >= 500 => "api_error",
        _ => "invalid_request_error",
    };
    MessagesError { kind: "error", error: MessagesErrorFields { kind, message: message.to_owned() } }
}

/// Returns whether `path` belongs to the API.
pub fn is_messages_path(path: &str) -> bool {
    path.strip_prefix(PATH).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Middleware that gives this server's own errors Anthropic's form, on the routes of its API.
pub async fn shape_messages_errors(request: Request, next: Next) -> Response {
    let is_messages_route = is_messages_path(request.uri().path());
    let mut response = next.run(request).await;
    let error = response.extensions_mut().remove::<ErrorBody>().filter(|_| is_messages_route);
    let Some(error) = error else { return response };
    let (mut head, _) = response.into_parts();
    head.headers.remove(header::CONTENT_LENGTH);
    let body = Json(messages_error(head.status.as_u16(), error.message())).into_response().into_body();
    Response::from_parts(head, body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_have_types_of_anthropic() {
        let kinds =
            [400, 401, 404, 405, 413, 429, 500, 503].map(|status| messages_error(status, "m").error.kind);
        assert_eq!(
            kinds,
            [
                "invalid_request_error",
                "authentication_error",
                "not_found_error",
                "invalid_request_error",
                "request_too_large",
                "rate_limit_error",
                "api_error",
                "overloaded_error",
            ]
        );
    }

    #[test]
    fn paths_below_messages_belong_to_it() {
        assert!(["/v1/messages", "/v1/messages/count_tokens"].into_iter().all(is_messages_path));
        assert!(!["/v1/messagesx", "/v1/chat/completions", "/"].into_iter().any(is_messages_path));
    }
}
