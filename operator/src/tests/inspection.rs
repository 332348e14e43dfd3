use crate::facts::{FactsError, MAX_FACTS_BYTES, ModelFacts};
use crate::inspection::{InspectionState, inspection_state};
use crate::manifests::{inspector, inspector_pod_place};
use crate::names::Component;
use crate::one_shot::{OneShotState, obsolete_pods};
use crate::testing::example::{deployment, environment, facts};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

const SUBJECT: &str = "0123456789";

fn now() -> Timestamp {
    "2026-01-01T00:10:00Z".parse().unwrap()
}

fn pod(incarnation: u32, status: serde_json::Value) -> Pod {
    let mut pod = inspector(&deployment(json!({})), SUBJECT, incarnation, &environment()).unwrap();
    pod.metadata.uid = Some(format!("pod-{incarnation}"));
    pod.status = Some(serde_json::from_value(status).unwrap());
    pod
}

fn failed(seconds_ago: i64) -> serde_json::Value {
    let at = now().checked_sub(SignedDuration::from_secs(seconds_ago)).unwrap();
    let message =
        "a line\n{\"error\":{\"code\":\"checkpoint\",\"message\":\"no config.json in /models/demo\"}}\n";
    let terminated = json!({"exitCode": 4, "finishedAt": at.to_string(), "message": message});
    json!({
        "phase": "Failed",
        "containerStatuses": [{
            "name": "inspector", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"terminated": terminated},
        }],
    })
}

fn one_shot_state(pods: &[Pod]) -> OneShotState {
    match inspection_state(None, pods, "uid-1", &inspector_pod_place("demo", SUBJECT), now()) {
        InspectionState::Inspecting(one_shot) => one_shot,
        InspectionState::Known(facts) => panic!("not inspected yet: {facts:?}"),
    }
}

#[test]
fn only_counted_pods_of_the_deployment_are_followed() {
    let of_another = |incarnation| {
        let mut pod = pod(incarnation, json!({"phase": "Running"}));
        pod.metadata.owner_references.as_mut().unwrap()[0].uid = "uid-0".to_owned();
        pod
    };
    assert_eq!(one_shot_state(&[of_another(u32::MAX)]), OneShotState::Start { incarnation: 0, after: None });
    assert_eq!(
        one_shot_state(&[of_another(0), of_another(1)]),
        OneShotState::Start { incarnation: 2, after: None }
    );
    // With the right owner reference, but a number that was never reached.
    let forged = pod(u32::MAX, failed(1000));
    assert_eq!(
        one_shot_state(std::slice::from_ref(&forged)),
        OneShotState::Start { incarnation: 0, after: None }
    );
    assert_eq!(
        one_shot_state(&[forged, pod(0, json!({"phase": "Running"}))]),
        OneShotState::Waiting { issue: None }
    );
    // A clock that is ahead does not prevent retries.
    let OneShotState::Failed { retry_at, .. } = one_shot_state(&[pod(0, failed(-1_000_000))]) else {
        panic!()
    };
    assert!(retry_at <= now().checked_add(SignedDuration::from_secs(300)).unwrap());
}

#[test]
fn facts_of_no_possible_model_are_refused() {
    let facts = |field: &str, value: serde_json::Value| {
        let mut facts = serde_json::to_value(crate::testing::example::facts()).unwrap();
        facts[field] = value;
        ModelFacts::from_log(&facts.to_string())
    };
    assert!(facts("experts", json!(16)).is_ok());
    for (field, value) in [
        ("experts", json!(u64::MAX)),
        ("experts", json!(1 << 17)),
        ("layers", json!(u64::MAX)),
        ("moe_layers", json!([u64::MAX])),
        ("moe_layers", json!([1, 2, 3, 3, 3])),
        ("top_k", json!(9)),
        ("context_length", json!(u64::MAX)),
        ("expert_bytes", json!(u64::MAX)),
        ("total_bytes", json!(u64::MAX)),
        ("non_expert_layer_bytes", json!([u64::MAX, u64::MAX, 0, 0])),
        ("kv_bytes_per_token", json!(u64::MAX)),
    ] {
        let refused = facts(field, value.clone());
        let Err(FactsError::Unreadable(message)) = refused else { panic!("{field} = {value} was taken") };
        assert!(message.starts_with(field), "{message}");
    }
}

#[test]
fn failed_inspector_reports_cause_and_is_retried_after_backoff() {
    assert_eq!(one_shot_state(&[]), OneShotState::Start { incarnation: 0, after: None });
    assert_eq!(one_shot_state(&[pod(0, json!({"phase": "Running"}))]), OneShotState::Waiting { issue: None });
    let OneShotState::Failed { issue, .. } = one_shot_state(&[pod(0, failed(1))]) else { panic!() };
    assert_eq!((issue.reason, issue.message.as_str()), ("ModelUnreadable", "no config.json in /models/demo"));
    assert!(matches!(
        one_shot_state(&[pod(0, failed(20))]),
        OneShotState::Start { incarnation: 1, after: Some(_) }
    ));
    // Pauses grow with each attempt.
    assert!(matches!(one_shot_state(&[pod(3, failed(20))]), OneShotState::Failed { .. }));
    assert_eq!(
        one_shot_state(&[pod(3, json!({"phase": "Succeeded"}))]),
        OneShotState::Done { pod: "demo-inspect-0123456789-3".to_owned() }
    );
}

#[test]
fn inspectors_of_no_use_go() {
    let over = |pods: &[Pod], owner, subject, state: Option<&OneShotState>| {
        obsolete_pods(pods, owner, Component::Inspector, state.map(|state| (subject, state)))
    };
    let pods = [pod(0, json!({"phase": "Succeeded"}))];
    assert_eq!(over(&pods, "uid-1", SUBJECT, None).len(), 1);
    assert_eq!(over(&pods, "another", SUBJECT, None).len(), 0);
    assert_eq!(obsolete_pods(&pods, "uid-1", Component::Profiler, None).len(), 0);
    let waiting = OneShotState::Waiting { issue: None };
    assert_eq!(over(&pods, "uid-1", SUBJECT, Some(&waiting)).len(), 0);
    assert_eq!(over(&pods, "uid-1", "another one", Some(&waiting)).len(), 1);
}

#[test]
fn facts_are_read_from_a_log_and_kept_for_their_subject() {
    let line = serde_json::to_string(&facts()).unwrap();
    let read = ModelFacts::from_log(&format!("{{\"level\":\"INFO\"}}\n{line}\nbye\n")).unwrap();
    assert_eq!(read, facts());
    assert_eq!(ModelFacts::from_log("nothing"), Err(FactsError::Missing));
    let long = format!("{{\"x\":\"{}\"}}", "y".repeat(MAX_FACTS_BYTES));
    assert!(matches!(ModelFacts::from_log(&long), Err(FactsError::TooLarge { .. })));
    let record = facts().record(&deployment(json!({})), SUBJECT).unwrap();
    assert_eq!(record.spec.about, "mixtral in bfloat16, 4 layers, 8 experts");
    assert_eq!(ModelFacts::from_record(&record, SUBJECT), Some(facts()));
    assert_eq!(ModelFacts::from_record(&record, "another"), None);
}
