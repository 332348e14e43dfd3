//! Files with unknown fields, and messages about values out of range.

use crate::bad_input::{pointers, with, worked};
use remoe_planner::{Options, PlanAccount, PlanDraft, Problem, solve};
use serde_json::{Value, json};

/// Lists the JSON pointers of all objects in `value`.
fn objects(value: &Value) -> Vec<String> {
    let mut all = Vec::new();
    pointers(value, "", &mut all);
    all.retain(|pointer| value.pointer(pointer).is_some_and(Value::is_object));
    all
}

/// A problem with all optional fields.
fn complete_problem() -> Value {
    let starts = json!({"process_seconds": 1.0, "load_bytes_per_second": 1e9});
    let vcpus = json!({"min": 0.5, "max": 4.0, "step": 0.5});
    with(&[
        ("/arrivals", json!({"per_second": 0.1, "idle_seconds": 60.0})),
        ("/starts", json!({"main": starts, "remote": starts})),
        ("/contention", json!({"functions": 4, "step": 1.5, "prefill": 1.2})),
        ("/specs/main_vcpus", vcpus.clone()),
        ("/specs/remote_vcpus", vcpus),
        ("/pricing/cpu_per_core_second", json!(1e-5)),
        ("/pricing/memory_per_gb_second", json!(1e-6)),
        ("/layers/0/cpu_context_seconds", json!({"vcpus": [1], "tokens": [1], "seconds": [[0.0]]})),
    ])
}

#[test]
fn unknown_fields_of_a_problem_are_rejected_at_each_level() {
    let whole = complete_problem();
    Problem::from_json(&whole.to_string()).unwrap();
    let places = objects(&whole);
    assert!(places.len() > 20, "{places:?}");
    for place in places {
        let mut problem = whole.clone();
        problem.pointer_mut(&place).unwrap()["surplus"] = json!(1);
        let error = Problem::from_json(&problem.to_string()).unwrap_err();
        assert!(
            error.field.ends_with("surplus") && error.message.contains("unknown field"),
            "{place}: {error}"
        );
    }
    let error = Problem::from_json(&with(&[("/pricing/biling", json!("reserved"))]).to_string()).unwrap_err();
    assert!(error.to_string().starts_with("pricing.biling is an unknown field (line 1"), "{error}");
    assert!(error.to_string().ends_with("did you mean `billing`?"), "{error}");
}

#[test]
fn duplicate_fields_of_a_problem_are_rejected() {
    let text = worked().to_string().replacen("\"version\":1", "\"version\":1,\"version\":1", 1);
    assert_eq!(Problem::from_json(&text).unwrap_err().to_string(), "version is stated twice; keep one");
    let plan = r#"{"plan": {"layers": [], "layers": []}}"#;
    assert_eq!(PlanDraft::from_json(plan).unwrap_err().field, "plan.layers");
    let answer = r#"{"plan": {"layers": []}, "evaluation": {"layers": 1, "layers": 2}}"#;
    assert_eq!(PlanDraft::from_json(answer).unwrap_err().field, "evaluation.layers");
}

#[test]
fn account_of_another_version_is_read_and_a_plan_file_is_not() {
    let answer =
        solve(&Problem::from_json(&worked().to_string()).unwrap(), None, &Options::default()).unwrap();
    let mut account = json!({"problem": worked(), "plan": answer.plan});
    let read = PlanAccount::from_json(&account.to_string()).unwrap();
    assert_eq!(PlanAccount::from_plan_file(&account.to_string()).unwrap(), Some(read.clone()));
    assert_eq!(PlanAccount::from_plan_file(&account["plan"].to_string()).unwrap(), None);
    for layer in account["problem"]["layers"].as_array_mut().unwrap() {
        layer["new_seconds"] = json!(1);
    }
    account["problem"]["slo"]["newer"] = json!("p95");
    account["plan"]["newer"] = json!({});
    assert_eq!(PlanAccount::from_json(&account.to_string()).unwrap(), read);
    let error = PlanAccount::from_plan_file(&account.to_string()).unwrap_err();
    assert!(error.to_string().contains("unknown field"), "{error}");
}

#[test]
fn out_of_range_errors_state_the_unit() {
    for (pointer, value, text) in [
        ("/slo/ttft_seconds", json!(-1), "is -1, expected seconds from 1e-15 to 1e15"),
        ("/head_bytes", json!(-5e20), "is -5e20, expected bytes from 0 to 1e15"),
        (
            "/pricing/cpu_per_gb_second",
            json!(-0.5),
            "is -0.5, expected dollars per GB-second from 1e-15 to 1e15",
        ),
        ("/transport/bytes_per_second", json!(0), "is 0, expected bytes per second from 1 to 1e15"),
        ("/swap_seconds/per_token", json!(-1), "is -1, expected seconds per token from 0 to 1e15"),
        ("/request/input_tokens", json!(0), "is 0, expected tokens from 1 to 1e12"),
        (
            "/prediction_p95",
            json!(["all", 1]),
            "is invalid: expected a factor, or a list of one for each number of remote experts",
        ),
    ] {
        let error = Problem::from_json(&with(&[(pointer, value)]).to_string()).unwrap_err();
        assert!(error.message.starts_with(text), "{error}");
    }
}
