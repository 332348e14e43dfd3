//! Views of pods.

use crate::pods::PodView;
use crate::status_issue::StatusIssue;
use crate::testing::example::{built, deployment, plan};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

fn now() -> Timestamp {
    "2026-01-01T01:00:00Z".parse().unwrap()
}

fn ago(seconds: i64) -> String {
    now().checked_sub(SignedDuration::from_secs(seconds)).unwrap().to_string()
}

/// Returns a main function that has been unready for `seconds`, with these status fields.
fn unready(seconds: i64, fields: Value) -> PodView {
    let owner = deployment(json!({}));
    let mut pod: Pod = built(&owner, &plan(&owner)).main.pod(&owner, 0, 0);
    pod.metadata.uid = Some("pod-1".to_owned());
    pod.metadata.creation_timestamp = serde_json::from_value(json!(ago(3000))).unwrap();
    let mut status = json!({
        "phase": "Running",
        "startTime": ago(3000),
        "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": ago(seconds)}],
        "containerStatuses": [container(true, json!({"running": {}}))],
    });
    for (key, value) in fields.as_object().unwrap() {
        status[key] = value.clone();
    }
    pod.status = Some(serde_json::from_value(status).unwrap());
    PodView::from_pod(&pod, "uid-1", now()).unwrap()
}

fn container(started: bool, state: Value) -> Value {
    json!({
        "name": "main-model-fn", "image": "", "imageID": "", "ready": false, "restartCount": 1,
        "started": started, "state": state,
    })
}

fn reason(view: &PodView) -> Option<&'static str> {
    view.fault.as_ref().map(|fault| fault.reason)
}

#[test]
fn a_function_that_is_not_ready_for_a_while_is_waited_for() {
    for seconds in [10, 60, 89] {
        let view = unready(seconds, json!({}));
        assert_eq!(reason(&view), None, "after {seconds} s");
        assert_eq!(view.faulty_at, Some(now().checked_add(SignedDuration::from_secs(90 - seconds)).unwrap()));
    }
    let silent = unready(90, json!({}));
    assert_eq!(reason(&silent), Some("NotReady"));
    assert!(silent.fault.as_ref().is_some_and(StatusIssue::is_presumed));
}

#[test]
fn a_container_that_was_started_again_may_load() {
    let loading = json!({"containerStatuses": [container(false, json!({"running": {}}))]});
    let view = unready(1500, loading);
    assert_eq!((reason(&view), view.faulty_at), (None, None));
    let waiting = json!({"waiting": {"reason": "CrashLoopBackOff"}});
    let mut crashed = container(false, waiting);
    crashed["lastState"] = json!({"terminated": {"exitCode": 1}});
    let crashing = unready(5, json!({ "containerStatuses": [crashed] }));
    assert_eq!(reason(&crashing), Some("CrashLooping"));
}

#[test]
fn what_the_cluster_ends_is_replaced_at_once() {
    let ready = json!({"type": "Ready", "status": "False", "lastTransitionTime": ago(1)});
    let target = json!({
        "type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager",
        "message": "Taint manager: deleting due to NoExecute taint",
    });
    let evicted = unready(1, json!({"conditions": [ready, target]}));
    assert_eq!(reason(&evicted), Some("Disrupted"));
    let lost = unready(1, json!({"reason": "NodeLost"}));
    assert_eq!(reason(&lost), Some("NodeLost"));
    for view in [evicted, lost] {
        assert!(!view.fault.unwrap().is_presumed());
    }
}

#[test]
fn generation_out_of_sequence_is_foreign() {
    let mut view = unready(1, json!({}));
    view.note_in_force(Some(7), 7);
    assert_eq!((view.in_force, reason(&view)), (Some(7), None));
    view.note_in_force(Some(u64::MAX), 7);
    assert_eq!((view.in_force, reason(&view)), (None, Some("ForeignRouting")));
}
