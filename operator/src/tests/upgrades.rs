//! Objects of earlier versions: an upgrade reads them, and replaces nothing.

use crate::digest::digest;
use crate::manifests::{Revision, plan_hash, revision};
use crate::planning::account;
use crate::routing::RoutingTable;
use crate::testing::example::environment;
use crate::testing::world::World;
use crate::write::Write;
use kube::ResourceExt;
use remoe_api::{Generation, MoEDeployment, MoEPlan, MoEPlanSpec};
use serde_json::{Value, json};

const DEPLOYMENT: &str = r#"{"apiVersion":"remoe.dev/v1alpha1","kind":"MoEDeployment","metadata":
{"generation":1,"name":"demo","namespace":"test","uid":"uid-1"},"spec":{"model":{"source":"pvc://models/demo"},
"mode":"Active","replicas":2,"slo":{"ttft":"10s","tpot":"150ms"},"main":{"device":"cpu","memoryMB":{"min":200,
"max":4000,"step":100}},"remoteExperts":{"mode":"Always","memoryMB":{"min":200,"max":1000,"step":100},
"maxReplicas":4},"pricing":{"billing":"Reserved","cpuCoreHour":"0.03","memoryGBHour":"0.004"}}}"#;

const PLAN: &str = r#"{"apiVersion":"remoe.dev/v1alpha1","kind":"MoEPlan","metadata":{"name":"demo-9d608da1a3",
"namespace":"test"},"spec":{"deployment":"demo","inputs":"9c409b089a","model":{"source":"pvc://models/demo",
"dtype":"bfloat16","digest":"f00d"},"device":"cpu","profile":"Prior","workload":{"maxInputTokens":768,
"maxOutputTokens":256,"typicalInputTokens":96,"typicalOutputTokens":52,"concurrency":8},"main":{"memoryMB":500,
"limitMB":504,"kvCacheBytes":2273280,"fallbackBytes":786432},"remote":[{"layer":1,"experts":"0","memoryMB":200,
"replicas":1},{"layer":2,"experts":"0","memoryMB":200,"replicas":1},{"layer":3,"experts":"0","memoryMB":200,
"replicas":1}],"numbers":{"times":{"ttftSeconds":0.0192751296,"tpotSeconds":0.0018038175,"prefillSeconds":
0.0192751296,"decodeSeconds":0.0919946925},"costs":{"main":5.25881934e-7,"remote":3.15264496e-7,"total":
8.4114643e-7},"baselines":{"mix":3.3987355e-7,"cpu":3.39837888e-7},"savings":{"mix":-1.47488053,"cpu":
-1.47514023}},"shown":{"ttft":"19.3 ms","tpot":"1.80 ms","costOfMillion":"$0.841"}}}"#;

const GENERATION: &str = "{\"number\":3,\"plan\":\"9d608da1a3\",\"revision\":\"c8d169b5fc\",\
    \"remote\":\"1:0,2:0,3:0\",\"endpoints\":[{\"pod\":\"demo-l1-54ff339e16-0-0\",\"address\":\"10.0.0.1:9001\",\
    \"layers\":[1]}]}";

fn read<T: serde::de::DeserializeOwned>(text: &str) -> T {
    serde_json::from_str(text).unwrap()
}

fn stored() -> (MoEDeployment, MoEPlanSpec, Revision) {
    let (owner, plan): (MoEDeployment, MoEPlan) = (read(DEPLOYMENT), read(PLAN));
    let revision = revision(&owner, "9d608da1a3", &plan.spec, &environment()).unwrap();
    (owner, plan.spec, revision)
}

#[test]
fn what_is_not_there_is_as_it_was_before() {
    let (owner, plan, _) = stored();
    assert_eq!((owner.spec.main.cpu, owner.spec.remote_experts.cpu), (None, None));
    assert_eq!(owner.spec.remote_experts.max_groups, 16);
    assert!(plan.groups.is_empty() && plan.main.cpu_millicores.is_none() && plan.workload.arrivals.is_none());
    assert_eq!(account(&plan), Ok(None));
    // No absent field is written.
    let (object, written): (Value, Value) = (read(PLAN), serde_json::to_value(&plan).unwrap());
    assert_eq!(written, object["spec"]);
    // Its name is that version's hash; this version's hash does not matter.
    assert_eq!(digest(&plan).unwrap(), "9d608da1a3");
    assert_ne!(plan_hash(&plan).unwrap(), "9d608da1a3");
}

/// Pods follow the plan. They differ from the old ones: probes and metrics have their own ports since, and both IP
/// versions are listened on. Stored routing is read unchanged.
#[test]
fn its_functions_are_those_of_its_plan() {
    let (owner, _, revision) = stored();
    let identities: Vec<(&str, &str)> =
        revision.functions().map(|function| (function.name.as_str(), function.identity.as_str())).collect();
    let now = [("main", "acb8b1bcce"), ("l1", "7a04a110fd"), ("l2", "ec8fdc2bec"), ("l3", "835abe2a74")];
    assert_eq!(identities, now);
    assert_eq!(revision.main.pod(&owner, 1, 0).name_any(), "demo-main-acb8b1bcce-1-0");
    let generation: Generation = read(GENERATION);
    assert_eq!(serde_json::to_string(&generation).unwrap(), GENERATION, "written as it was");
    let routing = generation.routing(String::new()).unwrap();
    assert_eq!(routing.endpoints[0].layers, [1]);
    assert!(routing.endpoints[0].experts.is_empty());
}

/// ConfigMaps of an earlier release with facts, profile and routing become records. No pod is created or deleted, no
/// routing is pushed, and nothing is inspected or measured again.
#[test]
fn what_config_maps_kept_is_recorded_and_nothing_restarts() {
    let mut world = World::new(json!({"replicas": 2}));
    world.settle();
    let before = world.observed.clone();
    world.keep_in_config_maps();
    let (_, steps) = world.reconcile();
    let mut kinds: Vec<&str> = steps
        .writes
        .iter()
        .map(|write| match write {
            Write::Facts(_) => "facts",
            Write::Routing(_) => "routing",
            Write::Profile(_) => "profile",
            other => panic!("{other:?}"),
        })
        .collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["facts", "profile", "routing"]);
    assert!(steps.settled && steps.issues.is_empty(), "{:?}", steps.issues);
    world.settle();
    let pods = |world: &[k8s_openapi::api::core::v1::Pod]| -> Vec<_> {
        world.iter().map(ResourceExt::uid).collect()
    };
    assert_eq!(pods(&world.observed.pods), pods(&before.pods));
    let table = RoutingTable::from_record(world.observed.routing.as_ref().unwrap());
    assert_eq!(table, RoutingTable::from_record(before.routing.as_ref().unwrap()));
    assert_eq!(world.observed.details.profiles, before.details.profiles);
    assert_eq!(world.observed.model.unwrap().spec, before.model.unwrap().spec);
}

/// Others can write ConfigMaps: facts that the status does not confirm are inspected again.
#[test]
fn config_maps_unconfirmed_by_status_are_ignored() {
    let mut world = World::new(json!({}));
    world.settle();
    world.keep_in_config_maps();
    let status = world.owner.status.as_mut().unwrap();
    status.model.as_mut().unwrap().digest = "another".to_owned();
    let (_, steps) = world.reconcile();
    let inspects = |write: &Write| matches!(write, Write::Create(creation) if creation.pod.name_any().starts_with("demo-inspect-"));
    assert!(steps.writes.iter().any(inspects), "{:?}", steps.writes);
    assert!(!steps.writes.iter().any(|write| matches!(write, Write::Facts(_))));

    // A deployment that never ran has none, even if a ConfigMap has its name.
    let mut fresh = World::new(json!({}));
    fresh.observed.details.maps = world.observed.details.maps.clone();
    assert!(fresh.reconcile().1.writes.iter().any(inspects));
}
