//! Parts of a request that the gateway reads: its model, if it streams, how long its client waits.

use axum::http::HeaderMap;
use remoe_process::parse_duration;
use remoe_proto::{ErrorCode, ServiceError};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use std::time::Duration;

/// Whole seconds or decimals that the client waits for an answer.
const TIMEOUT: &str = "x-request-timeout";
/// OpenAI's clients say their own: for JavaScript the first, for Python the second. Of a stream it is the
/// longest silence, which keep-alives end.
const CLIENT_TIMEOUTS: [&str; 2] = ["x-stainless-timeout", "x-stainless-read-timeout"];

/// The fields of a body that decide where it goes; the others are the main function's.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RequestFields {
    pub(crate) model: Option<String>,
    pub(crate) stream: Option<bool>,
    /// The answer's usage is to state its cost.
    pub(crate) include_figures: Option<bool>,
    queue_deadline: Option<String>,
    n: OptionalNumber,
    max_tokens: OptionalNumber,
    max_completion_tokens: OptionalNumber,
    max_output_tokens: OptionalNumber,
    prompt: Count,
    input: Count,
}

/// A whole number, if the field is one. Whatever else it is, the main function answers.
#[derive(Debug, Default, Clone, Copy)]
struct OptionalNumber(Option<u64>);

impl<'de> Deserialize<'de> for OptionalNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?;
        Ok(Self(raw.get().parse().ok()))
    }
}

/// Number of prompts in the field, if it is a list of them.
#[derive(Debug, Default, Clone, Copy)]
struct Count(u64);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?.get();
        let first = raw.strip_prefix('[').and_then(|rest| rest.trim_start().bytes().next());
        // Token ids are one prompt.
        let is_list = first.is_some_and(|first| matches!(first, b'"' | b'['));
        let count = || serde_json::from_str::<Vec<IgnoredAny>>(raw).map_or(0, |list| list.len() as u64);
        Ok(Self(if is_list { count() } else { 1 }))
    }
}

impl RequestFields {
    /// Prompts of the request at `target`: 1 or more.
    pub(crate) fn prompts(&self, target: &str) -> u64 {
        let Count(prompts) = match target.split('?').next().unwrap_or_default() {
            "/v1/completions" => self.prompt,
            "/v1/embeddings" => self.input,
            _ => Count(1),
        };
        prompts.max(1)
    }

    /// Choices for each prompt, as far as the request says.
    pub(crate) fn choices(&self) -> u64 {
        self.n.0.unwrap_or(1)
    }

    /// Longest answer in tokens, if the request at `target` limits it. Main functions read other fields elsewhere.
    pub(crate) fn max_tokens(&self, target: &str) -> Option<u64> {
        match target.split('?').next().unwrap_or_default() {
            "/v1/chat/completions" | "/v1/completions" => self.max_completion_tokens.0.max(self.max_tokens.0),
            "/v1/responses" => self.max_output_tokens.0,
            "/v1/messages" => self.max_tokens.0,
            _ => None,
        }
    }

    /// How long the request may wait for its turn. What is no duration is refused by the main function.
    pub(crate) fn queue_deadline(&self) -> Option<Duration> {
        parse_duration(self.queue_deadline.as_deref()?).ok()
    }
}

/// How long the client waits, where it says so.
///
/// # Errors
/// `x-request-timeout` is no time.
pub(crate) fn timeout(headers: &HeaderMap, stream: bool) -> Result<Option<Duration>, ServiceError> {
    let said = |name: &str| {
        let value = headers.get(name)?.to_str().ok()?.trim().parse::<f64>().ok()?;
        Duration::try_from_secs_f64(value).ok()
    };
    if headers.contains_key(TIMEOUT) {
        return said(TIMEOUT).map(Some).ok_or_else(|| {
            ServiceError::new(
                ErrorCode::InvalidArgument,
                format!("invalid `{TIMEOUT}`: expected a number of seconds"),
            )
        });
    }
    Ok(CLIENT_TIMEOUTS.into_iter().find_map(said).filter(|_| !stream))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use axum::http::{HeaderName, HeaderValue};

    #[test]
    fn clients_say_how_long_they_wait() {
        let headers = |pairs: &[(&'static str, &'static str)]| -> HeaderMap {
            let pair = |(name, value): &(&'static str, &'static str)| {
                (HeaderName::from_static(name), HeaderValue::from_static(value))
            };
            pairs.iter().map(pair).collect()
        };
        let seconds = |pairs: &[(&'static str, &'static str)], stream| {
            timeout(&headers(pairs), stream).map(|time| time.map(|time| time.as_secs_f64())).ok()
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
