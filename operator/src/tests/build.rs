use crate::SignerName;
use crate::identity::{IssuerRef, certificate, identity_of, knows_gateways};
use crate::manifests::{OperatorEnvironment, Revision, budgets, frame, inspector, revision};
use crate::names::{COMPONENT, Component, FUNCTION, PodName};
use crate::quantity::parse_amount;
use crate::testing::example::{built, deployment, environment, gateway_service, plan};
use crate::trace_collector::TraceCollector;
use k8s_openapi::api::core::v1::{Pod, Probe};
use kube::ResourceExt;
use proptest::prelude::*;
use remoe_api::{Device, MoEDeployment, MoEPlanSpec};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

fn pods(owner: &MoEDeployment) -> Vec<Pod> {
    let revision = built(owner, &plan(owner));
    let all = revision.functions().flat_map(|function| {
        (0..function.replicas).map(|replica| function.pod(owner, replica, 7)).collect::<Vec<_>>()
    });
    all.collect()
}

/// Checks a pod against the restricted pod security standard, and that it is Guaranteed.
fn check_pod(pod: &Pod) {
    let spec = pod.spec.as_ref().unwrap();
    assert_eq!(spec.automount_service_account_token, Some(false));
    let security = spec.security_context.as_ref().unwrap();
    assert_eq!(security.run_as_non_root, Some(true));
    assert_eq!(security.seccomp_profile.as_ref().unwrap().type_, "RuntimeDefault");
    assert!(spec.init_containers.is_none());
    for volume in spec.volumes.iter().flatten() {
        if let Some(folder) = &volume.empty_dir {
            assert!(folder.size_limit.is_some(), "{volume:?}");
        }
        assert!(
            volume.persistent_volume_claim.is_some() || volume.empty_dir.is_some() || volume.secret.is_some(),
            "{volume:?}"
        );
    }
    for container in &spec.containers {
        let security = container.security_context.as_ref().unwrap();
        assert_eq!(security.allow_privilege_escalation, Some(false));
        assert_eq!(security.read_only_root_filesystem, Some(true));
        assert_eq!(security.capabilities.as_ref().unwrap().drop.as_deref(), Some(&["ALL".to_owned()][..]));
        let resources = container.resources.as_ref().unwrap();
        assert_eq!(resources.requests, resources.limits);
        assert!(resources.limits.as_ref().unwrap().contains_key("cpu"));
        assert!(resources.limits.as_ref().unwrap()["memory"].0.ends_with(['M', 'G']));
    }
    let seconds = spec.tolerations.iter().flatten().filter_map(|toleration| toleration.toleration_seconds);
    // A function may still work on an unreachable node; an inspector or profiler there is replaced.
    let borne = if pod.labels().contains_key(FUNCTION) { 300 } else { 30 };
    assert_eq!(seconds.filter(|seconds| *seconds == borne).count(), 2);
}

fn spec() -> impl Strategy<Value = Value> {
    let source = prop_oneof![
        Just(json!({"source": "pvc://models/demo"})),
        Just(json!({"source": "hf://org/name", "revision": "v1", "cacheClaimName": "cache"})),
        Just(
            json!({"source": "s3://bucket/x", "endpoint": "http://minio:9000", "credentialsSecretName": "s3"})
        ),
    ];
    (source, 1_u32..4, 1_u32..5, prop_oneof![Just("Always"), Just("Never"), Just("Auto")]).prop_map(
        |(model, replicas, most, mode)| {
            json!({
                "model": model,
                "replicas": replicas,
                "remoteExperts": {"mode": mode, "maxReplicas": most},
            })
        },
    )
}

proptest! {
    #[test]
    fn every_pod_is_restricted_guaranteed_and_named_for_its_place(spec in spec()) {
        let owner = deployment(spec);
        let pods = pods(&owner);
        let names: BTreeSet<String> = pods.iter().map(ResourceExt::name_any).collect();
        prop_assert_eq!(names.len(), pods.len());
        for pod in pods.iter().chain([&inspector(&owner, "0123456789", 0, &environment()).unwrap()]) {
            check_pod(pod);
            prop_assert!(pod.name_any().len() <= 63);
            prop_assert!(PodName::parse(&pod.name_any()).is_some());
            let reference = &pod.owner_references()[0];
            prop_assert_eq!((reference.controller, reference.uid.as_str()), (Some(true), "uid-1"));
            for value in pod.labels().values() {
                prop_assert!(value.len() <= 63);
            }
        }
    }

    #[test]
    fn the_same_values_give_the_same_objects(spec in spec()) {
        let owner = deployment(spec);
        prop_assert_eq!(pods(&owner), pods(&owner));
        prop_assert_eq!(frame(&owner, &environment()), frame(&owner, &environment()));
    }

    #[test]
    fn every_function_of_several_replicas_keeps_all_but_one(spec in spec()) {
        let owner = deployment(spec);
        let revision = built(&owner, &plan(&owner));
        let budgets = budgets(&owner, &revision);
        let several: Vec<_> = revision.functions().filter(|function| function.replicas > 1).collect();
        prop_assert_eq!(budgets.len(), several.len());
        for (budget, function) in budgets.iter().zip(several) {
            let spec = budget.spec.as_ref().unwrap();
            let value = serde_json::to_value(spec.min_available.as_ref().unwrap()).unwrap();
            prop_assert_eq!(value, json!(function.replicas - 1));
            // It selects only the function's pods.
            let selector = spec.selector.as_ref().unwrap().match_labels.as_ref().unwrap();
            for other in revision.functions() {
                let pod = other.pod(&owner, 0, 0);
                let selected = selector.iter().all(|(key, value)| pod.labels().get(key) == Some(value));
                prop_assert_eq!(selected, other.name == function.name);
            }
        }
    }
}

fn arguments(pod: &Pod) -> Vec<String> {
    pod.spec.as_ref().unwrap().containers[0].args.clone().unwrap()
}

#[test]
fn functions_read_a_claim_where_it_is_mounted() {
    let owner = deployment(json!({"model": {"source": "pvc://models/a/b/"}}));
    for pod in pods(&owner) {
        assert_eq!(arguments(&pod)[..2], ["--model", "/models/a/b"]);
        let spec = pod.spec.unwrap();
        let volume = spec.volumes.unwrap().remove(0).persistent_volume_claim.unwrap();
        assert_eq!((volume.claim_name.as_str(), volume.read_only), ("models", Some(true)));
        assert_eq!(spec.containers[0].volume_mounts.as_ref().unwrap()[0].read_only, Some(true));
    }
}

#[test]
fn fetching_functions_have_a_cache_credentials_and_a_way_out() {
    let model = json!({
        "source": "s3://bucket/x", "endpoint": "http://minio:9000",
        "credentialsSecretName": "s3", "cacheClaimName": "weights",
    });
    let owner = deployment(json!({"model": model}));
    for pod in pods(&owner) {
        let told = ["--model", "s3://bucket/x", "--model-cache", "/cache", "--allow-source", "*"];
        assert_eq!(arguments(&pod)[..6], told);
        let container = &pod.spec.as_ref().unwrap().containers[0];
        assert_eq!(container.env.as_ref().unwrap()[0].value.as_deref(), Some("http://minio:9000"));
        assert_eq!(container.env_from.as_ref().unwrap()[0].secret_ref.as_ref().unwrap().name, "s3");
    }
    let opened = |owner: &MoEDeployment| {
        let policies = frame(owner, &environment()).network_policies.into_iter();
        policies
            .filter(|policy| {
                policy.spec.as_ref().unwrap().egress.iter().flatten().any(|rule| rule.to.is_none())
            })
            .count()
    };
    assert_eq!(opened(&owner), 4);
    assert_eq!(opened(&deployment(json!({}))), 0);
}

#[test]
fn cpu_main_container_reserves_non_expert_weights() {
    let owner = deployment(json!({}));
    let plan = plan(&owner);
    assert!(plan.main.limit_mb > plan.main.memory_mb);
    let main = built(&owner, &plan).main.pod(&owner, 0, 0);
    let resources = main.spec.unwrap().containers[0].resources.clone().unwrap().limits.unwrap();
    assert_eq!(resources["memory"].0, format!("{}M", plan.main.limit_mb));
    assert_eq!(resources["cpu"].0, format!("{}m", plan.main.memory_mb));
}

/// Returns the drain flag and the grace period of the main function for this workload.
fn ending(owner: &MoEDeployment, tpot_seconds: f64) -> (String, u32, i64) {
    let mut plan = plan(owner);
    plan.numbers.times.prefill_seconds = 2.0;
    plan.numbers.times.tpot_seconds = tpot_seconds;
    let main = built(owner, &plan).main;
    let pod = main.pod(owner, 0, 0);
    let arguments = arguments(&pod);
    let flag = arguments.iter().position(|argument| argument == "--drain-seconds").unwrap();
    let grace = pod.spec.unwrap().termination_grace_period_seconds.unwrap();
    (main.identity, arguments[flag + 1].parse().unwrap(), grace)
}

#[test]
fn a_main_function_has_the_time_of_the_longest_answer_to_end() {
    let workload = json!({
        "maxInputTokens": 200, "maxOutputTokens": 800, "typicalInputTokens": 100, "typicalOutputTokens": 100,
    });
    let owner = deployment(json!({ "workload": workload }));
    let (identity, drain, grace) = ending(&owner, 0.15);
    // Twice (two seconds per hundred tokens of the prompt, and 0.15 s per token of the answer).
    assert_eq!(drain, 2 * (2 * 2 + 120));
    // The pre-stop hook before, and the exit time after it.
    assert_eq!(grace, i64::from(drain) + 15);
    // Another expected speed does not replace a pod.
    for (tpot, expected) in [(1e-6, 30), (100.0, 1800), (f64::MAX, 1800), (-1.0, 30)] {
        let (other, drain, grace) = ending(&owner, tpot);
        assert_eq!((&other, drain, grace), (&identity, expected, i64::from(expected) + 15), "{tpot}");
    }
    // A hung container gets a shorter grace period.
    for pod in pods(&owner) {
        let spec = pod.spec.unwrap();
        for probe in [&spec.containers[0].startup_probe, &spec.containers[0].liveness_probe] {
            assert_eq!(probe.as_ref().unwrap().termination_grace_period_seconds, Some(10));
        }
    }
}

#[test]
fn a_restart_changes_every_identity_and_a_price_changes_none() {
    let identities = |owner: &MoEDeployment| -> Vec<String> {
        let revision = built(owner, &plan(owner));
        revision.functions().map(|function| function.identity.clone()).collect()
    };
    let owner = deployment(json!({}));
    let mut restarted = owner.clone();
    restarted.annotations_mut().insert("remoe.dev/restartedAt".to_owned(), "now".to_owned());
    assert!(identities(&owner).iter().zip(identities(&restarted)).all(|(old, new)| *old != new));
    let dearer = deployment(json!({"pricing": {"memoryGBHour": "0.0041"}}));
    assert_eq!(identities(&owner), identities(&dearer));
    assert_ne!(plan(&owner), plan(&dearer));
}

#[test]
fn probes_have_a_port_that_clients_cannot_reach() {
    let owner = deployment(json!({}));
    for pod in pods(&owner) {
        assert_eq!(following(&pod, "--health-listen"), "[::]:8081");
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let port = container.ports.iter().flatten().find(|port| port.name.as_deref() == Some("health"));
        assert_eq!(port.unwrap().container_port, 8081);
        for (probe, path) in [
            (&container.startup_probe, "/healthz"),
            (&container.liveness_probe, "/healthz"),
            (&container.readiness_probe, "/readyz"),
        ] {
            let get = serde_json::to_value(probe.as_ref().unwrap().http_get.as_ref().unwrap()).unwrap();
            assert_eq!(get, json!({"path": path, "port": "health"}));
        }
    }
    for policy in frame(&owner, &environment()).network_policies {
        for rule in policy.spec.unwrap().ingress.unwrap_or_default() {
            let opened = serde_json::to_string(&rule.ports).unwrap();
            let from = serde_json::to_string(&rule.from).unwrap();
            assert!(!opened.contains("8081") || from.contains("operator"), "{opened} to {from}");
        }
    }
}

/// A process that lost its GPU is unready within seconds, and its node starts it again where it was.
#[test]
fn gpu_main_function_that_ends_is_restarted_in_place() {
    let owner = deployment(json!({
        "main": {"device": "cuda", "gpu": {"count": 1}},
        "pricing": {"gpuHour": "2.50", "gpuMemoryMB": 16_000},
    }));
    let plan = MoEPlanSpec { device: Device::Cuda, ..plan(&deployment(json!({}))) };
    let pod = built(&owner, &plan).main.pod(&owner, 0, 0);
    let spec = pod.spec.as_ref().unwrap();
    assert_eq!(spec.restart_policy.as_deref(), Some("Always"));
    assert_eq!(following(&pod, "--device"), "cuda");
    let container = &spec.containers[0];
    let limits = container.resources.as_ref().unwrap().limits.as_ref().unwrap();
    assert_eq!(limits["nvidia.com/gpu"].0, "1");
    let seconds = |probe: &Option<Probe>| {
        let probe = probe.as_ref().unwrap();
        probe.period_seconds.unwrap() * probe.failure_threshold.unwrap()
    };
    assert!(seconds(&container.readiness_probe) <= 2, "requests are kept away before the process ends");
    // A process that neither answers nor ends is ended.
    assert!(seconds(&container.liveness_probe) <= 30);
    assert!(container.liveness_probe.as_ref().unwrap().termination_grace_period_seconds <= Some(10));
}

/// Returns the argument after `flag` among the arguments of the pod's program.
fn following(pod: &Pod, flag: &str) -> String {
    let arguments = arguments(pod);
    let at = arguments.iter().position(|argument| argument == flag).unwrap_or_else(|| panic!("{flag}"));
    arguments[at + 1].clone()
}

#[test]
fn only_the_operator_and_the_gateways_of_the_release_are_let_in() {
    let owner = deployment(json!({}));
    let environment = OperatorEnvironment {
        release: "one".to_owned(),
        gateway: Some(gateway_service("gateway.system.svc")),
        ..environment()
    };
    let policies = frame(&owner, &environment).network_policies;
    let main = policies.iter().find(|policy| policy.name_any() == "demo-main").unwrap();
    let monitoring =
        json!([{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]);
    for policy in ["demo-main", "demo-remote-expert"] {
        let policy = policies.iter().find(|each| each.name_any() == policy).unwrap();
        let rules = serde_json::to_value(&policy.spec.as_ref().unwrap().ingress).unwrap();
        let scraped: Vec<_> =
            rules.as_array().unwrap().iter().filter(|rule| rule["from"] == monitoring).collect();
        assert_eq!(scraped, [&json!({"from": monitoring, "ports": [{"port": 9090, "protocol": "TCP"}]})]);
    }
    let rules = main.spec.as_ref().unwrap().ingress.iter().flatten();
    let peers =
        rules.flat_map(|rule| rule.from.iter().flatten()).filter_map(|peer| peer.pod_selector.as_ref());
    let labels: Vec<_> = peers.filter_map(|selector| selector.match_labels.as_ref()).collect();
    let components: Vec<_> = labels.iter().map(|labels| labels[COMPONENT].as_str()).collect();
    assert_eq!(components, ["gateway", "operator"]);
    assert!(labels.iter().all(|labels| labels["app.kubernetes.io/instance"] == "one"), "{labels:?}");
}

#[test]
fn no_signer_has_the_secrets_of_another() {
    let owner = deployment(json!({}));
    let secrets = |signer| {
        let environment = OperatorEnvironment { signer, ..environment() };
        let revision = revision(&owner, "hash", &plan(&owner), &environment).unwrap();
        let pods = revision.functions().map(|function| function.pod(&owner, 0, 0));
        let volumes = pods.flat_map(|pod| pod.spec.unwrap().volumes.unwrap_or_default());
        volumes.filter_map(|volume| volume.secret?.secret_name).collect::<BTreeSet<_>>()
    };
    let (signed, issued) = (secrets(SignerName::Operator), secrets(SignerName::CertManager));
    assert_eq!((signed.len(), issued.len()), (2, 2));
    assert!(signed.is_disjoint(&issued), "{signed:?} {issued:?}");
    let asked = IssuerRef { name: "ca".to_owned(), kind: "Issuer".to_owned() };
    for part in [Component::Main, Component::RemoteExpert] {
        let asked = certificate(&owner, part, &identity_of(&owner, part), &asked, Duration::from_secs(60));
        assert!(issued.contains(&asked.name_any()));
    }
}

#[test]
fn all_functions_are_told_what_experts_are_quantised_to() {
    let owner = deployment(json!({"model": {"source": "pvc://models", "expertsDtype": "int4"}}));
    for pod in pods(&owner) {
        assert_eq!(following(&pod, "--experts-dtype"), "int4");
    }
    for pod in pods(&deployment(json!({}))) {
        assert!(!arguments(&pod).contains(&"--experts-dtype".to_owned()));
    }
}

#[test]
fn main_functions_are_told_what_the_rest_is_kept_as() {
    let owner = deployment(json!({"model": {"source": "pvc://models", "denseDtype": "int4"}}));
    for pod in pods(&owner) {
        match pod.labels()[COMPONENT].as_str() {
            "main" => assert_eq!(following(&pod, "--dense-dtype"), "int4"),
            _ => assert!(!arguments(&pod).contains(&"--dense-dtype".to_owned())),
        }
    }
    for pod in pods(&deployment(json!({}))) {
        assert!(!arguments(&pod).contains(&"--dense-dtype".to_owned()));
    }
    for pod in pods(&deployment(json!({"model": {"source": "pvc://models", "kvCacheDtype": "int8"}}))) {
        match pod.labels()[COMPONENT].as_str() {
            "main" => assert_eq!(following(&pod, "--kv-cache-dtype"), "int8"),
            _ => assert!(!arguments(&pod).contains(&"--kv-cache-dtype".to_owned())),
        }
    }
}

#[test]
fn main_functions_are_told_how_many_positions_they_serve() {
    let owner = deployment(json!({"model": {"source": "pvc://models", "maxModelLen": 700}}));
    for pod in pods(&owner) {
        match pod.labels()[COMPONENT].as_str() {
            "main" => assert_eq!(following(&pod, "--max-model-len"), "700"),
            // Positions do not affect remote functions.
            _ => assert!(!arguments(&pod).contains(&"--max-model-len".to_owned())),
        }
    }
    for pod in pods(&deployment(json!({}))) {
        assert!(!arguments(&pod).contains(&"--max-model-len".to_owned()));
    }
}

#[test]
fn main_functions_get_variables_of_the_chat_template() {
    let variables = json!({"enable_thinking": false});
    let owner = deployment(json!({"model": {"source": "pvc://models", "chatTemplateKwargs": variables}}));
    for pod in pods(&owner) {
        match pod.labels()[COMPONENT].as_str() {
            "main" => assert_eq!(following(&pod, "--chat-template-kwargs"), variables.to_string()),
            _ => assert!(!arguments(&pod).contains(&"--chat-template-kwargs".to_owned())),
        }
    }
}

#[test]
fn functions_of_one_part_have_the_certificate_of_no_other() {
    let owner = deployment(json!({}));
    for pod in pods(&owner) {
        let part = pod.labels()[COMPONENT].as_str();
        let spec = pod.spec.as_ref().unwrap();
        let secrets: Vec<&str> = spec
            .volumes
            .iter()
            .flatten()
            .filter_map(|volume| volume.secret.as_ref()?.secret_name.as_deref())
            .collect();
        assert_eq!(secrets, [format!("demo-{part}-identity")]);
        let mounts = spec.containers[0].volume_mounts.iter().flatten();
        let mount = mounts.clone().find(|mount| mount.name == "identity").unwrap();
        assert_eq!((mount.mount_path.as_str(), mount.read_only), ("/identity", Some(true)));
        assert_eq!(following(&pod, "--identity-dir"), "/identity");
        if part == "main" {
            assert_eq!(following(&pod, "--operator-identity"), "spiffe://remoe/remoe-system/operator");
        }
    }
    let open = OperatorEnvironment { signer: SignerName::Unsigned, ..environment() };
    let revision = revision(&owner, "hash", &plan(&owner), &open).unwrap();
    for pod in revision.functions().map(|function| function.pod(&owner, 0, 0)) {
        let text = serde_json::to_string(&pod).unwrap();
        assert!(!text.contains("identity-dir") && !text.contains("operator-identity"), "{text}");
    }
}

#[test]
fn main_functions_trust_gateways_if_present_and_signed() {
    let owner = deployment(json!({}));
    let gateway = Some(gateway_service("gateway.system.svc"));
    for (gateway, signer, uncertified_gateways, knows) in [
        (gateway.clone(), SignerName::Operator, false, true),
        (gateway.clone(), SignerName::CertManager, false, true),
        // Gateways of an older version would be rejected by all new main functions, while the old ones end.
        (gateway.clone(), SignerName::Operator, true, false),
        (gateway, SignerName::Unsigned, false, false),
        (None, SignerName::Operator, false, false),
    ] {
        let environment = OperatorEnvironment { gateway, signer, uncertified_gateways, ..environment() };
        let revision = revision(&owner, "hash", &plan(&owner), &environment).unwrap();
        for pod in revision.functions().map(|function| function.pod(&owner, 0, 0)) {
            let knows = knows && pod.labels()[COMPONENT] == "main";
            assert_eq!(knows_gateways(&pod), knows, "{environment:?}");
            if knows {
                assert_eq!(following(&pod, "--gateway-identity"), "spiffe://remoe/remoe-system/gateway");
            }
        }
    }
}

#[test]
fn functions_export_traces_where_there_is_a_collector() {
    let trace_collector = |endpoint: &str| {
        Some(TraceCollector::new(endpoint.parse().unwrap(), "0.25".parse().unwrap(), None).unwrap())
    };
    let traced = OperatorEnvironment {
        trace_collector: trace_collector("http://otel.monitoring:4317"),
        ..environment()
    };
    let owner = deployment(json!({}));
    let built_in =
        |environment: &OperatorEnvironment| revision(&owner, "hash", &plan(&owner), environment).unwrap();
    let (plain, with) = (built_in(&environment()), built_in(&traced));
    let pod = with.main.pod(&owner, 0, 0);
    let variables = pod.spec.unwrap().containers[0].env.clone().unwrap();
    let value = |name: &str| {
        let found = variables.iter().find(|variable| variable.name == name);
        found.unwrap_or_else(|| panic!("{name}")).value.clone().unwrap_or_default()
    };
    assert_eq!(value("OTEL_EXPORTER_OTLP_ENDPOINT"), "http://otel.monitoring:4317");
    assert_eq!(value("OTEL_TRACES_SAMPLER_ARG"), "0.25");
    assert!(value("OTEL_RESOURCE_ATTRIBUTES").ends_with(",remoe.deployment=demo"));
    let at = |name: &str| variables.iter().position(|variable| variable.name == name).unwrap();
    assert!(at("POD_NAME") < at("OTEL_RESOURCE_ATTRIBUTES"), "what stands behind is not put in");
    for function in with.functions() {
        let text = serde_json::to_string(&function.pod(&owner, 0, 0)).unwrap();
        assert!(text.contains("http://otel.monitoring:4317"), "{text}");
    }
    // Without a collector no pod is replaced.
    let identities = |revision: &Revision| {
        revision.functions().map(|function| function.identity.clone()).collect::<Vec<_>>()
    };
    let (plain, with) = (identities(&plain), identities(&with));
    assert!(plain.iter().zip(&with).all(|(plain, with)| plain != with));
    assert_eq!(plain, identities(&built(&owner, &plan(&owner))));

    let opened = |source: &str, environment: &OperatorEnvironment| {
        let owner = deployment(json!({"model": {"source": source}}));
        let policies = frame(&owner, environment).network_policies;
        let ports = |name: &str| {
            let policy = policies.iter().find(|policy| policy.name_any() == name).unwrap();
            let rules = policy.spec.clone().unwrap().egress.unwrap_or_default();
            serde_json::to_value(rules).unwrap()
        };
        (ports("demo-main"), ports("demo-remote-expert"))
    };
    let port = |port: u16, protocol: &str| json!({"port": port, "protocol": protocol});
    let (experts, nothing) = opened("pvc://models", &environment());
    assert_eq!((experts.as_array().unwrap().len(), &nothing), (1, &json!([])));
    let with = |rules: &[Value]| (json!([std::slice::from_ref(&experts[0]), rules].concat()), json!(rules));
    let namespace = json!({"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}});
    let existing = json!({"to": [{"namespaceSelector": namespace}], "ports": [port(4317, "TCP")]});
    let names = json!({"ports": [port(53, "UDP"), port(53, "TCP")]});
    assert_eq!(opened("pvc://models", &traced), with(&[existing, names]));
    let by_address =
        OperatorEnvironment { trace_collector: trace_collector("http://10.1.2.3:4317"), ..environment() };
    let existing = json!({"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "ports": [port(4317, "TCP")]});
    assert_eq!(opened("pvc://models", &by_address), with(&[existing]));
    let (fetching, _) = opened("hf://one/two", &traced);
    assert!(
        fetching
            .as_array()
            .unwrap()
            .contains(&json!({"to": [{"namespaceSelector": namespace}], "ports": [port(4317, "TCP")]}))
    );
}

/// Limits of the volumes of a main function whose model is fetched, as quantities.
fn disk(model: serde_json::Map<String, Value>) -> BTreeMap<String, f64> {
    let mut model = Value::Object(model);
    model["source"] = json!("hf://org/name");
    let owner = deployment(json!({ "model": model }));
    let main = built(&owner, &plan(&owner)).main.pod(&owner, 0, 0);
    let volumes = main.spec.unwrap().volumes.unwrap().into_iter();
    let limited = volumes.filter_map(|volume| Some((volume.name, volume.empty_dir?.size_limit?)));
    limited.map(|(name, limit)| (name, parse_amount(&limit).unwrap())).collect()
}

#[test]
fn caches_have_room_for_the_checkpoint_and_a_limit() {
    let owner = deployment(json!({}));
    let plan = plan(&owner);
    let remote = plan.remote.iter().map(|remote| remote.memory_mb);
    let groups = plan.groups.iter().map(|group| group.memory_mb);
    let memory = remote.chain(groups).chain([plan.main.limit_mb]).map(f64::from).sum::<f64>() * 1e6;
    let limits = disk(serde_json::Map::new());
    assert_eq!(limits["tmp"], 1e9);
    // The example is bfloat16: float32 at most in the checkpoint.
    assert_eq!(limits["cache"], 2.0 * memory + 2e9);
    // Quantised weights take less memory than storage.
    let quantised = disk([("expertsDtype".to_owned(), json!("int4"))].into_iter().collect());
    assert!(quantised["cache"] > 2e9 && quantised["cache"] < 1e15);
    let claimed = disk([("cacheClaimName".to_owned(), json!("weights"))].into_iter().collect());
    assert_eq!(claimed.into_keys().collect::<Vec<_>>(), ["tmp"]);
}

#[test]
fn limits_of_disks_are_no_part_of_an_identity() {
    let owner = deployment(json!({"model": {"source": "hf://org/name"}}));
    let (small, mut large) = (plan(&owner), plan(&owner));
    large.groups.iter_mut().for_each(|group| group.memory_mb += 100);
    large.remote.iter_mut().for_each(|remote| remote.memory_mb += 100);
    let main = |plan| built(&owner, plan).main;
    assert_eq!(main(&small).identity, main(&large).identity);
    assert_ne!(main(&small).pod(&owner, 0, 0).spec, main(&large).pod(&owner, 0, 0).spec);
}
