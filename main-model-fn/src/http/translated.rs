//! Requests of other APIs that were translated to chats: the same checks, with errors in the terms of their own fields.

use super::chat;
use super::generate::PreparedGeneration;
use super::request_body::RequestBody;
use super::state::HttpState;
use remoe_proto::{ErrorCode, ServiceError};
use serde::Deserialize;
use serde_json::{Map, Value};

/// Checks `chat`, a translated request. `names` maps fields of chats to fields of the other API.
///
/// # Errors
/// Fails as [`chat::check`] does, with errors of the other API's fields.
pub(super) fn checked(
    state: &HttpState,
    chat: Map<String, Value>,
    names: &[(&str, &str)],
) -> Result<PreparedGeneration, ServiceError> {
    chat::check(state, request_body(chat)?).map_err(|error| renamed(error, names))
}

/// Parses `chat` as the body of a chat.
///
/// # Errors
/// Fails if it is none, which is a bug of the translation.
fn request_body(chat: Map<String, Value>) -> Result<RequestBody, ServiceError> {
    RequestBody::deserialize(Value::Object(chat)).map_err(|error| {
        ServiceError::new(ErrorCode::InvalidArgument, format!("invalid request body: {error}"))
    })
}

/// Replaces field names of chats by those of another API, in the error's field and in its message.
pub(super) fn renamed(mut error: ServiceError, names: &[(&str, &str)]) -> ServiceError {
    let Some(field) = error.field.take() else { return error };
    let new = names.iter().fold(field.clone(), |field, (from, to)| field.replace(from, to));
    let quoted = |name: &str| format!("`{name}`");
    error.message = error.message.replace(&quoted(&field), &quoted(&new));
    for (from, to) in names {
        error.message = error.message.replace(&quoted(from), &quoted(to));
    }
    error.field = Some(new);
    error
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn error_of_translated_chat_names_own_field() {
        let names = [("max_completion_tokens", "max_output_tokens"), ("].function.", "].")];
        let wrong = |field: &str, message: &str| renamed(ServiceError::invalid(field, message), &names);
        let error = wrong("max_completion_tokens", "invalid `max_completion_tokens`: expected 1, got 0");
        assert_eq!(error.field.as_deref(), Some("max_output_tokens"));
        assert_eq!(error.message, "invalid `max_output_tokens`: expected 1, got 0");
        let error =
            wrong("tools[3].function.name", "invalid `tools[3].function.name`: \"max_completion_tokens\"");
        assert_eq!(error.field.as_deref(), Some("tools[3].name"));
        assert_eq!(error.message, "invalid `tools[3].name`: \"max_completion_tokens\"");
    }
}
