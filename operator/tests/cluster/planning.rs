use crate::example::{built, deployment, facts, plan, prior};
use remoe_operator::cluster::api::{MoEPlanSpec, ProfileSource};
use remoe_operator::cluster::planning::{KnownProfile, Planning, PlanningError};
use remoe_profile::Profile;
use serde_json::json;

#[test]
fn under_a_prior_experts_are_local_where_they_fit() {
    let auto = plan(&deployment(json!({"remoteExperts": {"mode": "Auto"}})));
    assert!(auto.remote.is_empty());
    assert_eq!(auto.profile, ProfileSource::Prior);
    let shown = auto.shown.unwrap();
    assert!(shown.ttft.ends_with('s') && shown.tpot.contains(' '), "{shown:?}");
    assert!(shown.cost_of_million.starts_with('$'), "{shown:?}");
    let always = plan(&deployment(json!({})));
    assert_eq!(always.remote.iter().map(|part| part.layer).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(
        always.remote.iter().all(|part| part.replicas >= 1 && !part.experts().unwrap().experts.is_empty())
    );
}

#[test]
fn under_a_prior_a_missed_limit_is_a_warning_and_under_measurements_a_refusal() {
    let strict = deployment(json!({"slo": {"ttft": "1ms", "tpot": "1us"}}));
    let warned = plan(&strict);
    assert!(warned.warning.unwrap().contains("infeasible"));
    let measured = KnownProfile { source: ProfileSource::Measured, ..prior() };
    let refused = Planning::new("demo", &strict.spec, &facts(), &measured).unwrap().solve(None);
    assert!(matches!(refused, Err(PlanningError::Infeasible(_))), "{refused:?}");
}

#[test]
fn a_workload_beyond_the_context_is_named() {
    let workload = json!({
        "maxInputTokens": 1000, "maxOutputTokens": 100, "typicalInputTokens": 10, "typicalOutputTokens": 10,
    });
    let owner = deployment(json!({"workload": workload}));
    let error = Planning::new("demo", &owner.spec, &facts(), &prior()).unwrap_err();
    assert!(error.to_string().starts_with("spec.workload has requests of up to 1100 tokens"), "{error}");
}

#[test]
fn keys_and_values_have_room_for_all_requests_that_run_at_once() {
    let workload = |concurrency: Option<u32>| {
        let mut workload = json!({
            "maxInputTokens": 600, "maxOutputTokens": 300, "typicalInputTokens": 100, "typicalOutputTokens": 50,
        });
        if let Some(concurrency) = concurrency {
            workload["concurrency"] = json!(concurrency);
        }
        plan(&deployment(json!({"workload": workload})))
    };
    // 1536 bytes a token over four layers, one of which exists twice while it grows.
    let cache = |tokens: u64| 1536 * tokens + 1536 / 4 * tokens;
    let (one, eight) = (workload(Some(1)), workload(Some(8)));
    assert_eq!(one.main.kv_cache_bytes, cache(900));
    assert_eq!(eight.main.kv_cache_bytes, cache(8 * 150));
    assert_eq!(workload(None), eight, "eight where nothing is said");
    assert!(eight.main.limit_mb >= one.main.limit_mb);
    assert_ne!(one.inputs, eight.inputs);
    // Without a workload too.
    let unsaid = plan(&deployment(json!({})));
    assert_eq!(unsaid.workload.concurrency, 8);
    assert_eq!(unsaid.main.kv_cache_bytes, cache(8 * (96 + 52)));
    // More sequences than a main function takes by itself.
    let owner = deployment(json!({}));
    let batch = |plan: &MoEPlanSpec| {
        let pod = built(&owner, plan).main.pod(&owner, 0, 0);
        let main = pod.spec.unwrap().containers[0].args.clone().unwrap();
        let at = main.iter().position(|argument| argument == "--max-batch");
        at.map(|at| main[at + 1].clone())
    };
    assert_eq!((batch(&eight), batch(&workload(Some(100))).as_deref()), (None, Some("100")));
}

#[test]
fn inputs_tell_plans_apart_and_nothing_else_does() {
    let inputs = |spec| Planning::new("demo", &deployment(spec).spec, &facts(), &prior()).unwrap().inputs;
    let base = inputs(json!({}));
    assert_eq!(base, inputs(json!({"servedName": "another"})));
    assert_ne!(base, inputs(json!({"pricing": {"cpuCoreHour": "0.05"}})));
    assert_ne!(base, inputs(json!({"replicas": 2})));
    assert_ne!(base, inputs(json!({"slo": {"ttft": "5s"}})));
}

#[test]
fn a_plan_that_runs_stays_where_a_new_one_saves_little() {
    let measured = KnownProfile { source: ProfileSource::Measured, ..prior() };
    let solve = |spec, previous: Option<&_>| {
        Planning::new("demo", &deployment(spec).spec, &facts(), &measured).unwrap().solve(previous).unwrap()
    };
    let first = solve(json!({"slo": {"ttft": "9s"}}), None);
    let second = solve(json!({"pricing": {"cpuCoreHour": "0.0301"}, "slo": {"ttft": "9s"}}), Some(&first));
    assert_eq!((first.main, &first.remote), (second.main, &second.remote));
    assert_ne!(first.numbers.costs, second.numbers.costs);
}

#[test]
fn figures_of_another_device_are_not_planned_with() {
    let gpu = json!({
        "main": {"device": "cuda", "gpu": {"count": 1}},
        "pricing": {"gpuHour": "2.50", "gpuMemoryMB": 16000},
    });
    let on_gpu = |known: &KnownProfile| Planning::new("demo", &deployment(gpu.clone()).spec, &facts(), known);
    let refused = on_gpu(&prior()).unwrap_err();
    assert!(refused.to_string().contains("without a GPU"), "{refused}");
    let profile = Profile::prior_on_gpu(&facts().inspection, "bfloat16");
    let both = KnownProfile { profile, ..prior() };
    assert!(on_gpu(&both).is_ok());
    let on_cpu = |known: &KnownProfile| {
        Planning::new("demo", &deployment(json!({})).spec, &facts(), known).unwrap().inputs
    };
    assert_eq!(on_cpu(&both), on_cpu(&prior()));
}
