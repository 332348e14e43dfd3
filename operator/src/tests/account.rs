//! Accounts: the expected cost of requests, as main functions receive it.

use crate::planning::account;
use crate::testing::example::{built, deployment, facts, plan, plan_of_groups, planning, prior};
use crate::tests::rollout::World;
use remoe_api::{MoEDeployment, MoEPlanSpec};
use remoe_planner::{Budget, PlanAccount, PlanDraft, evaluate};
use serde_json::{Value, json};

/// Equal except for the last digit of numbers, which parsing may change.
fn alike(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Object(one), Value::Object(other)) => {
            one.len() == other.len()
                && one.iter().all(|(key, value)| other.get(key).is_some_and(|other| alike(value, other)))
        }
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| alike(one, other))
        }
        (Value::Number(one), Value::Number(other)) => {
            let (one, other) = (one.as_f64().unwrap(), other.as_f64().unwrap());
            (one - other).abs() <= 1e-12 * one.abs()
        }
        (one, other) => one == other,
    }
}

fn read(plan: &MoEPlanSpec) -> PlanAccount {
    PlanAccount::from_json(&account(plan).unwrap().unwrap()).unwrap()
}

/// A main function computes the plan's figures for a request of typical lengths.
#[test]
fn main_functions_expect_what_the_plan_does() {
    let owner = deployment(json!({}));
    let plan = planning(&owner).solve(None, Budget::UNLIMITED).unwrap();
    let workload = &plan.workload;
    let steps = workload.typical_output_tokens as usize - 1;
    let expected = read(&plan).expect(workload.typical_input_tokens as usize, steps);
    let close = |value: f64, other: f64| (value / other - 1.0).abs() < 1e-6;
    assert!(close(expected.ttft_seconds, plan.numbers.times.prefill_seconds), "{expected:?} {plan:?}");
    assert!(close(expected.tpot_seconds, plan.numbers.times.tpot_seconds), "{expected:?} {plan:?}");
}

/// After a restart the operator knows a plan only from its object, even if the spec has changed.
#[test]
fn an_account_follows_from_the_stored_plan_alone() {
    let cpu = json!({"min": 250, "max": 4000, "step": 250});
    let apart = deployment(json!({"main": {"cpu": cpu}, "remoteExperts": {"cpu": cpu}}));
    for (owner, plan) in [
        (deployment(json!({})), plan(&deployment(json!({})))),
        (deployment(json!({})), plan_of_groups(&deployment(json!({})), 3)),
        (apart.clone(), plan_of_groups(&apart, 2)),
    ] {
        let stored: MoEPlanSpec = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
        let account_json = account(&stored).unwrap().unwrap();
        assert_eq!(Some(&account_json), account(&plan).unwrap().as_ref());
        let value: Value = serde_json::from_str(&account_json).unwrap();
        let problem: Value = serde_json::to_value(planning(&owner).problem()).unwrap();
        assert!(alike(&value["problem"], &problem), "{value}");
        assert_eq!(value["plan"]["groups"].as_array().map_or(0, Vec::len), plan.groups.len());
        // It can be evaluated as a plan of that problem.
        let draft = PlanDraft::from_json(&account_json).unwrap();
        assert!(evaluate(planning(&owner).problem(), &draft, false).is_ok());
    }
}

#[test]
fn a_plan_that_says_nothing_or_nonsense_has_no_account() {
    let owner = deployment(json!({}));
    let plan = plan_of_groups(&owner, 2);
    let with = |basis: Option<String>| account(&MoEPlanSpec { basis, ..plan.clone() });
    assert_eq!(with(None), Ok(None));
    let basis: Value = serde_json::from_str(plan.basis.as_ref().unwrap()).unwrap();
    let corrupted = |change: fn(&mut Value)| {
        let mut basis = basis.clone();
        change(&mut basis);
        with(Some(basis.to_string()))
    };
    assert!(with(Some("nonsense".to_owned())).is_err());
    assert!(with(Some("x".repeat(1 << 20))).unwrap_err().to_string().contains("1048576 bytes, limit 65536"));
    assert!(corrupted(|basis| basis["model"]["experts"] = json!(u64::MAX)).is_err());
    assert!(corrupted(|basis| basis["model"]["moe_layers"] = json!([])).is_err());
    assert!(corrupted(|basis| basis["profile"]["version"] = json!(0)).is_err());
    assert!(corrupted(|basis| basis["wishes"]["request"]["input_tokens"] = json!(-1.0)).is_err());
    // Layers that the model lacks.
    assert!(corrupted(|basis| basis["model"]["moe_layers"] = json!([0, 1, 2])).is_err());
    let has_uncertified = MoEPlanSpec { groups: vec![plan.groups[0].clone(); 2], ..plan.clone() };
    assert!(account(&has_uncertified).unwrap_err().to_string().contains("another group hosts"));
}

/// The stored basis is small, even for a model of 61 layers with 256 experts each.
#[test]
fn what_is_kept_of_a_large_model_is_small() {
    let mut large = facts();
    let model = &mut large.inspection;
    model.layers = 61;
    model.moe_layers = (3..61).collect();
    model.non_expert_layer_bytes = vec![123_456_789; 61];
    model.experts = 256;
    model.top_k = 8;
    let owner: MoEDeployment = deployment(json!({"remoteExperts": {"mode": "Never"}}));
    let planning = crate::planning::Planning::new("demo", &owner.spec, &large, &prior());
    let planning = planning.unwrap();
    let plan = planning.solve(None, Budget::UNLIMITED).unwrap();
    let kept = plan.basis.as_ref().unwrap().len();
    let account_json = account(&plan).unwrap().unwrap().len();
    assert!(kept < 16 << 10 && account_json < 4 << 20, "{kept} bytes kept, {account_json} told");
}

/// A new account alone pushes no generation: it follows from the plan, which the generation names.
#[test]
fn a_generation_that_stands_is_told_once() {
    let owner = deployment(json!({}));
    let mut world = World::new(built(&owner, &plan_of_groups(&owner, 2)));
    world.settle();
    let number = world.table.newest();
    for _ in 0..20 {
        let steps = world.steps();
        assert!(steps.settled && steps.table.is_none(), "{steps:?}");
    }
    assert_eq!(world.table.newest(), number);
}
