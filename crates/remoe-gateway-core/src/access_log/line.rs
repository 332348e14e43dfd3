//! One line of the access log, as text or JSON.

use crate::caller::Caller;
use serde::Serialize;
use std::fmt::Write;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

/// Largest number of characters of a value in a line.
const MAX_VALUE_CHARS: usize = 128;

/// Form of the lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessLogFormat {
    /// Words and `name=value`, for people. Leaves out successful polls, which the page and `remoe top` make every
    /// second.
    Text,
    /// One JSON object per line, for all requests.
    Json,
}

/// Facts of a request that become known while it is served. An extension of the request.
#[derive(Default)]
pub(crate) struct RequestFacts {
    pub(crate) caller: OnceLock<Caller>,
    /// Name of the model that the request selected; never text that a client sent.
    pub(crate) model: OnceLock<Arc<str>>,
    /// Prompt tokens and completion tokens.
    pub(crate) tokens: OnceLock<(u64, u64)>,
    /// Seconds until the first token.
    pub(crate) first_token: OnceLock<f64>,
}

/// Completed request, as the access log records it.
pub(super) struct AccessRecord<'a> {
    pub(super) time: SystemTime,
    pub(super) request_id: Option<&'a str>,
    pub(super) trace_id: Option<String>,
    /// Name of the tenant or, without keys, the client's address. Empty if the key is invalid.
    pub(super) client: &'a str,
    pub(super) tenant: Option<&'a str>,
    pub(super) model: Option<&'a str>,
    pub(super) method: &'a str,
    pub(super) route: &'static str,
    pub(super) status: u16,
    pub(super) bytes: u64,
    pub(super) prompt_tokens: Option<u64>,
    pub(super) completion_tokens: Option<u64>,
    /// Seconds until the first token.
    pub(super) first_token: Option<f64>,
    /// Time until the answer began.
    pub(super) time_to_head: Duration,
    /// Time until the answer ended.
    pub(super) total_time: Duration,
    pub(super) is_complete: bool,
    /// Lines before this one that were dropped because the writer was too slow.
    pub(super) left_out: u64,
}

/// Line as JSON. Its first fields are those of the programs' own logs.
#[derive(Serialize)]
struct JsonLine<'a> {
    /// RFC 3339 in UTC.
    timestamp: String,
    level: &'static str,
    message: &'static str,
    /// Seconds since 1970.
    time: f64,
    request_id: Option<&'a str>,
    /// Absent if the request is not traced.
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<&'a str>,
    client: &'a str,
    tenant: Option<&'a str>,
    model: Option<&'a str>,
    method: &'a str,
    route: &'static str,
    status: u16,
    /// Bytes of the answer's body that were sent.
    bytes: u64,
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    /// Milliseconds until the first token, until the answer began, and until it ended.
    ttft_ms: Option<f64>,
    head_ms: f64,
    whole_ms: f64,
    complete: bool,
    /// Lines before this one that were dropped because the disk was slow.
    #[serde(skip_serializing_if = "is_zero")]
    left_out: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // As serde asks for it.
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl AccessRecord<'_> {
    /// Returns the line without a line break; `None` if `format` leaves the request out.
    pub(super) fn render(&self, format: AccessLogFormat) -> Option<String> {
        match format {
            AccessLogFormat::Text if self.is_poll() => None,
            AccessLogFormat::Text => Some(self.text()),
            AccessLogFormat::Json => self.json().ok(),
        }
    }

    /// Reports if the request is a successful poll of a monitoring page.
    fn is_poll(&self) -> bool {
        let is_monitoring =
            matches!(self.route, "/health" | "/metrics" | "/status" | "/v1/placement" | "/page");
        self.method == "GET" && is_monitoring && (200..400).contains(&self.status) && self.left_out == 0
    }

    /// Returns the time of the request as RFC 3339 in UTC, to the millisecond.
    fn timestamp(&self) -> String {
        jiff::Timestamp::try_from(self.time).map_or_else(|_| String::new(), |time| format!("{time:.3}"))
    }

    fn text(&self) -> String {
        let seconds = |time: f64| format!("{time:.3}s");
        let (method, total) = (escaped(self.method), seconds(self.total_time.as_secs_f64()));
        let mut line = format!("{} {method} {} {} {total}", self.timestamp(), self.route, self.status);
        let count = |number: Option<u64>| number.map(|number| number.to_string());
        let optional = |name: Option<&str>| name.filter(|name| !name.is_empty()).map(escaped);
        let client = if self.tenant.is_some() { None } else { Some(self.client) };
        for (name, value) in [
            ("model", optional(self.model)),
            ("tenant", optional(self.tenant)),
            ("client", optional(client)),
            ("prompt_tokens", count(self.prompt_tokens)),
            ("completion_tokens", count(self.completion_tokens)),
            ("ttft", self.first_token.map(seconds)),
            ("id", optional(self.request_id)),
            ("trace", optional(self.trace_id.as_deref())),
            ("complete", (!self.is_complete).then(|| "false".to_owned())),
            ("left_out", Some(self.left_out).filter(|count| *count > 0).map(|count| count.to_string())),
        ] {
            if let Some(value) = value {
                // Writing to a string does not fail.
                write!(line, " {name}={value}").unwrap_or_default();
            }
        }
        line
    }

    fn json(&self) -> serde_json::Result<String> {
        let milliseconds = |seconds: f64| (seconds * 1e6).round() / 1e3;
        let time = self.time.duration_since(SystemTime::UNIX_EPOCH);
        let [request_id, tenant, model, trace_id] =
            [self.request_id, self.tenant, self.model, self.trace_id.as_deref()]
                .map(|name| name.map(truncated));
        serde_json::to_string(&JsonLine {
            timestamp: self.timestamp(),
            level: "INFO",
            message: "request",
            time: time.map_or(0.0, |since| since.as_secs_f64()),
            request_id,
            trace_id,
            client: truncated(self.client),
            tenant,
            model,
            method: truncated(self.method),
            route: self.route,
            status: self.status,
            bytes: self.bytes,
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            ttft_ms: self.first_token.map(milliseconds),
            head_ms: milliseconds(self.time_to_head.as_secs_f64()),
            whole_ms: milliseconds(self.total_time.as_secs_f64()),
            complete: self.is_complete,
            left_out: self.left_out,
        })
    }
}

/// Returns the first [`MAX_VALUE_CHARS`] characters of `text`.
fn truncated(text: &str) -> &str {
    text.char_indices().nth(MAX_VALUE_CHARS).map_or(text, |(end, _)| &text[..end])
}

/// Truncates `text`, and quotes and escapes it unless it is a plain word. So it cannot end the line, look like
/// another field, or reach the terminal as a control sequence.
fn escaped(text: &str) -> String {
    let text = truncated(text);
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@+,~".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("{text:?}"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    fn line() -> AccessRecord<'static> {
        AccessRecord {
            time: UNIX_EPOCH + Duration::from_millis(1_767_323_045_678),
            request_id: Some("abc"),
            trace_id: None,
            client: "mine",
            tenant: Some("mine"),
            model: Some("org/model"),
            method: "POST",
            route: "/v1/completions",
            status: 200,
            bytes: 7,
            prompt_tokens: Some(12),
            completion_tokens: Some(34),
            first_token: Some(0.25),
            time_to_head: Duration::from_millis(260),
            total_time: Duration::from_millis(1500),
            is_complete: true,
            left_out: 0,
        }
    }

    #[test]
    fn text_line_has_names_tokens_and_times() {
        let text = line().render(AccessLogFormat::Text).unwrap();
        let expected = "2026-01-02T03:04:05.678Z POST /v1/completions 200 1.500s model=org/model tenant=mine \
                        prompt_tokens=12 completion_tokens=34 ttft=0.250s id=abc";
        assert_eq!(text, expected);
        let without_keys =
            AccessRecord { tenant: None, client: "::1", is_complete: false, left_out: 2, ..line() };
        let text = without_keys.render(AccessLogFormat::Text).unwrap();
        assert!(
            text.contains(" client=::1 ") && text.ends_with("id=abc complete=false left_out=2"),
            "{text}"
        );
    }

    #[test]
    fn json_line_has_names_tokens_and_times() {
        let text = line().render(AccessLogFormat::Json).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let field = |name: &str| json[name].to_string();
        assert_eq!(
            ["timestamp", "model", "tenant", "prompt_tokens", "completion_tokens", "ttft_ms", "whole_ms"]
                .map(field),
            [r#""2026-01-02T03:04:05.678Z""#, r#""org/model""#, r#""mine""#, "12", "34", "250.0", "1500.0"]
        );
    }

    #[test]
    fn hostile_names_stay_inside_their_field() {
        let hostile = "a\nFAKE GET / 200\r\u{1b}[2J\u{202e}\u{85} \" status=200";
        let long = "x".repeat(10_000);
        for format in [AccessLogFormat::Text, AccessLogFormat::Json] {
            let hostile = AccessRecord {
                request_id: Some(hostile),
                model: Some(hostile),
                tenant: Some(&long),
                method: hostile,
                ..line()
            };
            let text = hostile.render(format).unwrap();
            let is_hostile = |c: char| c.is_control() && (format == AccessLogFormat::Text || c < ' ');
            assert!(!text.contains(is_hostile) && !text.contains(&"x".repeat(MAX_VALUE_CHARS + 1)), "{text}");
        }
        let expected_end = "id=\"a\\nFAKE GET / 200\\r\\u{1b}[2J\\u{202e}\\u{85} \\\" status=200\"";
        let hostile = AccessRecord { request_id: Some(hostile), ..line() };
        assert!(hostile.render(AccessLogFormat::Text).unwrap().ends_with(expected_end));
    }

    #[test]
    fn text_leaves_out_polls_that_succeed() {
        let poll = |status, format| {
            AccessRecord { method: "GET", route: "/status", status, ..line() }.render(format)
        };
        assert_eq!(poll(200, AccessLogFormat::Text), None);
        assert!(poll(401, AccessLogFormat::Text).is_some() && poll(200, AccessLogFormat::Json).is_some());
    }
}
