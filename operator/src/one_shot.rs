//! One-shot pods: the pure step that starts one, waits for it, and starts another after a failure.

use super::backoff::pause;
use super::names::{self, COMPONENT, Component, PodName, SUBJECT, next_incarnation};
use super::ownership::is_owned_by;
use super::pods::{PodOutcome, outcome};
use super::status_issue::StatusIssue;
use super::write::Deletion;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde::Deserialize;

/// The reason where a checkpoint could not be read.
pub(super) const UNREADABLE: &str = "ModelUnreadable";

/// How an errand stands.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OneShotState {
    /// A pod is to be started.
    Start {
        /// How many came before.
        incarnation: u32,
        /// Why the one before failed.
        after: Option<StatusIssue>,
    },
    /// A pod is at work.
    Waiting {
        /// Trouble that keeps the pod from working.
        issue: Option<StatusIssue>,
    },
    /// A pod is done: its log has what it found out.
    Done {
        /// The pod.
        pod: String,
    },
    /// The last pod failed; another one is due later.
    Failed {
        /// Why.
        issue: StatusIssue,
        /// How many were started.
        attempts: u32,
        /// When the next one is started.
        retry_at: Timestamp,
    },
}

/// How the errand at `place` of the deployment with `owner_uid` stands. The last words of a pod that
/// failed become a trouble of `reason`.
pub(crate) fn one_shot(
    pods: &[Pod],
    owner_uid: &str,
    place: &str,
    reason: &'static str,
    now: Timestamp,
) -> OneShotState {
    let named = pods.iter().filter_map(|pod| Some((PodName::parse(&pod.name_any())?, pod)));
    let there: Vec<_> = named.filter(|(name, _)| name.place == place).collect();
    let taken = there.iter().map(|(name, _)| name.incarnation).collect();
    let ours = there.iter().filter(|(name, pod)| name.is_counted() && is_owned_by(*pod, owner_uid));
    let newest = ours.max_by_key(|(name, _)| name.incarnation);
    let next = next_incarnation(newest.map(|(name, _)| name.incarnation), &taken);
    let at_work = newest.filter(|(_, pod)| pod.metadata.deletion_timestamp.is_none());
    let Some((name, pod)) = at_work else { return OneShotState::Start { incarnation: next, after: None } };
    match outcome(pod) {
        PodOutcome::Running { issue } => OneShotState::Waiting { issue },
        PodOutcome::Succeeded => OneShotState::Done { pod: name.to_string() },
        PodOutcome::Failed { issue, at } => {
            let issue = explained(issue, reason);
            let attempts = name.incarnation.saturating_add(1);
            // A node's clock may be ahead of ours.
            let ended = at.unwrap_or(now).min(now);
            let retry_at = ended.checked_add(pause(attempts)).unwrap_or(now);
            if now < retry_at {
                OneShotState::Failed { issue, attempts, retry_at }
            } else {
                OneShotState::Start { incarnation: next, after: Some(issue) }
            }
        }
    }
}

/// Returns pods on errands of `component` that are no longer of use. Of use are at most the pods of one subject, unless
/// its errand is to be started again.
pub(crate) fn obsolete_pods(
    pods: &[Pod],
    owner_uid: &str,
    component: Component,
    useful: Option<(&str, &OneShotState)>,
) -> Vec<Deletion> {
    let of_component = pods.iter().filter(|pod| {
        names::label(&pod.metadata, COMPONENT) == component.name()
            && is_owned_by(*pod, owner_uid)
            && pod.metadata.deletion_timestamp.is_none()
    });
    let is_useful = |pod: &Pod| {
        useful.is_some_and(|(subject, one_shot)| {
            names::label(&pod.metadata, SUBJECT) == subject && !matches!(one_shot, OneShotState::Start { .. })
        })
    };
    let obsolete_pods = of_component.filter(|pod| !is_useful(pod));
    let deletion = |pod: &Pod| Some(Deletion { name: pod.name_any(), uid: pod.uid()?, grace_seconds: None });
    obsolete_pods.filter_map(deletion).collect()
}

/// Last line of the output of `remoe-agent` when it fails.
#[derive(Deserialize)]
struct Refusal {
    error: RefusalBody,
}

#[derive(Deserialize)]
struct RefusalBody {
    code: String,
    message: String,
    field: Option<String>,
}

/// The pod's own words, where its log has them.
fn explained(issue: StatusIssue, reason: &'static str) -> StatusIssue {
    let refusal = issue.message.lines().rev().find_map(|line| serde_json::from_str::<Refusal>(line).ok());
    let Some(RefusalBody { code, message, field }) = refusal.map(|refusal| refusal.error) else {
        return issue;
    };
    let reason = match (code.as_str(), field.as_deref()) {
        (_, Some("credentials")) => "CredentialsRefused",
        (_, Some("source")) => "SourceNotAllowed",
        // Nothing is wrong with the model: what it is read from failed.
        ("runtime", _) if reason == UNREADABLE => "SourceUnavailable",
        _ => reason,
    };
    StatusIssue::new(reason, message)
}
