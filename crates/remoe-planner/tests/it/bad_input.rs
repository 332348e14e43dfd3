//! Invalid problems and plans: a named error each, and never a panic.

use proptest::prelude::*;
use remoe_planner::{Arrivals, Options, PlanDraft, PlanError, Problem, Remote, evaluate, preallocate, solve};
use serde_json::{Value, json};

pub(crate) fn worked() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/planning/example-problem.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Sets the value at a JSON pointer; `null` for an absent field removes nothing.
pub(crate) fn with(changes: &[(&str, Value)]) -> Value {
    let mut problem = worked();
    for (pointer, value) in changes {
        let (parent, name) = pointer.rsplit_once('/').unwrap();
        match problem.pointer_mut(parent).unwrap() {
            Value::Object(fields) => {
                fields.insert(name.to_owned(), value.clone());
            }
            parent => parent[name.parse::<usize>().unwrap()] = value.clone(),
        }
    }
    problem
}

fn without(pointer: &str) -> Value {
    let mut problem = worked();
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    problem.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(name);
    problem
}

/// Returns the field that the error of solving the problem names.
fn complaint(text: &str) -> Result<(), (String, String)> {
    let problem = Problem::from_json(text).map_err(|error| (error.field.clone(), error.to_string()))?;
    match solve(&problem, None, &Options::default()) {
        Ok(_) => Ok(()),
        Err(PlanError::Problem(error)) => Err((error.field.clone(), error.to_string())),
        Err(PlanError::Infeasible(why)) => Err((format!("infeasible {}", why.limit), why.to_string())),
        Err(error @ (PlanError::Plan(_) | PlanError::Cancelled)) => panic!("{error}"),
    }
}

#[test]
fn invalid_arrivals_are_reported_by_field() {
    let arrivals = |changes: Value| {
        let mut arrivals = json!({"per_second": 0.1, "burst": 2.0, "idle_seconds": 60.0});
        arrivals.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        arrivals
    };
    let start = |process: f64, rate: f64| json!({"process_seconds": process, "load_bytes_per_second": rate});
    let starts = |main: Value| json!({"main": main, "remote": start(0.1, 1e9)});
    let good = starts(start(2.0, 1e9));
    let recorded = |times: &[f64]| arrivals(json!({"recorded_seconds": times}));
    let table = [
        (arrivals(json!({"per_second": -1.0})), &good, "arrivals.per_second"),
        (arrivals(json!({"per_second": 1e16})), &good, "arrivals.per_second"),
        (arrivals(json!({"burst": 0.5})), &good, "arrivals.burst"),
        (arrivals(json!({"burst": 1e6})), &good, "arrivals.burst"),
        (arrivals(json!({"idle_seconds": -1.0})), &good, "arrivals.idle_seconds"),
        (recorded(&[]), &good, "arrivals.recorded_seconds"),
        (recorded(&[1.0]), &good, "arrivals.recorded_seconds"),
        (recorded(&[1.0, 1.0]), &good, "arrivals.recorded_seconds"),
        (recorded(&[2.0, 1.0]), &good, "arrivals.recorded_seconds[1]"),
        (recorded(&[-1.0, 1.0]), &good, "arrivals.recorded_seconds[0]"),
        (recorded(&[1.0, 1e300]), &good, "arrivals.recorded_seconds[1]"),
        (arrivals(json!({})), &Value::Null, "starts"),
        (arrivals(json!({})), &starts(start(-1.0, 1e9)), "starts.main.process_seconds"),
        (arrivals(json!({})), &starts(start(1.0, 0.0)), "starts.main.load_bytes_per_second"),
    ];
    for (arrivals, starts, field) in table {
        let problem = with(&[("/arrivals", arrivals), ("/starts", starts.clone())]);
        let (named, message) = complaint(&problem.to_string()).unwrap_err();
        assert_eq!(named, field, "{message}");
    }
    for arrivals in [arrivals(json!({})), recorded(&[1.0, 1.0, 2000.0])] {
        complaint(&with(&[("/arrivals", arrivals), ("/starts", good.clone())]).to_string()).unwrap();
    }
    let awake = with(&[("/arrivals", json!({"per_second": 0.1}))]);
    complaint(&awake.to_string()).unwrap();
}

#[test]
fn too_many_recorded_times_are_rejected() {
    let mut problem = Problem::from_json(&worked().to_string()).unwrap();
    let recorded_seconds = Some((0..10_000_001).map(f64::from).collect());
    problem.arrivals = Some(Arrivals {
        per_second: 1.0,
        burst: 1.0,
        recorded_seconds,
        idle_seconds: None,
        input_variation: 0.0,
        output_variation: 0.0,
    });
    assert_eq!(problem.check().unwrap_err().field, "arrivals.recorded_seconds");
}

#[test]
fn invalid_values_are_reported_by_field() {
    let infinite = json!(1e300);
    let table = [
        (with(&[("/prediction/0/0", json!(0.5))]), "prediction[0]"),
        (with(&[("/prediction/1/0", json!(-0.1))]), "prediction[1][0]"),
        (with(&[("/prediction/1", json!([1.0]))]), "prediction[1]"),
        (with(&[("/prediction", json!([]))]), "prediction"),
        (without("/prediction"), "prediction"),
        (with(&[("/prediction_p95", json!([1.0]))]), "prediction_p95"),
        (with(&[("/prediction_p95", json!([[1.0], 1.0]))]), "prediction_p95[0]"),
        (with(&[("/prediction_p95", json!([[1.0, -1.0, 1.0, 1.0, 1.0], 1.0]))]), "prediction_p95[0][1]"),
        (with(&[("/prediction_p95", json!([-1.0, 1.0]))]), "prediction_p95[0]"),
        (with(&[("/prediction_p95", json!(["all", 1.0]))]), "prediction_p95[0]"),
        (with(&[("/layers/1/experts", json!(0))]), "layers[1].experts"),
        (with(&[("/layers/1/experts", json!(1e12))]), "layers[1].experts"),
        (with(&[("/layers/0/top_k", json!(5))]), "layers[0].top_k"),
        (with(&[("/layers/0/top_k", json!(0))]), "layers[0].top_k"),
        (with(&[("/layers/0/expert_bytes", json!(0))]), "layers[0].expert_bytes"),
        (
            with(&[("/layers/0/expert_seconds/seconds/1/2", json!(-1e-3))]),
            "layers[0].expert_seconds.seconds[1][2]",
        ),
        (
            with(&[("/layers/0/expert_seconds/seconds/1", json!([1.0]))]),
            "layers[0].expert_seconds.seconds[1]",
        ),
        (with(&[("/layers/0/expert_seconds/seconds", json!([]))]), "layers[0].expert_seconds.seconds"),
        (with(&[("/layers/0/expert_seconds/tokens/0", json!(2))]), "layers[0].expert_seconds.tokens[0]"),
        (with(&[("/layers/0/expert_seconds/vcpus/1", json!(0.2))]), "layers[0].expert_seconds.vcpus[1]"),
        (with(&[("/layers/0/nonexpert_decode_seconds", json!(-1))]), "layers[0].nonexpert_decode_seconds"),
        (
            with(&[("/layers/0/nonexpert_prefill_seconds/base", infinite.clone())]),
            "layers[0].nonexpert_prefill_seconds.base",
        ),
        (
            with(&[("/layers/0/gpu_expert_seconds/seconds/0", json!(-1))]),
            "layers[0].gpu_expert_seconds.seconds[0]",
        ),
        (
            with(&[(
                "/layers/0/remote_expert_seconds",
                json!({"vcpus": [1], "tokens": [2], "seconds": [[0.1]]}),
            )]),
            "layers[0].remote_expert_seconds.tokens[0]",
        ),
        (
            with(&[("/device", json!("cpu")), ("/layers/1/cpu_nonexpert_seconds", json!(null))]),
            "layers[1].cpu_nonexpert_seconds",
        ),
        (with(&[("/device", json!("tpu"))]), "device"),
        (with(&[("/layers", json!([]))]), "layers"),
        (with(&[("/request/input_tokens", json!(0))]), "request.input_tokens"),
        (with(&[("/request/output_tokens", json!(-1))]), "request.output_tokens"),
        (with(&[("/request/max_input_tokens", json!(5))]), "request.max_input_tokens"),
        (with(&[("/request/concurrency", json!(0))]), "request.concurrency"),
        (with(&[("/request/concurrency", json!(100_000))]), "request.concurrency"),
        (with(&[("/request/concurrency", json!(1.5))]), "request.concurrency"),
        (with(&[("/swap_seconds/per_token", json!(-1))]), "swap_seconds.per_token"),
        (with(&[("/cold_start_seconds", json!(-1))]), "cold_start_seconds"),
        (with(&[("/transport/bytes_per_second", json!(0))]), "transport.bytes_per_second"),
        (with(&[("/transport/invoke_seconds", json!(-1))]), "transport.invoke_seconds"),
        (with(&[("/pricing/cpu_per_gb_second", json!(0))]), "pricing.cpu_per_gb_second"),
        (with(&[("/pricing/memory_per_gb_second", json!(0))]), "pricing.memory_per_gb_second"),
        (with(&[("/pricing/gpu_per_gb_second", json!(0))]), "pricing.gpu_per_gb_second"),
        (with(&[("/pricing/gpu_bytes_each", json!(1e9))]), "pricing.gpu_per_second_each"),
        (with(&[("/pricing/billing", json!("monthly"))]), "pricing.billing"),
        (with(&[("/pricing/main_replicas", json!(0))]), "pricing.main_replicas"),
        (with(&[("/specs/main/step_bytes", json!(0))]), "specs.main.step_bytes"),
        (with(&[("/specs/main/step_bytes", json!(1))]), "specs.main.step_bytes"),
        (with(&[("/specs/main/max_bytes", infinite)]), "specs.main.max_bytes"),
        (with(&[("/slo/ttft_seconds", json!(0))]), "slo.ttft_seconds"),
        (with(&[("/slo/tpot_seconds", json!(-1))]), "slo.tpot_seconds"),
        (with(&[("/limits/max_replicas", json!(0))]), "limits.max_replicas"),
        (with(&[("/limits/max_replicas", json!(4_000_000_000u32))]), "limits.max_replicas"),
        (with(&[("/limits/payload_bytes", json!(0))]), "limits.payload_bytes"),
        (with(&[("/token_bytes", json!(null))]), "token_bytes"),
        (with(&[("/head_bytes", json!("many"))]), "head_bytes"),
        (with(&[("/version", json!(2))]), "version"),
        (without("/specs/main"), "specs.main"),
        (without("/cold_start_seconds"), "cold_start_seconds"),
        (with(&[("/slo/ttft_seconds", json!(1.0))]), "infeasible ttft"),
        (with(&[("/slo/tpot_seconds", json!(1e-6))]), "infeasible tpot"),
        (with(&[("/limits/gpu_bytes", json!(1e6))]), "infeasible gpu"),
        (
            with(&[("/specs/main", json!({"min_bytes": 1e8, "max_bytes": 1.1e8, "step_bytes": 1e6}))]),
            "infeasible main",
        ),
    ];
    for (problem, field) in table {
        let (named, message) = complaint(&problem.to_string()).expect_err(field);
        assert_eq!(named, field, "{message}");
    }
}

/// If no remote size holds an expert, all stay local; it is an error only if remote experts are required.
#[test]
fn remote_functions_too_small_for_an_expert_are_not_used() {
    for (least, most) in [(1e8, 1e8), (1e8, 1.3e8)] {
        let text =
            with(&[("/specs/remote/max_bytes", json!(most)), ("/specs/remote/min_bytes", json!(least))]);
        let problem = Problem::from_json(&text.to_string()).unwrap();
        let answer = solve(&problem, None, &Options::default()).unwrap();
        assert!(answer.plan.layers.iter().all(|layer| layer.remote.is_empty()));
        assert_eq!(answer.evaluation.total_cost, answer.baselines.mix.unwrap().total_cost);
        let always = Options { remote: Remote::Always, ..Options::default() };
        let error = solve(&problem, None, &always).unwrap_err();
        assert!(
            matches!(&error, PlanError::Problem(error) if error.field == "specs.remote.max_bytes"),
            "{error}"
        );
    }
}

#[test]
fn nan_is_reported_by_field() {
    let text = worked().to_string();
    for value in ["NaN", "Infinity", "-NaN", "1e999"] {
        let text = text.replace("\"cold_start_seconds\":1.5", &format!("\"cold_start_seconds\":{value}"));
        let (field, message) = complaint(&text).unwrap_err();
        assert_eq!(field, "cold_start_seconds", "{message}");
    }
    // Callers without JSON can have them too.
    let mut problem = Problem::from_json(&text).unwrap();
    problem.layers[1].expert_seconds.seconds[0][0] = f64::NAN;
    let Err(PlanError::Problem(error)) = solve(&problem, None, &Options::default()) else { panic!() };
    assert_eq!(error.field, "layers[1].expert_seconds.seconds[0][0]");
}

#[test]
fn unusual_valid_problems_are_solved() {
    for problem in [
        with(&[("/request/output_tokens", json!(0))]),
        with(&[("/limits/payload_bytes", json!(null))]),
        without("/pricing/gpu_per_gb_second"),
        without("/layers/0/gpu_expert_seconds"),
        with(&[("/prediction/0", json!([1.0, 0.0, 0.0, 0.0]))]),
        with(&[("/layers/0/expert_seconds", json!({"vcpus": [1], "tokens": [1], "seconds": [[0.0]]}))]),
        with(&[
            ("/transport/token_bytes_up", json!(0)),
            ("/transport/token_bytes_down", json!(0)),
            ("/transport/invoke_seconds", json!(0)),
        ]),
        with(&[("/limits/max_replicas", json!(1000))]),
    ] {
        assert_eq!(complaint(&problem.to_string()), Ok(()));
    }
    // Without remote experts their sizes do not matter.
    let tiny = with(&[("/specs/remote", json!({"min_bytes": 1, "max_bytes": 1, "step_bytes": 1}))]);
    let never = Options { remote: Remote::Never, ..Options::default() };
    solve(&Problem::from_json(&tiny.to_string()).unwrap(), None, &never).unwrap();
}

#[test]
fn invalid_plans_are_reported_by_field() {
    let problem = Problem::from_json(&worked().to_string()).unwrap();
    let complaint = |plan: Value| {
        let draft = match PlanDraft::from_json(&plan.to_string()) {
            Ok(draft) => draft,
            Err(error) => return error.field,
        };
        match evaluate(&problem, &draft, false) {
            Err(PlanError::Plan(error)) => error.field,
            other => panic!("{plan}: {other:?}"),
        }
    };
    let layer = json!({"remote": [0], "memory_bytes": 1e9, "replicas": 1});
    let table = [
        (json!({"main_bytes": 1e9}), "layers"),
        (json!({"layers": [layer]}), "layers"),
        (json!({"layers": [layer, {"remote": [4]}]}), "layers[1].remote[0]"),
        (json!({"layers": [layer, {"remote": [1, 1]}]}), "layers[1].remote"),
        (json!({"layers": [layer, {"remote": [1], "replicas": 100_000}]}), "layers[1].replicas"),
        (json!({"layers": [layer, {"remote": [1], "memory_bytes": -1}]}), "layers[1].memory_bytes"),
        (json!({"main_bytes": 1e30, "layers": [layer, layer]}), "main_bytes"),
        (json!({"layers": [{"layer": 3, "remote": []}, {"remote": []}]}), "layers"),
        (json!({"layers": [{"layer": 3, "remote": []}, {"layer": 3, "remote": []}]}), "layers[1].layer"),
        (json!({"plan": {"layers": [{"remote": "all"}]}}), "plan.layers[0].remote"),
        (json!({"plan": {"layers": [], "group": []}}), "plan.group"),
        (json!({"plan": {"layers": []}, "groups": []}), "groups"),
        (json!({"layers": [{"remote": [], "replica": 2}]}), "layers[0].replica"),
        (json!({"layers": [], "groups": [{"experts": "0:0", "memory": 1e9}]}), "groups[0].memory"),
        (json!([]), ""),
    ];
    for (plan, field) in table {
        assert_eq!(complaint(plan), field);
    }
}

#[test]
fn plan_files_are_read_in_each_format() {
    let problem = Problem::from_json(&worked().to_string()).unwrap();
    let cost = |plan: &Value| {
        let draft = PlanDraft::from_json(&plan.to_string()).unwrap();
        let evaluation = evaluate(&problem, &draft, false).unwrap();
        assert_eq!(evaluation.violations, []);
        evaluation.total_cost
    };
    let answer = solve(&problem, None, &Options::default()).unwrap();
    assert_eq!(cost(&serde_json::to_value(&answer).unwrap()), answer.evaluation.total_cost);
    assert_eq!(cost(&serde_json::to_value(&answer.plan).unwrap()), answer.evaluation.total_cost);
    // By the model's ids in any order, sizes left out: the smallest that hold.
    let full = json!({"main_bytes": 8e8, "layers": [
        {"remote": [0, 3], "memory_bytes": 3e8, "replicas": 1},
        {"remote": [1], "memory_bytes": 2e8, "replicas": 2},
    ]});
    let short =
        json!({"layers": [{"layer": 7, "remote": [1], "replicas": 2}, {"layer": 2, "remote": [3, 0]}]});
    let mains: Vec<f64> = [&full, &short].map(cost).to_vec();
    assert!((mains[0] - mains[1]).abs() < 1.0, "{mains:?}");
}

#[test]
fn violations_are_listed() {
    let mut problem = worked();
    problem["limits"]["payload_bytes"] = json!(1000);
    problem["slo"] = json!({"ttft_seconds": 1.6, "tpot_seconds": 1e-3});
    problem["limits"]["gpu_bytes"] = json!(1e6);
    let problem = Problem::from_json(&problem.to_string()).unwrap();
    let plan = json!({"main_bytes": 210_000_000, "layers": [
        {"remote": [0, 3], "memory_bytes": 222_000_000, "replicas": 9},
        {"remote": [], "memory_bytes": 1, "replicas": 7},
    ]});
    let draft = PlanDraft::from_json(&plan.to_string()).unwrap();
    let evaluation = evaluate(&problem, &draft, false).unwrap();
    let names: Vec<&str> = evaluation.violations.iter().map(|violation| violation.limit.as_str()).collect();
    assert_eq!(names, ["ttft", "tpot", "gpu", "main", "mem0", "payload0", "z0", "spec0", "spec_main"]);
}

/// Uses a text as a problem and as a plan in all ways. None may panic.
fn use_it(text: &str) {
    if let Ok(problem) = Problem::from_json(text) {
        for robust in [false, true] {
            let options = Options { robust, ..Options::default() };
            if let Ok(answer) = solve(&problem, None, &options) {
                let draft = PlanDraft::from(&answer.plan);
                assert_eq!(evaluate(&problem, &draft, robust).unwrap().violations, []);
                serde_json::to_string(&answer).unwrap();
            }
        }
        let _answer = preallocate(&problem);
    }
    if let Ok(draft) = PlanDraft::from_json(text) {
        let _evaluation = evaluate(&Problem::from_json(&worked().to_string()).unwrap(), &draft, true);
    }
}

#[test]
fn memory_beyond_all_sizes_is_reported_without_a_search() {
    let problem = with(&[("/token_bytes", json!(4.096e13))]);
    let problem = Problem::from_json(&problem.to_string()).unwrap();
    let Err(PlanError::Infeasible(why)) = solve(&problem, None, &Options::default()) else {
        panic!("40 TB per token fit");
    };
    assert!(why.remedy.iter().any(|remedy| remedy.at_least > 1e15), "{why:?}");
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop_oneof![Just(0.0), Just(1e-300), Just(1e300), Just(-1.0), Just(1e15), Just(0.5)]
            .prop_map(Value::from),
        "[a-z]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z_]{1,12}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Lists all JSON pointers into `value`.
pub(crate) fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, field)| pointers(field, &format!("{at}/{name}"), found));
        }
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(index, item)| pointers(item, &format!("{at}/{index}"), found));
        }
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_json_panics(value in any_json()) {
        use_it(&value.to_string());
    }

    #[test]
    fn no_mutation_of_a_problem_panics(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_json()), 1..4),
    ) {
        let mut problem = worked();
        for (index, value) in changes {
            let mut all = Vec::new();
            pointers(&problem, "", &mut all);
            if let Some(place) = problem.pointer_mut(index.get::<String>(&all)) {
                *place = value;
            }
        }
        use_it(&problem.to_string());
    }

    #[test]
    fn no_scaled_figure_panics(
        changes in prop::collection::vec((any::<prop::sample::Index>(), -20..20i32), 1..4),
    ) {
        let mut problem = worked();
        let mut all = Vec::new();
        pointers(&problem, "", &mut all);
        for (index, power) in changes {
            let place = problem.pointer_mut(index.get::<String>(&all)).unwrap();
            if let Some(number) = place.as_f64() {
                *place = json!(number * 10f64.powi(power));
            }
        }
        use_it(&problem.to_string());
    }

    #[test]
    fn no_text_panics(text in ".{0,200}") {
        use_it(&text);
    }
}
