use crate::example::{around, deployment, facts};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use remoe_operator::cluster::build::{inspector, inspector_place};
use remoe_operator::cluster::facts::{FactsError, MAX_FACTS, ModelFacts};
use remoe_operator::cluster::inspection::{Inspecting, inspecting, useless_inspectors};
use serde_json::json;

const SUBJECT: &str = "0123456789";

fn now() -> Timestamp {
    "2026-01-01T00:10:00Z".parse().unwrap()
}

fn pod(incarnation: u32, status: serde_json::Value) -> Pod {
    let mut pod = inspector(&deployment(json!({})), SUBJECT, incarnation, &around()).unwrap();
    pod.metadata.uid = Some(format!("pod-{incarnation}"));
    pod.status = Some(serde_json::from_value(status).unwrap());
    pod
}

fn failed(seconds_ago: i64) -> serde_json::Value {
    let at = now().checked_sub(SignedDuration::from_secs(seconds_ago)).unwrap();
    let message = "a line\n{\"error\":{\"code\":4,\"message\":\"no config.json in /models/demo\"}}\n";
    let terminated = json!({"exitCode": 4, "finishedAt": at.to_string(), "message": message});
    json!({
        "phase": "Failed",
        "containerStatuses": [{
            "name": "inspector", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"terminated": terminated},
        }],
    })
}

fn look(pods: &[Pod]) -> Inspecting {
    inspecting(None, pods, "uid-1", SUBJECT, &inspector_place("demo", SUBJECT), now())
}

#[test]
fn a_failed_inspector_says_why_and_is_followed_by_another_after_a_pause() {
    assert_eq!(look(&[]), Inspecting::Start { incarnation: 0, after: None });
    assert_eq!(look(&[pod(0, json!({"phase": "Running"}))]), Inspecting::Waiting { trouble: None });
    let Inspecting::Failed { trouble, .. } = look(&[pod(0, failed(1))]) else { panic!() };
    assert_eq!(
        (trouble.reason, trouble.message.as_str()),
        ("ModelUnreadable", "no config.json in /models/demo")
    );
    assert!(matches!(look(&[pod(0, failed(20))]), Inspecting::Start { incarnation: 1, after: Some(_) }));
    // The further, the longer.
    assert!(matches!(look(&[pod(3, failed(20))]), Inspecting::Failed { .. }));
    assert_eq!(
        look(&[pod(3, json!({"phase": "Succeeded"}))]),
        Inspecting::Read { pod: "demo-inspect-0123456789-3".to_owned() }
    );
}

#[test]
fn inspectors_of_no_use_go() {
    let state = Inspecting::Known(Box::new(facts()));
    let pods = [pod(0, json!({"phase": "Succeeded"}))];
    assert_eq!(useless_inspectors(&pods, "uid-1", SUBJECT, &state).len(), 1);
    assert_eq!(useless_inspectors(&pods, "another", SUBJECT, &state).len(), 0);
    let waiting = Inspecting::Waiting { trouble: None };
    assert_eq!(useless_inspectors(&pods, "uid-1", SUBJECT, &waiting).len(), 0);
    assert_eq!(useless_inspectors(&pods, "uid-1", "another one", &waiting).len(), 1);
}

#[test]
fn facts_are_read_from_a_log_and_kept_for_their_subject() {
    let line = serde_json::to_string(&facts()).unwrap();
    let read = ModelFacts::from_log(&format!("{{\"level\":\"INFO\"}}\n{line}\nbye\n")).unwrap();
    assert_eq!(read, facts());
    assert_eq!(ModelFacts::from_log("nothing"), Err(FactsError::Missing));
    let long = format!("{{\"x\":\"{}\"}}", "y".repeat(MAX_FACTS));
    assert!(matches!(ModelFacts::from_log(&long), Err(FactsError::TooLarge { .. })));
    let map = facts().config_map(&deployment(json!({})), SUBJECT).unwrap();
    assert_eq!(ModelFacts::from_config_map(&map, SUBJECT), Some(facts()));
    assert_eq!(ModelFacts::from_config_map(&map, "another"), None);
}
