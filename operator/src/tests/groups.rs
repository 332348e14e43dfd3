//! Plans whose remote functions host experts of several layers.

use crate::manifests::{BuildError, Revision, budgets, frame, plan_hash, revision};
use crate::planning::check_hosted;
use crate::routing::{Generation, RoutedPod};
use crate::testing::example::{built, deployment, environment, facts, plan, plan_of_groups};
use crate::tests::rollout::World;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use remoe_api::{MoEDeployment, MoEPlanSpec};
use remoe_planner::Budget;
use remoe_proto::parse_listing;
use remoe_proto::v1::LayerExperts;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Deployment whose vCPUs are chosen separately from memory.
fn apart() -> MoEDeployment {
    let cpu = json!({"min": 250, "max": 4000, "step": 250});
    deployment(json!({"main": {"cpu": cpu}, "remoteExperts": {"cpu": cpu}}))
}

fn argument(pod: &Pod, flag: &str) -> String {
    let arguments = pod.spec.as_ref().unwrap().containers[0].args.clone().unwrap();
    let at = arguments.iter().position(|argument| argument == flag).unwrap();
    arguments[at + 1].clone()
}

/// CPU and memory; requests and limits are the same.
fn resources(pod: &Pod) -> (String, String) {
    let resources = pod.spec.as_ref().unwrap().containers[0].resources.clone().unwrap();
    assert_eq!(resources.requests, resources.limits);
    let limits = resources.limits.unwrap();
    (limits["cpu"].0.clone(), limits["memory"].0.clone())
}

#[test]
fn a_plan_lists_groups_by_the_ids_of_layers_and_in_one_order() {
    let plan = plan_of_groups(&apart(), 2);
    let listed: Vec<(&str, u32, Option<u32>, u32)> = plan
        .groups
        .iter()
        .map(|group| (group.experts.as_str(), group.memory_mb, group.cpu_millicores, group.replicas))
        .collect();
    // The layers at positions 0 to 2 have the ids 1 to 3.
    assert_eq!(
        listed,
        [("1:0,2,4,2:0,2,4,3:0,2,4", 300, Some(750), 1), ("1:1,3,5,2:1,3,5,3:1,3,5", 300, Some(750), 2)]
    );
    assert!(plan.remote.is_empty());
    assert_eq!(plan.main.cpu_millicores, Some(1500));
    assert_eq!(plan.shown.as_ref().unwrap().remote.as_deref(), Some("2 groups"));
}

#[test]
fn each_replica_of_a_group_is_a_pod_of_its_size() {
    let owner = apart();
    let plan = plan_of_groups(&owner, 2);
    let revision = built(&owner, &plan);
    let names: Vec<(&str, u32)> =
        revision.functions().map(|function| (function.name.as_str(), function.replicas)).collect();
    assert_eq!(names, [("main", 1), ("g0", 1), ("g1", 2)]);
    let main = revision.main.pod(&owner, 0, 0);
    assert_eq!(resources(&main).0, "1500m");
    assert_eq!(argument(&main, "--threads"), "2");
    let second = revision.remote[1].pod(&owner, 1, 0);
    assert_eq!(resources(&second), ("750m".to_owned(), "300M".to_owned()));
    assert_eq!(argument(&second, "--experts"), plan.groups[1].experts);
    assert_eq!(argument(&second, "--memory-bytes"), "300000000");
    assert_eq!(argument(&second, "--threads"), "1");
    // Without separate vCPUs, they follow from memory.
    let owner = deployment(json!({}));
    let revision = built(&owner, &plan_of_groups(&owner, 2));
    assert_eq!(resources(&revision.remote[0].pod(&owner, 0, 0)).0, "300m");
}

/// Policies, Services, budgets and names apply to pods of groups like to those of layers.
#[test]
fn pods_of_groups_are_seen_as_those_of_layers() {
    let mut owner = apart();
    owner.metadata.name = Some("a-name-of-forty-characters-is-the-longes".to_owned());
    let plan = plan_of_groups(&owner, 3);
    let revision = built(&owner, &plan);
    let layered = built(&owner, &crate::testing::example::plan(&owner));
    let pods = |revision: &Revision| -> Vec<Pod> {
        let of = revision.remote.iter();
        of.flat_map(|function| (0..function.replicas).map(|replica| function.pod(&owner, replica, 0)))
            .collect()
    };
    let mut names = BTreeSet::new();
    for pod in pods(&revision).into_iter().chain(pods(&layered)) {
        assert!(pod.name_any().len() <= 63, "{}", pod.name_any());
        assert!(names.insert(pod.name_any()), "{} twice", pod.name_any());
        let selected = |selector: Option<&std::collections::BTreeMap<String, String>>| {
            selector.unwrap().iter().all(|(key, value)| pod.labels().get(key) == Some(value))
        };
        let frame = frame(&owner, &environment());
        let policies = frame.network_policies.iter().filter(|policy| {
            selected(policy.spec.as_ref().unwrap().pod_selector.as_ref().unwrap().match_labels.as_ref())
        });
        assert_eq!(policies.count(), 1);
        let services = frame
            .services
            .iter()
            .filter(|service| selected(service.spec.as_ref().unwrap().selector.as_ref()));
        assert_eq!(
            services.map(ResourceExt::name_any).collect::<Vec<_>>(),
            [format!("{}-remote", owner.name_any())]
        );
    }
    let budgets = budgets(&owner, &revision);
    assert_eq!(budgets.len(), 1, "one group has two replicas");
    assert!(budgets[0].name_any().ends_with("-g1"));
}

#[test]
fn main_functions_are_told_which_experts_each_endpoint_hosts() {
    let owner = apart();
    let plan = plan_of_groups(&owner, 2);
    let mut world = World::new(built(&owner, &plan));
    world.settle();
    world.check_settled();
    let generation = &world.table.entries[&world.target.main.identity];
    let routing = generation.routing("account".to_owned()).unwrap();
    assert_eq!(routing.account, "account");
    let set = |layer| LayerExperts { layer, experts: (0..6).collect() };
    assert_eq!(routing.remote, [1, 2, 3].map(set));
    let hosted: Vec<&Vec<LayerExperts>> =
        routing.endpoints.iter().map(|endpoint| &endpoint.experts).collect();
    let groups: Vec<_> = plan.groups.iter().map(|group| group.experts().unwrap()).collect();
    assert_eq!(hosted, [&groups[0], &groups[1], &groups[1]]);
    assert!(routing.endpoints.iter().all(|endpoint| endpoint.layers.is_empty()));
}

#[test]
fn corrupt_generation_is_not_pushed() {
    let pod = RoutedPod {
        pod: "demo-g7-0123456789-0-0".to_owned(),
        address: "10.0.0.1:9001".to_owned(),
        layers: Vec::new(),
        group: Some(usize::MAX),
    };
    let generation = |groups: Vec<String>| Generation {
        number: 1,
        plan: String::new(),
        revision: String::new(),
        remote: "1:0".to_owned(),
        endpoints: vec![pod.clone()],
        groups,
    };
    let refused = generation(vec!["1:0".to_owned()]).routing(String::new()).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("demo-g7-0123456789-0-0 is of group-18446744073709551615, number of groups: 1"),
        "{refused}"
    );
    let refused = generation(vec!["1:9999999999".to_owned()]).routing(String::new()).unwrap_err();
    assert!(refused.to_string().contains("expert listing"), "{refused}");
}

/// Returns `plan` with its groups changed.
fn corrupted(plan: &MoEPlanSpec, change: impl FnOnce(&mut Value)) -> MoEPlanSpec {
    let mut value = serde_json::to_value(plan).unwrap();
    change(&mut value["groups"]);
    serde_json::from_value(value).unwrap()
}

fn refusal(owner: &MoEDeployment, plan: &MoEPlanSpec) -> String {
    match revision(owner, &plan_hash(plan).unwrap(), plan, &environment()) {
        Err(BuildError::Experts(message)) => message,
        other => panic!("{other:?}"),
    }
}

/// Plans are read from the API, where others may write them.
#[test]
fn stored_groups_that_cannot_be_are_refused_by_name() {
    let owner = apart();
    let plan = plan_of_groups(&owner, 3);
    for (change, words) in [
        (json!([{"experts": "1:0", "replicas": 0}]), "group-0 has 0 replicas"),
        (
            json!([{"experts": "1:0", "replicas": u32::MAX}]),
            "group-0 has 4294967295 replicas, expected 1 to 64",
        ),
        (json!([{"experts": ""}]), "group-0 hosts no experts"),
        (json!([{"experts": "1:0-9999999999"}]), "expert listing"),
        (json!([{"experts": "0-3"}]), "expert listing"),
        (
            json!([{"experts": "1:0-3"}, {"experts": "2:0,1:3"}]),
            "group-1 hosts expert 3 of layer 1, which another",
        ),
    ] {
        let groups = change.as_array().unwrap().iter().map(|group| {
            let mut all = json!({"memoryMB": 300, "replicas": 1});
            all.as_object_mut().unwrap().extend(group.as_object().unwrap().clone());
            all
        });
        let groups: Vec<Value> = groups.collect();
        let message = refusal(&owner, &corrupted(&plan, |value| *value = json!(groups)));
        assert!(message.contains(words), "{message}");
    }
    let one = serde_json::to_value(&plan.groups[0]).unwrap();
    let many = corrupted(&plan, |groups| *groups = json!(vec![one; 100_000]));
    assert_eq!(refusal(&owner, &many), "expected at most 64 groups, got 100000");
    // Each one is valid, but together they exceed any model.
    let all: Vec<Value> = (0..64)
        .map(|layer: u32| json!({"experts": format!("{layer}:0-65535"), "memoryMB": 300, "replicas": 1}))
        .collect();
    let large = corrupted(&plan, |groups| *groups = json!(all));
    assert_eq!(refusal(&owner, &large), "expected at most 262144 remote experts");
    let both = MoEPlanSpec { remote: crate::testing::example::plan(&owner).remote, ..plan.clone() };
    assert!(refusal(&owner, &both).contains("layers or of groups, got both"));
    let mut layered = crate::testing::example::plan(&owner);
    layered.remote[0].replicas = u32::MAX;
    assert!(refusal(&owner, &layered).contains("layer-1 has 4294967295 replicas"));
    layered = crate::testing::example::plan(&owner);
    layered.remote[0].experts = "0,2:5".to_owned();
    assert!(refusal(&owner, &layered).contains("expected experts of layer 1 only"));
}

#[test]
fn sizes_at_their_limits_are_built_all_the_same() {
    let owner = apart();
    let plan = corrupted(&plan_of_groups(&owner, 1), |groups| {
        groups[0]["memoryMB"] = json!(u32::MAX);
        groups[0]["cpuMillicores"] = json!(u32::MAX);
        groups[0]["replicas"] = json!(64);
    });
    let revision = built(&owner, &plan);
    let pod = revision.remote[0].pod(&owner, 63, u32::MAX);
    assert_eq!(resources(&pod), ("4294967295m".to_owned(), "4294967295M".to_owned()));
    assert_eq!(argument(&pod, "--memory-bytes"), "4294967295000000");
}

#[test]
fn experts_that_the_model_does_not_have_are_named() {
    let owner = apart();
    let model = facts().inspection;
    let good = plan_of_groups(&owner, 3);
    assert_eq!(check_hosted(&good, &model), Ok(()));
    assert_eq!(check_hosted(&plan(&owner), &model), Ok(()));
    for (experts, words) in [
        ("0:1", "the model has no experts in layer 0"),
        ("1:0-7,4:0", "no experts in layer 4"),
        ("2:7-8", "layer 2 has no expert 8, expected ids below 8"),
        ("1:0-70000", "expert listing"),
    ] {
        let bad = corrupted(&good, |groups| groups[2]["experts"] = json!(experts));
        let refused = check_hosted(&bad, &model).unwrap_err();
        assert!(refused.contains(words), "{refused}");
    }
}

/// A corrupted plan does not block a new one.
#[test]
fn a_previous_plan_that_cannot_be_is_none() {
    let owner = deployment(json!({}));
    let planning = crate::testing::example::planning(&owner);
    let fresh = planning.solve(None, Budget::UNLIMITED).unwrap();
    let good = plan_of_groups(&owner, 2);
    for experts in ["9:0", "1:0-60000", "nonsense", ""] {
        let bad = corrupted(&good, |groups| groups[0]["experts"] = json!(experts));
        assert_eq!(planning.solve(Some(&bad), Budget::UNLIMITED).unwrap(), fresh, "{experts}");
    }
    assert_eq!(parse_listing("1:0").unwrap().len(), 1);
}
