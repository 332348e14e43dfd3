use crate::facts::ModelFacts;
use crate::planning::{KnownProfile, Planning, PlanningError, served};
use crate::testing::example::{built, deployment, facts, plan, planning, prior};
use remoe_api::{
    MAX_VERDICT, MixOf, MoEDeployment, MoEPlanSpec, PlannedPrediction, ProfileSource, ServingWay,
};
use remoe_hardware::{Origin, Profile};
use remoe_model::Inspection;
use remoe_planner::{Budget, VcpuRange};
use remoe_predictor::UsageShares;
use serde_json::{Value, json};

#[test]
fn under_a_prior_experts_are_local_where_they_fit() {
    let auto = plan(&deployment(json!({"remoteExperts": {"mode": "Auto"}})));
    assert!(auto.remote.is_empty() && auto.groups.is_empty());
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
fn missed_limit_warns_under_prior_and_fails_under_measurements() {
    let strict = deployment(json!({"slo": {"ttft": "1ms", "tpot": "1us"}}));
    let warned = plan(&strict);
    assert!(warned.warning.unwrap().contains("infeasible"));
    let measured = KnownProfile { source: ProfileSource::Measured, ..prior() };
    let refused =
        Planning::new("demo", &strict.spec, &facts(), &measured).unwrap().solve(None, Budget::UNLIMITED);
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
fn dense_weights_are_kept_as_the_spec_asks_for() {
    let asked = |model: Value| deployment(json!({ "model": model }));
    let own = plan(&deployment(json!({})));
    let kept = plan(&asked(json!({"denseDtype": "int4"})));
    assert_ne!(own.inputs, kept.inputs);
    assert!(kept.main.memory_mb <= own.main.memory_mb);
    let said = |owner: &MoEDeployment| {
        let error = Planning::new("demo", &owner.spec, &facts(), &prior()).unwrap_err();
        error.to_string()
    };
    let other = said(&asked(json!({"dtype": "float32", "denseDtype": "bfloat16"})));
    let words = "spec.model.denseDtype is bfloat16, expected the compute dtype float32";
    assert!(other.starts_with(words), "{other}");
    let gpu = json!({"device": "cuda", "gpu": {"count": 1}});
    let on_gpu = said(&deployment(json!({"model": {"denseDtype": "int8"}, "main": gpu.clone()})));
    assert!(on_gpu.starts_with("spec.model.denseDtype is int8"), "{on_gpu}");
    let on_gpu = said(&deployment(json!({"model": {"kvCacheDtype": "int8"}, "main": gpu})));
    assert!(on_gpu.starts_with("spec.model.kvCacheDtype is int8"), "{on_gpu}");
}

#[test]
fn plans_are_for_the_positions_that_the_spec_asks_for() {
    let asked = |positions: u32| deployment(json!({"model": {"maxModelLen": positions}}));
    let (own, shorter) = (plan(&deployment(json!({}))), plan(&asked(200)));
    let longest = |plan: &MoEPlanSpec| plan.workload.max_input_tokens + plan.workload.max_output_tokens;
    assert_eq!((longest(&own), longest(&shorter)), (1024, 200));
    assert_ne!(own.inputs, shorter.inputs);
    let too_many = Planning::new("demo", &asked(1025).spec, &facts(), &prior()).unwrap_err();
    assert!(too_many.to_string().starts_with("spec.model.maxModelLen is 1025"), "{too_many}");
    // More positions than the default, if the model supports them.
    let facts = ModelFacts {
        inspection: Inspection { served_context: Some(256), ..facts().inspection },
        revision: None,
    };
    let positions = |owner: &MoEDeployment| served(&owner.spec, &facts).served_context();
    assert_eq!(positions(&deployment(json!({}))), 256);
    assert_eq!((positions(&asked(100)), positions(&asked(1000))), (100, 1000));
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
    // 1536 bytes a token; 31 positions of each request's last page may be empty.
    let cache = |tokens: u64, requests: u64| 1536 * (tokens + 31 * requests);
    let (one, eight) = (workload(Some(1)), workload(Some(8)));
    assert_eq!(one.main.kv_cache_bytes, cache(900, 1));
    assert_eq!(eight.main.kv_cache_bytes, cache(8 * 150, 8));
    assert_eq!(workload(None), eight, "eight where nothing is said");
    assert!(eight.main.limit_mb >= one.main.limit_mb);
    assert_ne!(one.inputs, eight.inputs);
    // As int8 they take 34 bytes per 32 elements of two bytes.
    let int8 = plan(&deployment(json!({"model": {"kvCacheDtype": "int8"}})));
    let elements = 1536 / if facts().inspection.dtype == "float32" { 4 } else { 2 };
    assert_eq!(int8.main.kv_cache_bytes, elements * 34 / 32 * (8 * (96 + 52) + 31 * 8));
    // Without a workload too.
    let unsaid = plan(&deployment(json!({})));
    assert_eq!(unsaid.workload.concurrency, 8);
    assert_eq!(unsaid.main.kv_cache_bytes, cache(8 * (96 + 52), 8));
    // More sequences than the default batch size.
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
    // Scaling does not change the plan.
    assert_eq!(base, inputs(json!({"replicas": 2})));
    let cpu = json!({"min": 500, "max": 4000});
    assert_ne!(base, inputs(json!({"main": {"cpu": cpu}, "remoteExperts": {"cpu": cpu}})));
    assert_ne!(base, inputs(json!({"remoteExperts": {"maxGroups": 2}})));
    assert_ne!(base, inputs(json!({"slo": {"ttft": "5s"}})));
}

#[test]
fn a_plan_that_runs_stays_where_a_new_one_saves_little() {
    let measured = KnownProfile { source: ProfileSource::Measured, ..prior() };
    let solve = |spec, previous: Option<&_>| {
        Planning::new("demo", &deployment(spec).spec, &facts(), &measured)
            .unwrap()
            .solve(previous, Budget::UNLIMITED)
            .unwrap()
    };
    let first = solve(json!({"slo": {"ttft": "9s"}}), None);
    let second = solve(json!({"pricing": {"cpuCoreHour": "0.0301"}, "slo": {"ttft": "9s"}}), Some(&first));
    assert_eq!((first.main, &first.remote, &first.groups), (second.main, &second.remote, &second.groups));
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
    // A main function on a GPU has LibTorch in memory, whatever else was measured.
    let memory = prior().profile.memory;
    let profile = Profile { memory, ..Profile::prior_on_gpu(&facts().inspection, "bfloat16") };
    let both = KnownProfile { profile, ..prior() };
    assert!(on_gpu(&both).is_ok());
    let on_cpu = |known: &KnownProfile| {
        Planning::new("demo", &deployment(json!({})).spec, &facts(), known).unwrap().inputs
    };
    assert_eq!(on_cpu(&both), on_cpu(&prior()));
    let profile = Profile { origin: Origin::Measured, ..both.profile };
    let measured = KnownProfile { profile, source: ProfileSource::Supplied };
    let refused = Planning::new("demo", &deployment(json!({})).spec, &facts(), &measured).unwrap_err();
    assert!(refused.to_string().contains("expected cpu, got cuda"), "{refused}");
}

#[test]
fn several_gpus_of_a_stored_object_are_refused() {
    let spec = deployment(json!({
        "main": {"device": "cuda", "gpu": {"count": 2}},
        "pricing": {"gpuHour": "2.50", "gpuMemoryMB": 16_000},
    }));
    let refused = Planning::new("demo", &spec.spec, &facts(), &prior()).unwrap_err().to_string();
    assert!(refused.starts_with("spec.main.gpu.count is 2, must be 1: "), "{refused}");
}

#[test]
fn vcpus_apart_from_memory_are_priced_and_chosen_apart() {
    let problem = |spec| planning(&deployment(spec)).problem().clone();
    let together = problem(json!({}));
    assert_eq!((together.specs.main_vcpus, together.specs.remote_vcpus), (None, None));
    assert_eq!(together.pricing.cpu_per_core_second, None);
    assert_eq!(together.limits.max_groups, Some(16));
    let apart = problem(json!({
        "main": {"cpu": {"min": 500, "max": 4000, "step": 250}},
        "remoteExperts": {"cpu": {"min": 100, "max": 2000}, "maxGroups": 3},
        "pricing": {"cpuCoreHour": "0.036", "memoryGBHour": "0.0072"},
    }));
    let range = |min, max, step| Some(VcpuRange { min, max, step });
    assert_eq!(apart.specs.main_vcpus, range(0.5, 4.0, 0.25));
    assert_eq!(apart.specs.remote_vcpus, range(0.1, 2.0, 0.5));
    assert_eq!(apart.limits.max_groups, Some(3));
    assert!((apart.pricing.cpu_per_core_second.unwrap() - 1e-5).abs() < 1e-15);
    assert!((apart.pricing.memory_per_gb_second.unwrap() - 2e-6).abs() < 1e-15);
}

#[test]
fn arrivals_are_requests_per_second() {
    let workload = |arrivals: serde_json::Value| {
        json!({"workload": {
            "maxInputTokens": 600, "maxOutputTokens": 300, "typicalInputTokens": 100,
            "typicalOutputTokens": 50, "arrivals": arrivals,
        }})
    };
    let arrivals = |stated| planning(&deployment(workload(stated))).problem().arrivals.clone().unwrap();
    let rate = arrivals(json!({"perHour": "7200"}));
    assert_eq!((rate.per_second, rate.burst, rate.idle_seconds), (2.0, 1.0, None));
    assert_eq!(arrivals(json!({"perHour": "0.36", "burst": "2.5"})).burst, 2.5);
    assert_eq!(planning(&deployment(json!({}))).problem().arrivals, None);
    // Another rate is another plan.
    let inputs = |stated| planning(&deployment(workload(stated))).inputs;
    assert_ne!(inputs(json!({"perHour": "1"})), inputs(json!({"perHour": "2"})));
}

#[test]
fn sleeping_groups_cost_only_while_awake_and_have_own_limits() {
    let workload = json!({
        "maxInputTokens": 600, "maxOutputTokens": 300, "typicalInputTokens": 100, "typicalOutputTokens": 50,
        "arrivals": {"perHour": "20"},
    });
    let spec = |scaling: serde_json::Value, slo: serde_json::Value| {
        deployment(
            json!({"workload": workload.clone(), "scaling": scaling, "slo": slo, "remoteExperts": {"mode": "Auto"}}),
        )
    };
    let idle = |owner: &MoEDeployment| planning(owner).problem().arrivals.clone().unwrap().idle_seconds;
    let sleeps = || json!({"min": 0, "idleWindow": "1m"});
    assert_eq!(idle(&spec(sleeps(), json!({}))), Some(60.0));
    assert_eq!(idle(&spec(json!({"min": 0}), json!({}))), Some(600.0));
    assert_eq!(idle(&spec(json!({"min": 1, "idleWindow": "1m"}), json!({}))), None);
    // A sleeping deployment costs only while awake: a fraction per request of one that never sleeps.
    let measured = KnownProfile { source: ProfileSource::Measured, ..prior() };
    let solve = |owner: &MoEDeployment| {
        Planning::new("demo", &owner.spec, &facts(), &measured).unwrap().solve(None, Budget::UNLIMITED)
    };
    let cost = |owner| solve(&owner).unwrap().numbers.costs.total;
    let (asleep, awake) = (cost(spec(sleeps(), json!({}))), cost(spec(json!({}), json!({}))));
    assert!(asleep < 0.6 * awake, "{asleep} of {awake}");
    // Limits of requests that meet a cold start.
    let limits = json!({"coldTtft": "30s", "coldPercent": "2.5"});
    let slo = planning(&spec(sleeps(), limits.clone())).problem().slo;
    assert_eq!((slo.cold_ttft_seconds, slo.cold_share), (Some(30.0), Some(0.025)));
    let refused = solve(&spec(sleeps(), json!({"coldPercent": "2.5"}))).unwrap_err().to_string();
    assert!(refused.contains("share of cold requests"), "{refused}");
    let refused = solve(&spec(sleeps(), json!({"coldTtft": "1ms"}))).unwrap_err().to_string();
    assert!(refused.contains("cold"), "{refused}");
    // Where nothing sleeps no request is cold.
    assert!(solve(&spec(json!({}), limits)).is_ok());
}

#[test]
fn a_plan_says_whether_remote_experts_pay() {
    let measured = KnownProfile { source: ProfileSource::Measured, ..prior() };
    let planning = |mode: &str| {
        let owner = deployment(json!({"remoteExperts": {"mode": mode}}));
        Planning::new("demo", &owner.spec, &facts(), &measured).unwrap()
    };
    let verdict = |mode: &str| planning(mode).solve(None, Budget::UNLIMITED).unwrap().verdict.unwrap();
    let auto = verdict("Auto");
    let (cheapest, rival) = (auto.cheapest.unwrap(), auto.rival.unwrap());
    let is_remote = |way| matches!(way, ServingWay::Sliced | ServingWay::Layers);
    assert_eq!((is_remote(cheapest.way), is_remote(rival.way)), (auto.pays, !auto.pays), "{auto:?}");
    assert!(cheapest.cost <= rival.cost, "{auto:?}");
    let words = if auto.pays { "Remote experts pay:" } else { "Remote experts do not pay:" };
    assert!(auto.sentence.starts_with(words) && auto.sentence.chars().count() <= MAX_VERDICT, "{auto:?}");
    // The verdict covers remote experts even if the spec excludes them, and local ones if it requires remote ones.
    assert_eq!(verdict("Never").rival.map(|rival| is_remote(rival.way)), Some(!auto.pays));
    assert_eq!(verdict("Always").pays, auto.pays);
    // A plan on a prior has no verdict.
    assert_eq!(plan(&deployment(json!({}))).verdict, None);
}

/// The verdict of a plan made while main functions serve: only its own main functions keep their size.
#[test]
fn a_plan_that_follows_is_beside_what_there_would_be_without_it() {
    let mut facts = facts();
    let model = &mut facts.inspection;
    (model.expert_bytes, model.hidden_size, model.token_bytes) = (100_000_000, 4096, 8192);
    let owner = deployment(json!({
        "slo": {"ttft": "1000s", "tpot": "100s"}, "pricing": {"billing": "Invocation"},
    }));
    let profile = Profile::prior(&facts.inspection, "bfloat16");
    let known = KnownProfile { profile, source: ProfileSource::Measured };
    let planning = Planning::new("demo", &owner.spec, &facts, &known).unwrap();
    let first = planning.solve(None, Budget::UNLIMITED).unwrap();
    // All requests turn out to use the remote experts.
    let sets = built(&owner, &first).remote_sets();
    let weights = |layer: u32| {
        let remote = &sets.iter().find(|set| set.layer == layer).unwrap().experts;
        (0..8).map(|expert| if remote.contains(&expert) { 50.0 } else { 1.0 }).collect::<Vec<f32>>()
    };
    let shares = UsageShares::from_weights(8, [1, 2, 3].into_iter().flat_map(weights).collect()).unwrap();
    let shares = shares.to_text(1000).unwrap();
    let prediction = PlannedPrediction { revision: 1, of: MixOf::Answered, requests: 20, shares };
    let planning = planning.expecting(prediction).unwrap();
    let followed = planning.improve(&first, Budget::UNLIMITED).unwrap().expect("another plan");
    assert_eq!(followed.main.memory_mb, first.main.memory_mb);
    assert_ne!((&followed.remote, &followed.groups), (&first.remote, &first.groups));
    let verdict = followed.verdict.unwrap();
    let ways = [verdict.cheapest, verdict.rival].map(|way| way.map(|way| way.way));
    assert!(ways.contains(&Some(ServingWay::Mix)), "all experts beside a larger main function: {verdict:?}");
}

/// The API server refuses these too, but stored objects may predate its rules.
#[test]
fn a_field_that_cannot_be_is_named() {
    let with_arrivals = |arrivals: serde_json::Value| {
        json!({"workload": {
            "maxInputTokens": 600, "maxOutputTokens": 300, "typicalInputTokens": 100,
            "typicalOutputTokens": 50, "arrivals": arrivals,
        }})
    };
    let cpu = |min: u32, max: u32, step: u32| json!({"min": min, "max": max, "step": step});
    let both = |main, remote| json!({"main": {"cpu": main}, "remoteExperts": {"cpu": remote}});
    for (spec, words) in [
        (
            json!({"main": {"cpu": cpu(100, 200, 100)}}),
            "spec.remoteExperts.cpu is missing; set it together with spec.main.cpu",
        ),
        (json!({"remoteExperts": {"cpu": cpu(100, 200, 100)}}), "spec.main.cpu is missing"),
        (both(cpu(0, 100, 100), cpu(100, 100, 100)), "spec.main.cpu is 0 to 100"),
        (both(cpu(100, 100, 100), cpu(200, 100, 100)), "spec.remoteExperts.cpu is 200 to 100"),
        (both(cpu(100, 200, 0), cpu(100, 100, 100)), "by 0 millicores"),
        (with_arrivals(json!({"perHour": "0"})), "spec.workload.arrivals.perHour is 0"),
        (with_arrivals(json!({"perHour": "1e99"})), "spec.workload.arrivals.perHour is"),
        (with_arrivals(json!({"perHour": "often"})), "spec.workload.arrivals.perHour is \"often\""),
        (with_arrivals(json!({"perHour": "NaN"})), "spec.workload.arrivals.perHour is NaN"),
        (with_arrivals(json!({"perHour": "1", "burst": "0.5"})), "spec.workload.arrivals.burst is 0.5"),
        (json!({"slo": {"coldPercent": "101"}}), "spec.slo.coldPercent is 101"),
        (json!({"slo": {"coldPercent": "few"}}), "spec.slo.coldPercent is \"few\""),
    ] {
        let owner = deployment(spec);
        let error = Planning::new("demo", &owner.spec, &facts(), &prior()).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}
