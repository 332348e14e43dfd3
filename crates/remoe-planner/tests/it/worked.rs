//! The worked problems: evaluation, bounds, pre-allocation steps, baselines and cheapest plan, to a relative 1e-9.

use remoe_planner::{
    Billing, Options, PlanDraft, PlanError, Problem, ReplacementReason, Selection, assignments_bound,
    evaluate, preallocate, solve,
};
use serde_json::Value;

fn read(name: &str) -> String {
    let path = format!("{}/../../tests/fixtures/planning/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

const WORKED: [&str; 3] = ["example", "example2", "example3"];

fn problem(name: &str) -> Problem {
    Problem::from_json(&read(&format!("{name}-problem.json"))).unwrap()
}

fn expected(name: &str) -> Value {
    serde_json::from_str(&read(&format!("{name}-evaluation.json"))).unwrap()
}

/// Asserts that `actual` has all values of `expected`; it may have more fields.
fn same(at: &str, actual: &Value, expected: &Value) {
    match expected {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            let field = actual.get(name).unwrap_or_else(|| panic!("{at}.{name} is missing"));
            same(&format!("{at}.{name}"), field, value);
        }),
        Value::Array(items) => {
            assert_eq!(actual.as_array().map(Vec::len), Some(items.len()), "{at}: {actual}");
            for (index, item) in items.iter().enumerate() {
                same(&format!("{at}[{index}]"), &actual[index], item);
            }
        }
        Value::Number(number) => {
            let (actual, expected) = (actual.as_f64().unwrap(), number.as_f64().unwrap());
            assert!((actual - expected).abs() <= 1e-9 * expected.abs(), "{at}: {actual} {expected}");
        }
        other => assert_eq!(actual, other, "{at}"),
    }
}

#[test]
fn evaluation_of_the_worked_example() {
    for name in WORKED {
        let expected = expected(name);
        let plan = PlanDraft::from_json(&expected["plan"].to_string()).unwrap();
        let evaluation = evaluate(&problem(name), &plan, false).unwrap();
        same(name, &serde_json::to_value(&evaluation).unwrap(), &expected["evaluation"]);
        assert_eq!(evaluation.violations, []);
    }
}

#[test]
fn assignment_bounds_of_the_worked_example() {
    for name in WORKED {
        for bound in expected(name)["n_up"].as_array().unwrap() {
            let field = |name: &str| bound[name].as_f64().unwrap();
            let value = assignments_bound(field("n"), field("m"), field("top_k"), field("experts"));
            same(name, &value.into(), &bound["value"]);
        }
    }
}

#[test]
fn preallocation_steps_of_the_worked_example() {
    for name in WORKED {
        let mut problem = problem(name);
        problem.prediction = None;
        let preallocation = preallocate(&problem).unwrap();
        let expected = &expected(name)["preallocation"];
        same(name, &serde_json::to_value(&preallocation.walk).unwrap(), expected);
        let first = expected.as_array().unwrap().iter().find(|step| !step["main_bytes"].is_null()).unwrap();
        assert_eq!(preallocation.i as u64, first["i"].as_u64().unwrap());
        assert_eq!(preallocation.main_bytes, first["main_bytes"].as_f64().unwrap());
    }
}

#[test]
fn baselines_and_cheapest_plan() {
    for name in WORKED {
        let answer = solve(&problem(name), None, &Options::default()).unwrap();
        let expected = expected(name);
        let value = serde_json::to_value(&answer).unwrap();
        same(name, &value["baselines"], &expected["baselines"]);
        same(name, &value["walk"], &expected["preallocation"]);
        let known = expected["cheapest_plan"]["total_cost"].as_f64().unwrap();
        let cost = answer.evaluation.total_cost;
        if answer.explanation.selection == Some(Selection::Mixed) {
            // Ratios and bytes across layers, which the expected plan is the cheapest of, leave cheaper ones out.
            assert!(cost < known * (1.0 - 1e-9), "{name}: {cost} {known}");
            let again = evaluate(&problem(name), &PlanDraft::from(&answer.plan), false).unwrap();
            assert_eq!((again.violations, again.total_cost), (Vec::new(), cost), "{name}");
        } else {
            same(name, &value["plan"], &expected["cheapest_plan"]["plan"]);
            same(name, &cost.into(), &expected["cheapest_plan"]["total_cost"]);
        }
    }
}

#[test]
fn whole_remote_layers_cost_less_than_any_ratio() {
    let mut problem = problem("whole-layers");
    let known = PlanDraft::from_json(&read("whole-layers-plan.json")).unwrap();
    for max_groups in [None, Some(16)] {
        problem.limits.max_groups = max_groups;
        let known = evaluate(&problem, &known, false).unwrap();
        assert_eq!(known.violations, []);
        let answer = solve(&problem, None, &Options::default()).unwrap();
        let cost = answer.evaluation.total_cost;
        assert!(cost <= known.total_cost, "{cost} {}", known.total_cost);
        let wholly_local = answer.plan.layers.iter().filter(|layer| layer.remote.is_empty()).count();
        assert!((1..problem.layers.len()).contains(&wholly_local), "{wholly_local}");
    }
}

#[test]
fn reserved_billing_with_two_mains() {
    for name in WORKED {
        let mut problem = problem(name);
        problem.pricing.billing = Billing::Reserved;
        problem.pricing.main_replicas = 2;
        let expected = expected(name);
        let plan = PlanDraft::from_json(&expected["plan"].to_string()).unwrap();
        let evaluation = evaluate(&problem, &plan, false).unwrap();
        same(name, &evaluation.total_cost.into(), &expected["evaluation_reserved_two_mains"]);
    }
}

#[test]
fn half_the_limit_is_infeasible() {
    let mut problem = problem("example3");
    problem.slo.ttft_seconds /= 2.0;
    let Err(PlanError::Infeasible(why)) = solve(&problem, None, &Options::default()) else { panic!() };
    assert_eq!((why.limit.as_str(), why.allowed), ("ttft", 1.1));
    assert!(why.value > problem.cold_start_seconds, "{why}");
    // What it says would help does.
    problem.slo.ttft_seconds = why.remedy[0].at_least;
    preallocate(&problem).unwrap();
}

#[test]
fn failing_plan_is_replaced_and_near_optimal_plan_is_kept() {
    let mut problem = problem("example3");
    let best = solve(&problem, None, &Options::default()).unwrap();
    let mut small = best.plan.clone();
    small.main_bytes = 200_000_000.0;
    let answer = solve(&problem, Some(&PlanDraft::from(&small)), &Options::default()).unwrap();
    assert_eq!(
        (answer.change.unwrap().reason, answer.plan),
        (ReplacementReason::PreviousFails, best.plan.clone())
    );
    // Whole requests in the worst case are too slow, but a plan that keeps the limits on the prediction is found.
    problem.slo.ttft_seconds = 1.6;
    assert!(matches!(preallocate(&problem), Err(PlanError::Infeasible(_))));
    let cheapest = solve(&problem, None, &Options::default()).unwrap();
    let fast = r#"{"main_bytes": 5e9, "layers": [
        {"remote": [2], "memory_bytes": 6e8, "replicas": 1},
        {"remote": [1], "memory_bytes": 6e8, "replicas": 1}]}"#;
    let fast = PlanDraft::from_json(fast).unwrap();
    let known = evaluate(&problem, &fast, false).unwrap();
    assert_eq!(known.violations, []);
    assert!(cheapest.evaluation.total_cost <= known.total_cost * (1.0 + 1e-12));
    let answer = solve(&problem, Some(&fast), &Options { hysteresis: 0.9, ..Options::default() }).unwrap();
    let change = answer.change.unwrap();
    assert!(change.kept, "{change:?}");
}
