//! Pods that run to completion: starts one, waits for it, and retries after a failure. Pure.

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

/// Reason of a checkpoint that could not be read.
pub(super) const UNREADABLE: &str = "ModelUnreadable";

/// State of a task that a one-shot pod performs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OneShotState {
    /// A pod must be started.
    Start {
        /// Number of earlier pods.
        incarnation: u32,
        /// Failure of the pod before it.
        after: Option<StatusIssue>,
    },
    /// A pod is running.
    Waiting {
        /// Issue that keeps the pod from working.
        issue: Option<StatusIssue>,
    },
    /// A pod completed; its log has the result.
    Done {
        /// Name of the pod.
        pod: String,
    },
    /// The last pod failed; another one starts later.
    Failed {
        /// Failure of the pod.
        issue: StatusIssue,
        /// Number of pods started so far.
        attempts: u32,
        /// Start time of the next pod.
        retry_at: Timestamp,
    },
}

/// Returns the state of the task at `place` of the deployment with `owner_uid`. A failed pod's last message becomes
/// an issue of `reason`.
pub(crate) fn one_shot(
    pods: &[Pod],
    owner_uid: &str,
    place: &str,
    reason: &'static str,
    now: Timestamp,
) -> OneShotState {
    let parsed = pods.iter().filter_map(|pod| Some((PodName::parse(&pod.name_any())?, pod)));
    let at_place: Vec<_> = parsed.filter(|(name, _)| name.place == place).collect();
    let taken = at_place.iter().map(|(name, _)| name.incarnation).collect();
    let ours = at_place.iter().filter(|(name, pod)| name.is_counted() && is_owned_by(*pod, owner_uid));
    let newest = ours.max_by_key(|(name, _)| name.incarnation);
    let next = next_incarnation(newest.map(|(name, _)| name.incarnation), &taken);
    let running = newest.filter(|(_, pod)| pod.metadata.deletion_timestamp.is_none());
    let Some((name, pod)) = running else { return OneShotState::Start { incarnation: next, after: None } };
    match outcome(pod) {
        PodOutcome::Running { issue } => OneShotState::Waiting { issue },
        PodOutcome::Succeeded => OneShotState::Done { pod: name.to_string() },
        PodOutcome::Failed { issue, at } => {
            let issue = reported_issue(issue, reason);
            let attempts = name.incarnation.saturating_add(1);
            // The node's clock may be ahead.
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

/// Returns the one-shot pods of `component` that are no longer needed: all but those of the subject in `useful`,
/// unless its task starts again.
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

/// Returns the issue that the pod reported in its log; else `issue`.
fn reported_issue(issue: StatusIssue, reason: &'static str) -> StatusIssue {
    let refusal = issue.message.lines().rev().find_map(|line| serde_json::from_str::<Refusal>(line).ok());
    let Some(RefusalBody { code, message, field }) = refusal.map(|refusal| refusal.error) else {
        return issue;
    };
    let reason = match (code.as_str(), field.as_deref()) {
        (_, Some("credentials")) => "CredentialsRefused",
        (_, Some("source")) => "SourceNotAllowed",
        // The model source failed, not the model.
        ("runtime", _) if reason == UNREADABLE => "SourceUnavailable",
        _ => reason,
    };
    StatusIssue::new(reason, message)
}
