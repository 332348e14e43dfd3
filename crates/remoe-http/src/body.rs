//! Bodies of requests: reads their bytes, and parses JSON.

use crate::error::ApiError;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::Bytes;
use futures_util::StreamExt;
use remoe_proto::{ErrorCode, ServiceError};
use serde::de::DeserializeOwned;
use std::time::Duration;

/// Largest nesting depth of lists and objects.
const MAX_DEPTH: usize = 64;

/// Largest part of a too large body that is read before the refusal, in bytes. Clients that write all before they
/// read would not see the refusal otherwise.
const DRAIN_BYTES: usize = 64 << 20;
/// Longest time for which a too large body is read.
const DRAIN_TIME: Duration = Duration::from_secs(5);

/// Reads a JSON body of at most `limit` bytes within `time`. A larger body is read to its end, within bounds, before
/// it is refused.
///
/// # Errors
/// The content type is not JSON, or the body is too large, too late or incomplete.
pub async fn receive_body(request: Request, limit: usize, time: Duration) -> Result<Bytes, ApiError> {
    check_content_type(request.headers())?;
    tokio::time::timeout(time, collect(request, limit)).await.map_err(|_| {
        let message = format!("request timeout: the body did not arrive within {time:?}");
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message)
    })?
}

/// Accepts JSON or a missing content type. Other types are refused, because browsers send them to foreign servers
/// without a CORS preflight.
fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else {
        return Ok(());
    };
    let content_type = String::from_utf8_lossy(value.as_bytes()).to_ascii_lowercase();
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    if media_type == "application/json"
        || (media_type.starts_with("application/") && media_type.ends_with("+json"))
    {
        return Ok(());
    }
    let message = format!("invalid Content-Type: expected application/json, got {media_type}");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

async fn collect(request: Request, limit: usize) -> Result<Bytes, ApiError> {
    let too_large = || {
        let message = format!("request body too large: expected at most {limit} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
    };
    let declared = request
        .headers()
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    let expects_continue = request.headers().contains_key(header::EXPECT);
    let body = request.into_body();
    if declared.is_some_and(|length| length > limit) {
        if !expects_continue {
            drain(body).await;
        }
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(declared.unwrap_or(0));
    let mut chunks = body.into_data_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| {
            let message = format!("cannot read the request body: {error}");
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_body", message)
        })?;
        if bytes.len() + chunk.len() > limit {
            drain(Body::from_stream(chunks)).await;
            return Err(too_large());
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes.into())
}

/// Reads and drops the rest of a body, within bounds.
async fn drain(body: Body) {
    let mut chunks = body.into_data_stream();
    let mut drained_bytes = 0;
    let read = async {
        while let Some(Ok(chunk)) = chunks.next().await {
            drained_bytes += chunk.len();
            if drained_bytes > DRAIN_BYTES {
                break;
            }
        }
    };
    // The refusal is sent even if the body has not ended by then.
    let _read_or_late = tokio::time::timeout(DRAIN_TIME, read).await;
}

/// Parses `bytes` as a JSON object of type `T`. Errors name the field.
///
/// # Errors
/// The body is no UTF-8, no JSON object, nested too deeply, or not of the type.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ServiceError> {
    let invalid = |message: String| ServiceError::new(ErrorCode::InvalidArgument, message);
    let text = std::str::from_utf8(bytes)
        .map_err(|error| invalid(format!("invalid request body: expected UTF-8: {error}")))?;
    if !text.trim_start().starts_with('{') {
        return Err(invalid("invalid request body: expected a JSON object".to_owned()));
    }
    if is_deeper_than(text, MAX_DEPTH) {
        return Err(invalid(format!("invalid request body: nested deeper than {MAX_DEPTH} levels")));
    }
    let mut json = serde_json::Deserializer::from_str(text);
    let body = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let cause = error.into_inner();
        // serde_path_to_error ends the path of an invalid key with `.` or `?`.
        let field =
            duplicate_field(&path, &cause.to_string()).or((!path.ends_with(['.', '?'])).then_some(path));
        let message = match (&field, cause.is_data()) {
            (Some(field), true) => format!("`{field}`: {cause}"),
            (None, true) => cause.to_string(),
            (Some(field), false) => format!("`{field}`: invalid JSON: {cause}"),
            (None, false) => format!("invalid JSON: {cause}"),
        };
        let error = invalid(message);
        match field {
            Some(field) => error.about(field),
            None => error,
        }
    })?;
    json.end().map_err(|error| invalid(format!("invalid JSON: {error}")))?;
    Ok(body)
}

/// Returns the field that the object at `path` has twice. serde names it only in its message.
fn duplicate_field(path: &str, message: &str) -> Option<String> {
    let (name, _) = message.strip_prefix("duplicate field `")?.split_once('`')?;
    Some(if path == "." { name.to_owned() } else { format!("{path}.{name}") })
}

/// Reports if brackets outside of strings are nested deeper than `limit`.
fn is_deeper_than(text: &str, limit: usize) -> bool {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => (),
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => (),
        }
        if depth > limit {
            return true;
        }
    }
    false
}
