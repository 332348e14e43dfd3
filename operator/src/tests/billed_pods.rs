//! Costs of pods, as gateways receive them.

use crate::billed_pods::{billed_pods, cost_per_hour};
use crate::names::{FUNCTION, label};
use crate::testing::world::World;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use remoe_api::{FunctionPod, MOST_FUNCTIONS};
use serde_json::json;

/// Serving deployment, with a core at $0.1 and a GB at $0.01 an hour.
fn world(billing: &str) -> World {
    let pricing = json!({"cpuCoreHour": "0.1", "memoryGBHour": "0.01", "billing": billing});
    let spec = json!({"pricing": pricing, "scaling": {"min": 0, "idleWindow": "5s"}});
    let mut world = World::with_gateways(spec, &["a"]);
    world.settle();
    world
}

#[test]
fn a_pod_costs_what_it_reserves_from_when_it_has_a_node() {
    let mut world = world("Reserved");
    let told = world.demand().spec.functions.clone();
    assert_eq!(told, billed_pods(&world.owner, &world.observed.pods, true), "all of it, and settled");
    let is_main = |pod: &&mut Pod| label(&pod.metadata, FUNCTION) == "main";
    let pod = world.observed.pods.iter_mut().find(is_main).unwrap();
    let resources = pod.spec.as_mut().unwrap().containers[0].resources.as_mut().unwrap();
    assert!(resources.requests.as_ref().unwrap().contains_key("cpu"), "functions reserve what was planned");
    resources.requests = serde_json::from_value(json!({"cpu": "1500m", "memory": "2G"})).unwrap();
    let priced = billed_pods(&world.owner, &world.observed.pods, true);
    let main = priced.iter().find(|function| function.tier == "main").unwrap();
    assert_eq!((main.rate, main.per_work, main.address.as_deref()), (170_000_000, false, None));
    assert_eq!(main.memory, 2_000_000_000);
    world.owner.spec.pricing.cpu_core_hour = "9".repeat(20);
    let dear = billed_pods(&world.owner, &world.observed.pods, true);
    assert!(
        dear.iter().all(|function| function.rate == 1_000_000_000_000),
        "what sums and the API can take: {dear:?}"
    );
    let remote: Vec<FunctionPod> = told.into_iter().filter(|function| function.tier != "main").collect();
    assert!(!remote.is_empty());
    for function in remote {
        assert!(
            function.tier.starts_with("group-") || function.tier.starts_with("layer-"),
            "{}",
            function.tier
        );
        assert!(function.address.unwrap().ends_with(":9001"));
        assert!(function.rate > 0 && function.serving.unwrap().0 >= function.started.0);
    }
    for pod in &mut world.observed.pods {
        pod.status.as_mut().unwrap().start_time = None;
    }
    assert_eq!(
        cost_per_hour(&billed_pods(&world.owner, &world.observed.pods, true)),
        0,
        "nothing is reserved for it yet"
    );
}

#[test]
fn remote_functions_may_cost_by_their_work_alone() {
    let world = world("Invocation");
    for function in &world.demand().spec.functions {
        assert_eq!(function.per_work, function.tier != "main");
    }
}

/// A terminating pod counts as replaced since its deletion, unless the deployment scales to zero.
#[test]
fn who_ends_while_functions_run_is_surplus() {
    let mut world = world("Reserved");
    let asked: Timestamp = "2026-01-01T01:00:00Z".parse().unwrap();
    let pod = &mut world.observed.pods[0];
    pod.metadata.deletion_grace_period_seconds = Some(30);
    pod.metadata.deletion_timestamp = Some(Time(asked.checked_add(SignedDuration::from_secs(30)).unwrap()));
    let name = pod.metadata.name.clone().unwrap();
    let replaced = |functions_run| {
        let told = billed_pods(&world.owner, &world.observed.pods, functions_run);
        told.into_iter().find(|function| function.pod == name).unwrap().replaced.map(|time| time.0)
    };
    assert_eq!((replaced(true), replaced(false)), (Some(asked), None));
}

#[test]
fn what_gateways_are_told_is_bounded() {
    let mut world = world("Reserved");
    let one = world.observed.pods[0].clone();
    let many = (0..MOST_FUNCTIONS + 7).map(|number| {
        let mut pod = one.clone();
        pod.metadata.name = Some(format!("demo-{number:06}"));
        pod
    });
    world.observed.pods = many.collect();
    let told = billed_pods(&world.owner, &world.observed.pods, true);
    assert_eq!(told.len(), MOST_FUNCTIONS);
    // Well below the size limit of an object.
    assert!(serde_json::to_string(&told).unwrap().len() < 400_000);
}
