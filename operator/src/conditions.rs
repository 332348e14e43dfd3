//! Conditions of the status, by the conventions of the Kubernetes API.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use remoe_api::{Condition, ConditionType};

/// Characters of a message.
const MAX_MESSAGE: usize = 1024;

/// Desired content of a condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConditionContent {
    /// Set if the condition holds.
    pub holds: bool,
    /// Why, as one word in CamelCase.
    pub reason: String,
    /// Why, for people.
    pub message: String,
}

impl ConditionContent {
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

/// In whole seconds, as times are read back.
pub(crate) fn whole_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}
