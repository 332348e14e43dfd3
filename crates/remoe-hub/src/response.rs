//! Interpretation of HTTP responses: headers, errors, and broken connections.

use crate::error::FetchError;
use crate::timeouts::{FailedAttempt, RetryDecision};
use http::{HeaderMap, StatusCode, header};
use reqwest::{Response, Url};
use std::ops::Range;
use std::time::{Duration, SystemTime};

/// Bytes of an error response's body that are read.
const ERROR_BODY_BYTES: usize = 4 << 10;
/// Characters of an error text that messages repeat.
const ERROR_TEXT_CHARACTERS: usize = 200;

/// Converts a final response without success into an error, and decides whether a retry can help.
pub(crate) async fn failure(location: String, advice: &str, response: Response) -> FailedAttempt {
    let status = response.status();
    let retry_after_delay = retry_after(response.headers());
    let answer = error_text(response).await;
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            FetchError::Refused { location, answer, advice: advice.to_owned() }.into()
        }
        StatusCode::NOT_FOUND | StatusCode::GONE => FetchError::Missing { location, answer }.into(),
        status
            if status.is_server_error()
                || matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS) =>
        {
            FailedAttempt {
                error: FetchError::Unavailable { location, problem: answer },
                retry: RetryDecision::Retry(retry_after_delay),
            }
        }
        _ => FetchError::InvalidResponse { location, problem: answer }.into(),
    }
}

/// Converts the error of a request without a complete response.
pub(crate) fn no_response(location: String, error: reqwest::Error) -> FailedAttempt {
    // Its URL may be signed, and signatures must not be printed.
    let problem = causes(&error.without_url());
    FailedAttempt { error: FetchError::Unavailable { location, problem }, retry: RetryDecision::Retry(None) }
}

/// Reports if a response can mean that a redirect target has expired.
pub(crate) fn is_expired(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::GONE
    )
}

/// Reports if the response redirects to another URL. Amazon's 301 to a request in the wrong region has no target.
pub(crate) fn is_redirect(response: &Response) -> bool {
    response.status().is_redirection() && response.headers().contains_key(header::LOCATION)
}

/// Returns the target of a redirect.
///
/// # Errors
/// The target is not a valid HTTP URL, or leads from https to http.
pub(crate) fn redirect(response: &Response, from: &Url) -> Result<Url, String> {
    let status = response.status();
    let location = response.headers().get(header::LOCATION);
    let target = location.and_then(|location| location.to_str().ok()).and_then(|text| from.join(text).ok());
    match target {
        Some(url) if from.scheme() == "https" && url.scheme() != "https" => {
            Err(format!("{status} redirect from https to http"))
        }
        Some(url) if matches!(url.scheme(), "http" | "https") => Ok(url),
        _ => Err(format!("{status} redirect to an invalid URL")),
    }
}

/// Parses `Content-Range: bytes START-LAST/LENGTH` into the range and the length of the file.
pub(crate) fn content_range(headers: &HeaderMap) -> Option<(Range<u64>, u64)> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (range, size) = text.split_once('/')?;
    let (start, last) = range.split_once('-')?;
    let (start, last, size) = (start.parse().ok()?, last.parse::<u64>().ok()?, size.parse().ok()?);
    (start <= last && last < size).then(|| (start..last + 1, size))
}

/// Parses `Content-Length`, in bytes.
pub(crate) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Parses `Retry-After`: seconds, or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    match text.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => httpdate::parse_http_date(text).ok()?.duration_since(SystemTime::now()).ok(),
    }
}

/// Formats the status code with its name.
pub(crate) fn describe(response: &Response) -> String {
    response.status().to_string()
}

/// Formats the status and the source's error text: the hub sends it in a header, S3 in XML.
pub(crate) async fn error_text(mut response: Response) -> String {
    let status = describe(&response);
    let message = response.headers().get("x-error-message").and_then(|value| value.to_str().ok());
    if let Some(message) = message.map(sanitised) {
        return format!("{status}: {message}");
    }
    let mut body = Vec::new();
    while body.len() < ERROR_BODY_BYTES
        && let Ok(Some(chunk)) = response.chunk().await
    {
        body.extend_from_slice(&chunk);
    }
    let body = String::from_utf8_lossy(&body);
    let element_text = |tag: &str| {
        let (_, rest) = body.split_once(&format!("<{tag}>"))?;
        rest.split_once(&format!("</{tag}>")).map(|(text, _)| sanitised(text))
    };
    match (element_text("Code"), element_text("Message")) {
        (Some(code), Some(message)) => format!("{status}: {code}: {message}"),
        (Some(code), None) => format!("{status}: {code}"),
        _ => status,
    }
}

/// Removes control characters from a source's text, and truncates it.
fn sanitised(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).take(ERROR_TEXT_CHARACTERS).collect()
}

/// Formats an error with its causes.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        next = error.source();
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn range(text: &str) -> Option<(Range<u64>, u64)> {
        content_range(&HeaderMap::from_iter([(header::CONTENT_RANGE, text.parse().unwrap())]))
    }

    #[test]
    fn content_range_outside_file_is_rejected() {
        assert_eq!(range("bytes 5-9/10"), Some((5..10, 10)));
        for wrong in ["bytes 5-10/10", "bytes 5-4/10", "bytes */10", "bytes 5-9/*", "5-9/10", "bytes 5-9"] {
            assert_eq!(range(wrong), None, "{wrong}");
        }
        assert_eq!(range(&format!("bytes 0-{0}/{0}", u64::MAX)), None);
    }

    #[test]
    fn error_text_is_sanitised_and_truncated() {
        assert_eq!(sanitised("a\nb\x1b[1m"), "ab[1m");
        assert_eq!(sanitised(&"é".repeat(ERROR_BODY_BYTES)).chars().count(), ERROR_TEXT_CHARACTERS);
    }
}
