//! Interpretation of HTTP answers: headers, errors, and broken connections.

use crate::error::FetchError;
use crate::timeouts::{Failed, RetryDecision};
use http::{HeaderMap, StatusCode, header};
use reqwest::{Response, Url};
use std::ops::Range;
use std::time::{Duration, SystemTime};

/// Bytes of an error's text that are read, and shown.
const ERROR_BYTES: usize = 4 << 10;
const ERROR_SHOWN: usize = 200;

/// Returns the failure that a final answer without success means.
pub(crate) async fn failure(place: String, advice: &str, response: Response) -> Failed {
    let status = response.status();
    let after = retry_after(response.headers());
    let answer = error_text(response).await;
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            FetchError::Refused { place, answer, advice: advice.to_owned() }.into()
        }
        StatusCode::NOT_FOUND | StatusCode::GONE => FetchError::Missing { place, answer }.into(),
        status
            if status.is_server_error()
                || matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS) =>
        {
            Failed {
                error: FetchError::Unavailable { place, problem: answer },
                again: RetryDecision::Soon(after),
            }
        }
        _ => FetchError::Answer { place, problem: answer }.into(),
    }
}

/// Returns the failure of a request without an answer, or with an answer that broke off.
pub(crate) fn unanswered(place: String, error: reqwest::Error) -> Failed {
    // Its URL may be a signed one.
    let problem = causes(&error.without_url());
    Failed { error: FetchError::Unavailable { place, problem }, again: RetryDecision::Soon(None) }
}

/// Reports if an answer can mean that a redirect no longer holds.
pub(crate) fn is_lost(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::GONE
    )
}

/// Reports if the answer redirects to another URL. Amazon's answer to a request in the wrong region does not.
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

/// The range and the length of the file in `bytes START-LAST/LENGTH`.
pub(crate) fn content_range(headers: &HeaderMap) -> Option<(Range<u64>, u64)> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (range, size) = text.split_once('/')?;
    let (start, last) = range.split_once('-')?;
    let (start, last, size) = (start.parse().ok()?, last.parse::<u64>().ok()?, size.parse().ok()?);
    (start <= last && last < size).then(|| (start..last + 1, size))
}

/// The length of the answer.
pub(crate) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Seconds, or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    match text.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => httpdate::parse_http_date(text).ok()?.duration_since(SystemTime::now()).ok(),
    }
}

/// The status as people read it.
pub(crate) fn describe(response: &Response) -> String {
    response.status().to_string()
}

/// The status, and what the source says about it: the hub in headers, S3 in XML.
pub(crate) async fn error_text(mut response: Response) -> String {
    let status = describe(&response);
    let said = response.headers().get("x-error-message").and_then(|value| value.to_str().ok());
    if let Some(said) = said.map(shown) {
        return format!("{status}: {said}");
    }
    let mut body = Vec::new();
    while body.len() < ERROR_BYTES
        && let Ok(Some(chunk)) = response.chunk().await
    {
        body.extend_from_slice(&chunk);
    }
    let body = String::from_utf8_lossy(&body);
    let between = |tag: &str| {
        let (_, rest) = body.split_once(&format!("<{tag}>"))?;
        rest.split_once(&format!("</{tag}>")).map(|(text, _)| shown(text))
    };
    match (between("Code"), between("Message")) {
        (Some(code), Some(message)) => format!("{status}: {code}: {message}"),
        (Some(code), None) => format!("{status}: {code}"),
        _ => status,
    }
}

/// A foreign text as it can stand in a line.
fn shown(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).take(ERROR_SHOWN).collect()
}

/// An error and what it was caused by.
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
    fn content_ranges_are_inside_of_their_file() {
        assert_eq!(range("bytes 5-9/10"), Some((5..10, 10)));
        for wrong in ["bytes 5-10/10", "bytes 5-4/10", "bytes */10", "bytes 5-9/*", "5-9/10", "bytes 5-9"] {
            assert_eq!(range(wrong), None, "{wrong}");
        }
        assert_eq!(range(&format!("bytes 0-{0}/{0}", u64::MAX)), None);
    }

    #[test]
    fn what_a_source_says_fits_a_line() {
        assert_eq!(shown("a\nb\x1b[1m"), "ab[1m");
        assert_eq!(shown(&"é".repeat(ERROR_BYTES)).chars().count(), ERROR_SHOWN);
    }
}
