//! Fields of a request that the gateway reads, such as its model, whether it streams, and its limits.

use axum::http::HeaderMap;
use remoe_process::parse_duration;
use remoe_proto::{ErrorCode, ServiceError};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use std::time::Duration;

/// Header with the seconds, possibly decimal, that the client waits for an answer.
const TIMEOUT_HEADER: &str = "x-request-timeout";
/// Timeout headers of OpenAI's client libraries, for JavaScript and for Python. For streams they are the longest
/// silence, which keep-alive comments end.
const OPENAI_TIMEOUT_HEADERS: [&str; 2] = ["x-stainless-timeout", "x-stainless-read-timeout"];

/// Fields of a body that the gateway needs. The main function checks all others.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RequestFields {
    pub(crate) model: Option<String>,
    pub(crate) stream: Option<bool>,
    /// Set if the answer's usage is to state the cost.
    pub(crate) include_figures: Option<bool>,
    queue_deadline: Option<String>,
    n: OptionalNumber,
    max_tokens: OptionalNumber,
    max_completion_tokens: OptionalNumber,
    max_output_tokens: OptionalNumber,
    prompt: PromptCount,
    input: PromptCount,
}

/// Whole number; `None` if the field is something else, which the main function refuses.
#[derive(Debug, Default, Clone, Copy)]
struct OptionalNumber(Option<u64>);

impl<'de> Deserialize<'de> for OptionalNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?;
        Ok(Self(raw.get().parse().ok()))
    }
}

/// Number of prompts in a field: the length of a list of prompts, else 1.
#[derive(Debug, Default, Clone, Copy)]
struct PromptCount(u64);

impl<'de> Deserialize<'de> for PromptCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?.get();
        let first = raw.strip_prefix('[').and_then(|rest| rest.trim_start().bytes().next());
        // A list of token ids is one prompt.
        let is_list = first.is_some_and(|first| matches!(first, b'"' | b'['));
        let count = || serde_json::from_str::<Vec<IgnoredAny>>(raw).map_or(0, |list| list.len() as u64);
        Ok(Self(if is_list { count() } else { 1 }))
    }
}

impl RequestFields {
    /// Returns the number of prompts of the request at `target`, at least 1.
    pub(crate) fn prompts(&self, target: &str) -> u64 {
        let PromptCount(prompts) = match target.split('?').next().unwrap_or_default() {
            "/v1/completions" => self.prompt,
            "/v1/embeddings" => self.input,
            _ => PromptCount(1),
        };
        prompts.max(1)
    }

    /// Returns the number of choices per prompt; 1 if the request does not state it.
    pub(crate) fn choices(&self) -> u64 {
        self.n.0.unwrap_or(1)
    }

    /// Returns the limit of each answer in tokens, if the request at `target` has one. Each API has its own field.
    pub(crate) fn max_tokens(&self, target: &str) -> Option<u64> {
        match target.split('?').next().unwrap_or_default() {
            "/v1/chat/completions" | "/v1/completions" => self.max_completion_tokens.0.max(self.max_tokens.0),
            "/v1/responses" => self.max_output_tokens.0,
            "/v1/messages" => self.max_tokens.0,
            _ => None,
        }
    }

    /// Returns the longest time that the request may wait in the queue. An invalid value is ignored here, and refused
    /// by the main function.
    pub(crate) fn queue_deadline(&self) -> Option<Duration> {
        parse_duration(self.queue_deadline.as_deref()?).ok()
    }
}

/// Returns the time that the client waits for an answer, if it states it.
///
/// # Errors
/// `x-request-timeout` is no valid number of seconds.
pub(crate) fn client_timeout(headers: &HeaderMap, is_stream: bool) -> Result<Option<Duration>, ServiceError> {
    let seconds_in = |name: &str| {
        let value = headers.get(name)?.to_str().ok()?.trim().parse::<f64>().ok()?;
        Duration::try_from_secs_f64(value).ok()
    };
    if headers.contains_key(TIMEOUT_HEADER) {
        return seconds_in(TIMEOUT_HEADER).map(Some).ok_or_else(|| {
            ServiceError::new(
                ErrorCode::InvalidArgument,
                format!("invalid `{TIMEOUT_HEADER}`: expected a number of seconds"),
            )
        });
    }
    Ok(OPENAI_TIMEOUT_HEADERS.into_iter().find_map(seconds_in).filter(|_| !is_stream))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use axum::http::{HeaderName, HeaderValue};

    #[test]
    fn client_timeout_is_read_from_any_of_its_headers() {
        let headers = |pairs: &[(&'static str, &'static str)]| -> HeaderMap {
            let pair = |(name, value): &(&'static str, &'static str)| {
                (HeaderName::from_static(name), HeaderValue::from_static(value))
            };
            pairs.iter().map(pair).collect()
        };
        let seconds = |pairs: &[(&'static str, &'static str)], stream| {
            client_timeout(&headers(pairs), stream).map(|time| time.map(|time| time.as_secs_f64())).ok()
        };
        assert_eq!(seconds(&[], false), Some(None));
        assert_eq!(seconds(&[("x-request-timeout", "1.5")], true), Some(Some(1.5)));
        assert_eq!(seconds(&[("x-stainless-read-timeout", "600")], false), Some(Some(600.0)));
        assert_eq!(seconds(&[("x-stainless-timeout", "60")], true), Some(None));
        assert_eq!(
            seconds(&[("x-request-timeout", "2"), ("x-stainless-timeout", "60")], false),
            Some(Some(2.0))
        );
        for wrong in ["", "-1", "soon", "nan", "inf", "1e300"] {
            assert_eq!(seconds(&[("x-request-timeout", wrong)], false), None, "{wrong}");
            assert_eq!(seconds(&[("x-stainless-timeout", wrong)], false), Some(None), "{wrong}");
        }
    }
}
