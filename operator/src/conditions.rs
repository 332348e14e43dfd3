//! Conditions of the status, by the conventions of the Kubernetes API.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use remoe_api::{Condition, ConditionType};

/// Maximum characters of a message.
const MAX_MESSAGE: usize = 1024;

/// Desired content of a condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConditionContent {
    /// Set if the condition holds.
    pub is_true: bool,
    /// Reason, one word in UpperCamelCase.
    pub reason: String,
    /// Message for users.
    pub message: String,
}

impl ConditionContent {
    /// Creates a condition that is true.
    pub(crate) fn met(reason: &str, message: impl Into<String>) -> Self {
        Self { is_true: true, reason: reason.to_owned(), message: message.into() }
    }

    /// Creates a condition that is false.
    pub(crate) fn unmet(reason: &str, message: impl Into<String>) -> Self {
        Self { is_true: false, reason: reason.to_owned(), message: message.into() }
    }

    /// Returns the condition. Its transition time changes only if its status differs from `before`.
    pub(crate) fn condition(
        self,
        of: ConditionType,
        before: Option<&Condition>,
        generation: Option<i64>,
        now: Timestamp,
    ) -> Condition {
        let status = if self.is_true { "True" } else { "False" };
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

/// Truncates to whole seconds, the resolution of times in the API.
pub(crate) fn whole_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}
