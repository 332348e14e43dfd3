//! Functions that share the cores and the memory bandwidth of a machine.

use remoe_planner::{Contention, Evaluation, PlanDraft, Problem, evaluate};
use serde_json::{Value, json};

const CONTENTION: Contention = Contention { functions: 4, step: 1.6, prefill: 1.3 };

/// A problem with one layer whose two experts each token uses; nothing else takes time.
fn problem(contention: Option<Contention>) -> Value {
    let sizes = json!({"min_bytes": 1e8, "max_bytes": 1e10, "step_bytes": 1e8});
    let vcpus = json!({"min": 1.0, "max": 1.0, "step": 1.0});
    let seconds = |seconds: [f64; 2]| json!({"vcpus": [1.0], "tokens": [1.0, 8.0], "seconds": [[seconds[0]], [seconds[1]]]});
    json!({
        "device": "cpu",
        "request": {"input_tokens": 8.0, "output_tokens": 100.0},
        "prediction": [[0.5, 0.5]],
        "layers": [{
            "experts": 2, "top_k": 2, "expert_bytes": 1e8, "nonexpert_bytes": 1e8, "kv_bytes_per_token": 0.0,
            "nonexpert_prefill_seconds": {"base": 0.0, "per_token": 0.0}, "nonexpert_decode_seconds": 0.0,
            "expert_seconds": seconds([1.0, 3.0]), "cpu_nonexpert_seconds": seconds([0.0, 0.0]),
        }],
        "token_bytes": 1.0, "head_bytes": 0.0, "runtime_bytes": 0.0, "function_bytes": 0.0,
        "transport": {
            "token_bytes_up": 1.0, "token_bytes_down": 1.0, "bytes_per_second": 1e12, "invoke_seconds": 0.0,
        },
        "swap_seconds": {"base": 0.0, "per_token": 0.0},
        "cold_start_seconds": 0.0,
        "pricing": {"cpu_per_core_second": 1.0, "memory_per_gb_second": 0.1, "billing": "reserved"},
        "specs": {"main": sizes, "remote": sizes, "main_vcpus": vcpus, "remote_vcpus": vcpus},
        "shared_cores": 4.0,
        "contention": contention,
        "slo": {"ttft_seconds": 1e3, "tpot_seconds": 1e3},
        "limits": {"max_replicas": 3, "max_groups": 4},
    })
}

/// Evaluates a plan of `groups` with their numbers of replicas.
fn evaluated(problem: &Value, groups: &[(&str, u32)]) -> Evaluation {
    evaluated_with(problem, groups, [1.0, 1.0])
}

/// Evaluates such a plan with the given vCPUs of the main function and of each remote one.
fn evaluated_with(problem: &Value, groups: &[(&str, u32)], [main, vcpus]: [f64; 2]) -> Evaluation {
    let problem = Problem::from_json(&problem.to_string()).unwrap();
    let group = |(experts, replicas): &(&str, u32)| json!({"experts": experts, "memory_bytes": 1e9, "vcpus": vcpus, "replicas": replicas});
    let groups: Vec<Value> = groups.iter().map(group).collect();
    let plan = json!({"main_bytes": 1e9, "main_vcpus": main, "groups": groups});
    evaluate(&problem, &PlanDraft::from_json(&plan.to_string()).unwrap(), false).unwrap()
}

fn assert_close(evaluation: &Evaluation, prefill: f64, step: f64) {
    let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
    let times = (evaluation.prefill_seconds, evaluation.tpot_seconds);
    assert!(close(times.0, prefill) && close(times.1, step), "{times:?}, expected {prefill} and {step}");
}

/// Both experts of a token are in the same function with probability 1/2. The slower function thus has 1.5 experts in the
/// mean, and each function is called with probability 3/4.
#[test]
fn experts_slow_down_while_other_functions_compute() {
    let (quiet, busy) = (problem(None), problem(Some(CONTENTION)));
    // Two functions are a third of what four do to each other; of a step half of another one computes.
    let (prefill, step) = (1.1, 1.1);
    for groups in [&[("0:0", 1), ("0:1", 1)][..], &[("0:1", 1)][..]] {
        assert_close(&evaluated(&quiet, groups), 3.0, 1.5);
        assert_close(&evaluated(&busy, groups), 3.0 * prefill, 1.5 * step);
    }
    // No other function computes; two replicas do so in a prefill, an expert each, and a third one has none.
    assert_close(&evaluated(&busy, &[("0:0-1", 1)]), 6.0, 2.0);
    assert_close(&evaluated(&busy, &[("0:0-1", 2)]), 3.0 * prefill, 2.0);
    assert_close(&evaluated(&busy, &[("0:0-1", 3)]), 3.0 * prefill, 2.0);
    // Elsewhere functions have machines of their own.
    let mut elsewhere = busy;
    elsewhere.as_object_mut().unwrap().remove("shared_cores");
    assert_close(&evaluated(&elsewhere, &[("0:0", 1), ("0:1", 1)]), 3.0, 1.5);
}

/// With quotas of half a vCPU a computation takes twice as long and overlaps the other function for half of that, which is
/// a sixth of the contention among four functions.
#[test]
fn cpu_quotas_count_the_time_that_contention_adds() {
    let mut busy = problem(Some(CONTENTION));
    busy["cpu_quotas"] = json!(true);
    let half = json!({"min": 0.5, "max": 0.5, "step": 1.0});
    (busy["specs"]["main_vcpus"], busy["specs"]["remote_vcpus"]) = (half.clone(), half);
    let evaluation = evaluated_with(&busy, &[("0:0", 1), ("0:1", 1)], [0.5, 0.5]);
    // An expert of a token is in each of the groups in the mean.
    assert_close(&evaluation, 2.0 * 3.0 * 1.05, 2.0 * 1.1);
    let billed: Vec<f64> = evaluation.groups.iter().map(|group| group.decode_billed).collect();
    assert!(billed.iter().all(|seconds| (seconds - 1.1).abs() < 1e-9), "{billed:?}");
}

#[test]
fn invalid_contention_is_reported() {
    let wrong = |functions: u32, step: f64, prefill: f64| {
        let text = problem(Some(Contention { functions, step, prefill })).to_string();
        Problem::from_json(&text).unwrap_err().to_string()
    };
    for (message, field) in [
        (wrong(1, 1.5, 1.5), "contention.functions"),
        (wrong(2, 0.9, 1.5), "contention.step"),
        (wrong(2, 1.5, 1e9), "contention.prefill"),
    ] {
        assert!(message.contains(field), "{message}");
    }
}

/// A main function that computes most of a token's experts is bound by its CPU quota. The number of remote replicas does
/// not matter, since together they compute for the same time.
#[test]
fn contention_of_a_quota_bound_main_is_independent_of_replicas() {
    let mut busy = problem(Some(CONTENTION));
    busy["cpu_quotas"] = json!(true);
    busy["specs"]["main_vcpus"] = json!({"min": 0.25, "max": 0.25, "step": 1.0});
    busy["prediction"] = json!([[0.75, 0.25]]);
    // 1.5 of a token's experts here, 0.5 there: a third of a quarter of the time.
    let expected = 4.0 * 1.5 * (1.0 + 0.6 * (1.0 / 12.0) / 3.0);
    for replicas in [1, 2] {
        let step = evaluated_with(&busy, &[("0:1", replicas)], [0.25, 1.0]).tpot_seconds;
        assert!((step - expected).abs() < 1e-9, "{step}, expected {expected}");
    }
}
