//! Deployments that violate the policy, through the whole reconcile.

use crate::deployment_policy::{DeploymentPolicy, NOT_ALLOWED};
use crate::testing::example::deployment;
use crate::testing::world::World;
use crate::write::Write;
use remoe_api::{Condition, ConditionType, MoEDeploymentStatus};
use serde_json::{Value, json};

fn system_priority(part: &str) -> Value {
    json!({part: {"template": {"priorityClassName": "system-node-critical"}}})
}

fn condition(status: &MoEDeploymentStatus, of: ConditionType) -> &Condition {
    status.condition(of).unwrap()
}

#[test]
fn nothing_is_created_for_what_is_not_allowed() {
    for gateways in [false, true] {
        for part in ["main", "remoteExperts"] {
            let spec = system_priority(part);
            let mut world = if gateways { World::with_gateways(spec, &["g1"]) } else { World::new(spec) };
            for _ in 0..3 {
                let (_, steps, status) = world.look_and_state();
                assert_eq!(steps.writes, [], "{part}");
                assert!(world.names().is_empty());
                for of in [ConditionType::Ready, ConditionType::Planned] {
                    let said = condition(&status, of);
                    assert_eq!((said.status.as_str(), said.reason.as_str()), ("False", NOT_ALLOWED));
                    assert!(said.message.contains("system-node-critical"), "{}", said.message);
                }
                world.run();
            }
            // Without the violation, everything is created.
            world.owner.spec = deployment(json!({})).spec;
            assert!(world.settle() > 0);
        }
    }
}

#[test]
fn running_pods_stay_when_their_spec_is_refused() {
    let mut world = World::new(json!({}));
    world.settle();
    let pods = world.observed.pods.clone();
    world.owner.spec = deployment(system_priority("main")).spec;
    let (planned, steps, status) = world.look_and_state();
    assert_eq!(planned.target, None);
    assert!(!steps.writes.iter().any(|write| matches!(write, Write::Create(_) | Write::Delete(_))));
    assert_eq!(world.observed.pods, pods);
    assert_eq!(condition(&status, ConditionType::Degraded).reason, NOT_ALLOWED);
    assert_eq!(condition(&status, ConditionType::Ready).status, "True");
}

#[test]
fn platform_prices_replace_those_of_the_spec() {
    let list = |core: &str| {
        let prices = json!({"cpuCoreHour": core, "memoryGBHour": "0.004"}).to_string().parse().unwrap();
        move |policy: DeploymentPolicy| DeploymentPolicy { prices: Some(prices), ..policy }
    };
    let settled = |pricing: Value, platform: Option<&str>| {
        let mut world = World::new(json!({ "pricing": pricing }));
        if let Some(core) = platform {
            world.environment.policy = list(core)(world.environment.policy.clone());
        }
        world.settle();
        world.look_and_state().2
    };
    let free = json!({"cpuCoreHour": "0.000000001", "memoryGBHour": "0.000000001"});
    let own = settled(free.clone(), None);
    assert_eq!(own.cost_per_hour.as_deref(), Some("$0"));
    let platform = settled(free, Some("0.03"));
    let expected = settled(json!({"cpuCoreHour": "0.03"}), None);
    assert_eq!(platform.cost_per_hour, expected.cost_per_hour);
    assert_eq!(platform.plan, expected.plan, "plans follow the same prices");
    let said = |status: &MoEDeploymentStatus| condition(status, ConditionType::Planned).message.clone();
    assert!(said(&platform).contains("the price list of the platform applies"), "{}", said(&platform));
    assert!(!said(&expected).contains("price list"));
}
