//! Events for `kubectl describe`: on transitions only. Pure; the apply stage publishes them.

use jiff::Timestamp;
use remoe_api::{Condition, ConditionType, MoEDeploymentStatus};

/// Something that happened.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ClusterEvent {
    /// Set if the event is a warning for a user.
    pub warning: bool,
    /// One word in CamelCase.
    pub reason: String,
    /// Action that was done or tried. Events that differ only in their notes are counted, not told again.
    pub action: String,
    /// For people.
    pub note: String,
}

impl ClusterEvent {
    /// Something that went as it should.
    pub(crate) fn normal(reason: &str, note: impl Into<String>) -> Self {
        let action = "Reconcile".to_owned();
        Self { warning: false, reason: reason.to_owned(), action, note: note.into() }
    }

    /// Something that did not.
    pub(crate) fn warning(reason: &str, note: impl Into<String>) -> Self {
        Self { warning: true, ..Self::normal(reason, note) }
    }

    /// Returns the same as an event of a wake. Of those in one minute only the first is told with its note, the others are
    /// counted: a deployment that wakes all the time does not fill its events.
    pub(crate) fn of_wake(self, now: Timestamp) -> Self {
        Self { action: format!("Wake{}", now.as_second().div_euclid(60)), ..self }
    }
}

/// Returns the events of the change from one status to the next.
pub(super) fn transitions(
    before: Option<&MoEDeploymentStatus>,
    after: &MoEDeploymentStatus,
) -> Vec<ClusterEvent> {
    let told = [ConditionType::Planned, ConditionType::Degraded, ConditionType::Ready];
    let changed = told.into_iter().filter_map(|of| {
        let now = after.condition(of)?;
        let then = before.and_then(|before| before.condition(of));
        event(of, then, now)
    });
    changed.collect()
}

fn event(of: ConditionType, then: Option<&Condition>, now: &Condition) -> Option<ClusterEvent> {
    let was = then.map(|then| (then.status.as_str(), then.reason.as_str()));
    if was == Some((&now.status, &now.reason)) {
        return None;
    }
    let (holds, held) = (now.status == "True", was.is_some_and(|(status, _)| status == "True"));
    let (note, reason) = (now.message.clone(), now.reason.as_str());
    match of {
        ConditionType::Planned if holds => Some(ClusterEvent::normal(reason, note)),
        // Work that goes on is no trouble.
        ConditionType::Planned if matches!(reason, "Inspecting" | "Planning") => None,
        ConditionType::Planned => Some(ClusterEvent::warning(reason, note)),
        ConditionType::Degraded if holds => Some(ClusterEvent::warning(reason, note)),
        ConditionType::Degraded => held.then(|| ClusterEvent::normal("Recovered", note)),
        ConditionType::Ready if holds => (!held).then(|| ClusterEvent::normal("Ready", note)),
        ConditionType::Ready => held.then(|| ClusterEvent::warning("NotReady", note)),
        ConditionType::Progressing | ConditionType::Active | ConditionType::Exposed => None,
    }
}

/// Returns the beginning of `text` that has at most so many `bytes`.
pub(crate) fn shortened(text: &str, bytes: usize) -> String {
    let end = text.char_indices().map(|(at, char)| at + char.len_utf8()).take_while(|end| *end <= bytes);
    text[..end.last().unwrap_or(0)].to_owned()
}
