//! Durations of specs, by the grammar of the flags.

use remoe_process::parse_duration;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;
use std::time;

/// Duration above 0, such as `150ms`, `10s` or `1m30s`.
///
/// Takes what `metav1.Duration` takes, which the API server checks, and is written as `metav1.Duration` of kube is, so
/// that stored objects and hashes of specs stay what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Duration(time::Duration);

impl From<time::Duration> for Duration {
    fn from(duration: time::Duration) -> Self {
        Self(duration)
    }
}

impl From<Duration> for time::Duration {
    fn from(duration: Duration) -> Self {
        duration.0
    }
}

impl Serialize for Duration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:?}", self.0))
    }
}

impl<'de> Deserialize<'de> for Duration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Duration;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a duration such as 150ms, 10s or 1m30s")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
                parse_duration(text).map(Duration).map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Text)
    }
}

impl JsonSchema for Duration {
    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string"})
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    proptest! {
        #[test]
        fn texts_of_kubernetes_are_taken_with_their_meaning(
            text in "\\+?([0-9]{1,6}(\\.[0-9]{0,4})?|\\.[0-9]{1,4})(ns|us|\u{b5}s|\u{3bc}s|ms|s|m|h)\
                     (([0-9]{1,5}(\\.[0-9]{0,3})?)(ms|s|m|h)){0,3}"
        ) {
            let theirs: time::Duration = text.parse::<kube::core::Duration>().map_err(|error| {
                TestCaseError::fail(format!("{text}: {error}"))
            })?.into();
            match serde_json::from_value::<Duration>(json!(text)) {
                Ok(Duration(ours)) => prop_assert!(ours.abs_diff(theirs) <= time::Duration::from_micros(10)),
                Err(_) => prop_assert!(theirs <= time::Duration::from_nanos(1)),
            }
        }

        #[test]
        fn written_durations_are_those_of_kubernetes(nanos in 1..=i64::MAX as u64) {
            let duration = time::Duration::from_nanos(nanos);
            let text = serde_json::to_value(Duration(duration)).map_err(|error| TestCaseError::fail(error.to_string()))?;
            prop_assert_eq!(&text, &json!(kube::core::Duration::from(duration)));
            let read: Duration = serde_json::from_value(text).map_err(|error| TestCaseError::fail(error.to_string()))?;
            prop_assert_eq!(read, Duration(duration));
        }
    }

    #[test]
    fn overflowing_durations_are_refused() {
        for text in ["9999999999999999999999999999999h", "-5s", "0s", "10", "soon"] {
            let error = serde_json::from_value::<Duration>(json!(text)).map_err(|error| error.to_string());
            assert!(error.is_err_and(|error| error.contains(text)), "{text}");
        }
    }
}
