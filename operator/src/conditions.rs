//! Conditions of the status, by the conventions of the Kubernetes API.

use super::api::{Condition, ConditionType};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::time::Duration;

/// Characters of a message.
const MAX_MESSAGE: usize = 1024;

/// What a condition is to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Whether it holds.
    pub holds: bool,
    /// Why, as one word in CamelCase.
    pub reason: String,
    /// Why, for people.
    pub message: String,
}

impl Verdict {
    /// It holds.
    pub(crate) fn yes(reason: &str, message: impl Into<String>) -> Self {
        Self { holds: true, reason: reason.to_owned(), message: message.into() }
    }

    /// It does not hold.
    pub(crate) fn no(reason: &str, message: impl Into<String>) -> Self {
        Self { holds: false, reason: reason.to_owned(), message: message.into() }
    }

    /// The condition. Its time only moves when what `before` said is turned round.
    pub(crate) fn condition(
        self,
        of: ConditionType,
        before: Option<&Condition>,
        generation: Option<i64>,
        now: Timestamp,
    ) -> Condition {
        let status = if self.holds { "True" } else { "False" };
        let unchanged = before.filter(|before| before.status == status);
        Condition {
            type_: of.name().to_owned(),
            status: status.to_owned(),
            reason: self.reason,
            message: self.message.chars().take(MAX_MESSAGE).collect(),
            observed_generation: generation,
            last_transition_time: unchanged
                .map_or_else(|| Time(whole_seconds(now)), |before| before.last_transition_time.clone()),
        }
    }
}

/// Returns `clause` with a capital and a full stop.
pub(crate) fn sentence(clause: &str) -> String {
    let mut rest = clause.chars();
    let first = rest.next().map(|first| first.to_ascii_uppercase());
    first.into_iter().chain(rest).chain(['.']).collect()
}

/// Returns `time` as a spec states it, such as 1h30m or 45s.
pub(crate) fn as_in_spec(time: Duration) -> String {
    if time.is_zero() {
        return "0s".to_owned();
    }
    let seconds = time.as_secs();
    let whole = [(seconds / 3600, "h"), (seconds / 60 % 60, "m")].into_iter().filter(|(count, _)| *count > 0);
    let rest = Duration::new(seconds % 60, time.subsec_nanos());
    let rest = (!rest.is_zero()).then(|| format!("{rest:?}"));
    whole.map(|(count, unit)| format!("{count}{unit}")).chain(rest).collect()
}

/// In whole seconds, as times are read back.
pub(crate) fn whole_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_shown_as_specs_state_them() {
        for (milliseconds, shown) in [
            (0, "0s"),
            (1_500, "1.5s"),
            (45_000, "45s"),
            (90_000, "1m30s"),
            (600_000, "10m"),
            (5_400_000, "1h30m"),
            (86_400_000, "24h"),
        ] {
            assert_eq!(as_in_spec(Duration::from_millis(milliseconds)), shown);
        }
    }
}
