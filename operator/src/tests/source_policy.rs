use crate::manifests::{OperatorEnvironment, frame};
use crate::plan::PlanState;
use crate::source_policy::{SourcePolicy, SourceRefusal};
use crate::testing::example::{deployment, environment};
use crate::testing::world::World;
use crate::write::Write;
use ipnet::IpNet;
use k8s_openapi::api::networking::v1::NetworkPolicyEgressRule;
use kube::ResourceExt;
use remoe_api::{ConditionType, MoEDeployment};
use serde_json::{Value, json};
use std::net::IpAddr;

fn sources(rules: &[&str], ambient_credentials: bool) -> SourcePolicy {
    let rules: Vec<_> = rules.iter().map(|rule| rule.parse().unwrap()).collect();
    SourcePolicy::new(&rules, ambient_credentials)
}

fn checked(sources: &SourcePolicy, model: Value) -> Result<(), SourceRefusal> {
    sources.check_spec(&deployment(json!({ "model": model })).spec.model)
}

fn hub() -> Value {
    json!({"model": {"source": "hf://org/name"}})
}

#[test]
fn source_outside_the_list_gets_a_condition_and_no_pod() {
    let mut world = World::new(hub());
    world.environment.sources = sources(&["*.example", "10.1.2.0/24"], false);
    for _ in 0..3 {
        let (planned, steps, status) = world.look_and_state();
        assert!(matches!(planned.state, PlanState::Refused(_)), "{:?}", planned.state);
        assert!(!steps.writes.iter().any(|write| matches!(write, Write::Create(_))));
        let planned = status.condition(ConditionType::Planned).unwrap();
        assert_eq!(planned.reason, "SourceNotAllowed");
        for part in ["spec.model.source", "huggingface.co", "*.example,10.1.2.0/24", "sources.allowed"] {
            assert!(planned.message.contains(part), "{}", planned.message);
        }
        world.write(&steps, usize::MAX);
    }
    assert!(world.observed.pods.is_empty());
    world.environment.sources = sources(&["huggingface.co"], false);
    world.settle();
    assert!(!world.observed.pods.is_empty());
}

#[test]
fn functions_stay_when_their_source_leaves_the_list() {
    let mut world = World::new(hub());
    world.settle();
    let before: Vec<String> = world.observed.pods.iter().map(ResourceExt::name_any).collect();
    world.environment.sources = sources(&["*.example"], false);
    let (planned, steps, status) = world.look_and_state();
    assert!(planned.target.is_none());
    let touches = |write: &Write| matches!(write, Write::Create(_) | Write::Delete(_));
    assert!(!steps.writes.iter().any(touches), "{:?}", steps.writes);
    let degraded = status.condition(ConditionType::Degraded).unwrap();
    assert_eq!(degraded.reason, "SourceNotAllowed");
    assert!(!before.is_empty());
}

#[test]
fn hosts_of_sources_and_endpoints_are_checked() {
    let listed = sources(&["huggingface.co", "minio.store.svc:9000", "*.example", "10.1.2.3/32"], false);
    let s3 = |endpoint: &str| json!({"source": "s3://bucket/x", "endpoint": endpoint});
    let hub = |endpoint: &str| json!({"source": "hf://o/n", "endpoint": endpoint});
    for model in [
        json!({"source": "pvc://models/demo"}),
        json!({"source": "hf://o/n"}),
        json!({"source": "https://models.example/x"}),
        s3("http://minio.store.svc:9000"),
        s3("http://10.1.2.3:9000"),
        hub("https://mirror.example"),
    ] {
        assert_eq!(checked(&listed, model.clone()), Ok(()), "{model}");
    }
    for model in [
        json!({"source": "s3://bucket/x"}),
        json!({"source": "https://elsewhere.test/x"}),
        json!({"source": "https://models.example@elsewhere.test/x"}),
        json!({"source": "https://:443/x"}),
        s3("http://minio.store.svc:9001"),
        s3("http://169.254.169.254"),
        hub("http://[::ffff:10.1.2.4]"),
    ] {
        let refusal = checked(&listed, model.clone()).unwrap_err();
        assert_eq!(refusal.reason(), "SourceNotAllowed", "{model}");
    }
    // Without a list, pods check names, and the policy blocks addresses.
    let any = sources(&["*"], false);
    assert_eq!(checked(&any, s3("http://minio.store.svc:9000")), Ok(()));
    assert_eq!(checked(&any, json!({"source": "s3://bucket/x"})), Ok(()));
    for endpoint in ["http://10.1.2.3:9000", "http://127.0.0.1", "http://2852039166", "http://[fe80::1]"] {
        assert!(checked(&any, s3(endpoint)).is_err(), "{endpoint}");
    }
    assert_eq!(checked(&sources(&["*.amazonaws.com"], false), json!({"source": "s3://bucket/x"})), Ok(()));
}

#[test]
fn ambient_credentials_take_spec_and_cluster() {
    let asked = json!({"source": "s3://bucket/x", "ambientCredentials": true});
    let refusal = checked(&sources(&["*"], false), asked.clone()).unwrap_err();
    assert_eq!((refusal.clone(), refusal.reason()), (SourceRefusal::AmbientCredentials, "SourceNotAllowed"));
    assert_eq!(checked(&sources(&["*"], true), asked.clone()), Ok(()));
    let told = |model: &Value, ambient| {
        let mut world = World::new(json!({ "model": model }));
        world.environment.sources = sources(&["*"], ambient);
        world.settle();
        let all = world
            .observed
            .pods
            .iter()
            .map(|pod| pod.spec.clone().unwrap().containers.remove(0).args.unwrap());
        all.map(|arguments| arguments.iter().any(|argument| argument == "--ambient-credentials"))
            .collect::<Vec<_>>()
    };
    let pods = told(&asked, true);
    assert!(!pods.is_empty() && pods.iter().all(|told| *told));
    assert!(told(&json!({"source": "s3://bucket/x"}), true).iter().all(|told| !told));
}

/// Returns whether a rule allows `address` at `port`.
fn lets(rules: &[NetworkPolicyEgressRule], address: &str, port: i32) -> bool {
    let address: IpAddr = address.parse().unwrap();
    let holds = |range: &String| range.parse::<IpNet>().unwrap().contains(&address);
    rules.iter().any(|rule| {
        let ports: Vec<_> = rule.ports.iter().flatten().filter_map(|port| port.port.clone()).collect();
        let is_port =
            ports.is_empty() || ports.iter().any(|it| serde_json::to_value(it).unwrap() == json!(port));
        let peers = rule.to.as_deref().unwrap_or_default();
        let blocks = peers.iter().filter_map(|peer| peer.ip_block.as_ref());
        let is_there =
            blocks.into_iter().any(|block| holds(&block.cidr) && !block.except.iter().flatten().any(holds));
        is_port && (rule.to.is_none() || is_there)
    })
}

fn egress(owner: &MoEDeployment, environment: &OperatorEnvironment) -> Vec<Vec<NetworkPolicyEgressRule>> {
    let policies = frame(owner, environment).network_policies.into_iter();
    policies.map(|policy| policy.spec.unwrap().egress.unwrap_or_default()).collect()
}

#[test]
fn policies_of_pods_that_fetch_leave_out_private_addresses() {
    let fetching = deployment(json!({"model": {"source": "s3://bucket/x", "ambientCredentials": true}}));
    let with = |sources| OperatorEnvironment { sources, ..environment() };
    let plain = with(sources(&["*"], false));
    let listed = with(sources(&["*", "10.43.7.0/24", "!10.43.7.9/32", "!52.0.0.0/8"], true));
    for rules in egress(&fetching, &plain) {
        for address in ["8.8.8.8", "2606:4700::1", "52.1.2.3"] {
            assert!(lets(&rules, address, 443), "{address}");
        }
        for address in
            ["169.254.169.254", "10.43.7.7", "10.96.0.1", "127.0.0.1", "192.168.0.1", "fd00::1", "fe80::1"]
        {
            assert!(!lets(&rules, address, 80), "{address}");
        }
        assert!(lets(&rules, "10.96.0.10", 53));
    }
    for rules in egress(&fetching, &listed) {
        assert!(lets(&rules, "10.43.7.7", 9000) && lets(&rules, "169.254.169.254", 80));
        for (address, port) in
            [("10.43.7.9", 9000), ("52.1.2.3", 443), ("10.43.8.1", 80), ("169.254.169.254", 443)]
        {
            assert!(!lets(&rules, address, port), "{address}");
        }
    }
    // Pods that do not fetch have no egress, whatever is listed.
    for rules in egress(&deployment(json!({})), &listed) {
        assert!(
            !lets(&rules, "8.8.8.8", 443) && !lets(&rules, "10.43.7.7", 9000) && !lets(&rules, "8.8.8.8", 53)
        );
    }
}
