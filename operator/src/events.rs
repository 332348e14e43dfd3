//! Events for `kubectl describe`, on transitions only. Pure; the apply stage publishes them.

use jiff::Timestamp;
use remoe_api::{Condition, ConditionType, MoEDeploymentStatus};

/// Kubernetes event about a deployment.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ClusterEvent {
    /// Set if the event is a warning for a user.
    pub warning: bool,
    /// Reason, one word in UpperCamelCase.
    pub reason: String,
    /// Action that was done or tried. Events that differ only in their notes are aggregated by count.
    pub action: String,
    /// Message for users.
    pub note: String,
}

impl ClusterEvent {
    /// Creates an event of type Normal.
    pub(crate) fn normal(reason: &str, note: impl Into<String>) -> Self {
        let action = "Reconcile".to_owned();
        Self { warning: false, reason: reason.to_owned(), action, note: note.into() }
    }

    /// Creates an event of type Warning.
    pub(crate) fn warning(reason: &str, note: impl Into<String>) -> Self {
        Self { warning: true, ..Self::normal(reason, note) }
    }

    /// Marks the event as part of a wake. Within one minute only the first such event keeps its note and the others
    /// are counted, so that frequent wakes do not flood the events.
    pub(crate) fn of_wake(self, now: Timestamp) -> Self {
        Self { action: format!("Wake{}", now.as_second().div_euclid(60)), ..self }
    }
}

/// Returns the events for the change from status `before` to `after`.
pub(super) fn transitions(
    before: Option<&MoEDeploymentStatus>,
    after: &MoEDeploymentStatus,
) -> Vec<ClusterEvent> {
    let reported = [ConditionType::Planned, ConditionType::Degraded, ConditionType::Ready];
    let changed = reported.into_iter().filter_map(|condition_type| {
        let now = after.condition(condition_type)?;
        let before = before.and_then(|before| before.condition(condition_type));
        event(condition_type, before, now)
    });
    changed.collect()
}

fn event(condition_type: ConditionType, before: Option<&Condition>, now: &Condition) -> Option<ClusterEvent> {
    let was = before.map(|before| (before.status.as_str(), before.reason.as_str()));
    if was == Some((&now.status, &now.reason)) {
        return None;
    }
    let (is_true, was_true) = (now.status == "True", was.is_some_and(|(status, _)| status == "True"));
    let (note, reason) = (now.message.clone(), now.reason.as_str());
    match condition_type {
        ConditionType::Planned if is_true => Some(ClusterEvent::normal(reason, note)),
        // Inspection and planning in progress are no fault.
        ConditionType::Planned if matches!(reason, "Inspecting" | "Planning") => None,
        ConditionType::Planned => Some(ClusterEvent::warning(reason, note)),
        ConditionType::Degraded if is_true => Some(ClusterEvent::warning(reason, note)),
        ConditionType::Degraded => was_true.then(|| ClusterEvent::normal("Recovered", note)),
        ConditionType::Ready if is_true => (!was_true).then(|| ClusterEvent::normal("Ready", note)),
        ConditionType::Ready => was_true.then(|| ClusterEvent::warning("NotReady", note)),
        ConditionType::Progressing | ConditionType::Active | ConditionType::Exposed => None,
    }
}

/// Truncates `text` to at most `max_bytes`, at a character boundary.
pub(crate) fn truncated(text: &str, max_bytes: usize) -> String {
    let end = text.char_indices().map(|(at, char)| at + char.len_utf8()).take_while(|end| *end <= max_bytes);
    text[..end.last().unwrap_or(0)].to_owned()
}
