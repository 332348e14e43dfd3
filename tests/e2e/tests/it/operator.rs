//! Rights of the operator's account, and kills of the operator.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use remoe_e2e::cluster::Cluster;
use remoe_e2e::deployment::{CompletionStream, Deployment};
use remoe_e2e::host_operator::{HostOperator, image, kubeconfig};
use remoe_e2e::scene::Scene;
use remoe_e2e::{audit, claim, figures, pods, release, tool};
use remoe_test_support::deadline::{LONG, until};
use serde_json::{Value, json};

/// Requests without a rule in the chart's role are denied, and the tests detect denials.
#[tokio::test(flavor = "multi_thread")]
async fn operator_account_reads_no_secret_and_no_claim() {
    Scene::run("operator_account_reads_no_secret_and_no_claim", async |scene| {
        let cluster = &scene.cluster;
        let mut alone = release::exclusive(cluster, 0).await;
        // Certificates are created only in namespaces that the chart lists.
        alone.install(cluster, &["replicas=0", "identity.signer=operator"]).await;
        let as_operator = kubeconfig(cluster, None).await;
        let kubectl = cluster.tool("kubectl");
        let start = audit::position(cluster);
        // ConfigMaps are read one by one, and never written.
        for kind in ["secrets", "persistentvolumeclaims", "nodes", "configmaps"] {
            let arguments = ["get", kind, "--namespace", &scene.namespace];
            let refused = tool::attempt(&kubectl, as_operator.path(), &arguments).await.expect_err(kind);
            assert!(refused.contains("forbidden"), "{refused}");
        }
        for (verb, object) in [("annotate", "configmap"), ("delete", "configmap")] {
            let mut arguments = vec![verb, object, "kube-root-ca.crt", "--namespace", &scene.namespace];
            arguments.extend((verb == "annotate").then_some("a=b"));
            let refused = tool::attempt(&kubectl, as_operator.path(), &arguments).await.expect_err(verb);
            assert!(refused.contains("forbidden"), "{refused}");
        }
        let allowed = ["get", "pods,moerecords,moedeployments", "--namespace", &scene.namespace];
        tool::run(&kubectl, as_operator.path(), &allowed).await;
        let asked =
            audit::entries_since(cluster, start).into_iter().filter(|each| each.user() == release::ACCOUNT);
        let (denied, granted): (Vec<_>, Vec<_>) = asked.partition(audit::AuditEntry::denied);
        let kinds = |requests: &[audit::AuditEntry]| -> Vec<String> {
            requests
                .iter()
                .map(audit::AuditEntry::resource)
                .filter(|kind| !kind.is_empty())
                .map(str::to_owned)
                .collect()
        };
        let maps = ["configmaps"; 3];
        assert_eq!(kinds(&denied), [&["secrets", "persistentvolumeclaims", "nodes"][..], &maps].concat());
        for kind in ["pods", "moerecords", "moedeployments"] {
            assert!(kinds(&granted).iter().any(|each| each == kind), "{kind}: {granted:?}");
        }
    })
    .await;
}

/// Killed at any time, it continues from the objects that it left.
#[tokio::test(flavor = "multi_thread")]
async fn operator_runs_beside_the_cluster() {
    Scene::run("operator_runs_beside_the_cluster", async |scene| {
        let cluster = &scene.cluster;
        let alone = release::exclusive(cluster, 0).await;
        let start = audit::position(cluster);
        for _life in 0..2 {
            let operator = HostOperator::start(cluster, &alone, None).await;
            drop(operator);
        }
        let asked = audit::entries_since(cluster, start);
        assert!(
            asked.iter().any(|each| each.user() == release::ACCOUNT && each.resource() == "moedeployments")
        );
    })
    .await;
}

/// Returns the spec of the demo model, with remote experts or all experts in the main function.
fn demo(experts: &str) -> Value {
    json!({
        "model": {"source": "pvc://models/demo"},
        "profile": figures::reference(),
        "main": {"memoryMB": {"min": 200, "max": 4000}},
        "remoteExperts": {"mode": experts, "memoryMB": {"min": 100, "max": 1000}, "maxReplicas": 1},
    })
}

/// A deployment that is deleted in either way during repeated kills of the operator leaves nothing.
#[tokio::test(flavor = "multi_thread")]
async fn deleted_deployment_goes_despite_operator_kills() {
    Scene::run("deleted_deployment_goes_despite_operator_kills", async |scene| {
        let cluster = &scene.cluster;
        let alone = release::exclusive(cluster, 0).await;
        claim::with_demo_model(scene, "models").await;
        for deletion in [DeleteParams::foreground(), DeleteParams::background()] {
            let operator = HostOperator::start(cluster, &alone, None).await;
            let deployment = Deployment::apply(scene, "demo", &demo("Always")).await;
            deployment.wait_until_settled().await;
            let functions = pods::list(scene, pods::FUNCTIONS).await.len();
            deployment.api.delete("demo", &deletion).await.unwrap();
            drop(operator);
            let operator = HostOperator::start(cluster, &alone, None).await;
            until(LONG, "the first pod to be on its way out", async || {
                (pods::list(scene, pods::FUNCTIONS).await.len() < functions).then_some(())
            })
            .await;
            drop(operator);
            let _operator = HostOperator::start(cluster, &alone, None).await;
            deployment.wait_until_gone(scene).await;
        }
    })
    .await;
}

/// A missing image is reported, and the earlier revision keeps running.
#[tokio::test(flavor = "multi_thread")]
async fn missing_image_is_reported() {
    Scene::run("missing_image_is_reported", async |scene| {
        let cluster = &scene.cluster;
        let alone = release::exclusive(cluster, 0).await;
        claim::with_demo_model(scene, "models").await;
        let operator = HostOperator::start(cluster, &alone, None).await;
        let deployment = Deployment::apply(scene, "demo", &demo("Never")).await;
        deployment.wait_until_settled().await;
        drop(operator);
        let absent = ["--main-image=remoe.test/absent:1", "--image-pull-policy=Never"];
        let operator = HostOperator::start_named(cluster, &alone, "host", &absent).await;
        let degraded = deployment.wait_for_reason("Degraded", "ImageUnavailable").await;
        assert!(degraded["message"].as_str().unwrap().contains("remoe.test/absent:1"), "{degraded}");
        deployment.wait_for_condition("Ready", "True").await;
        assert_eq!(deployment.endpoints(scene).await.len(), 1, "the old main function serves on");
        drop(operator);
        let _operator = HostOperator::start(cluster, &alone, None).await;
        deployment.wait_until_settled().await;
    })
    .await;
}

/// Returns the latest placement sent to main functions, without the hosting functions.
async fn placement(scene: &Scene) -> Value {
    let record = scene.kubectl(&["get", "moerecord", "demo-routing", "--output", "json"]).await;
    let record: Value = serde_json::from_str(&record).expect("kubectl prints JSON");
    let generations = record["spec"]["generations"].as_object().expect("there is a generation");
    assert_eq!(generations.len(), 1, "{record}");
    let told = generations.values().next().expect("there is one");
    json!({"plan": told["plan"], "remote": told["remote"], "groups": told["groups"]})
}

/// With a new image tag, the plan stays, no expert moves, every pod is replaced, and a client that streams 900 tokens
/// from a terminating main function gets all of them.
#[tokio::test(flavor = "multi_thread")]
async fn another_tag_of_the_images_costs_no_token() {
    const TOKENS: u32 = 900;
    const PROMPT: &str = "Read Genesis 1:1.";
    Scene::run("another_tag_of_the_images_costs_no_token", async |scene| {
        let cluster = &scene.cluster;
        let alone = release::exclusive(cluster, 0).await;
        claim::with_demo_model(scene, "models").await;
        let operator = HostOperator::start(cluster, &alone, None).await;
        let mut spec = demo("Always");
        spec["workload"] = json!({
            "maxInputTokens": 100, "maxOutputTokens": 910, "typicalInputTokens": 50, "typicalOutputTokens": 50,
        });
        let deployment = Deployment::apply(scene, "demo", &spec).await;
        let plan = deployment.wait_until_settled().await["plan"].clone();
        let (before, told) = (pods::list(scene, pods::FUNCTIONS).await, placement(scene).await);
        let address = deployment.client_addresses(scene).await[0];
        let undisturbed = CompletionStream::with_tokens(TOKENS, address, "demo", PROMPT).await.finish().await;
        let mut stream = CompletionStream::with_tokens(TOKENS, address, "demo", PROMPT).await;
        stream.next().await.expect("a first token");
        drop(operator);
        let mut arguments = Vec::new();
        for (flag, name) in [("main", "main"), ("remote", "remote-expert")] {
            let (from, to) = (image(name), format!("{}-upgraded", image(name)));
            cluster.tag(&from, &to).await;
            arguments.push(format!("--{flag}-image={to}"));
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let _operator = HostOperator::start_named(cluster, &alone, "host", &arguments).await;
        assert!(stream.finish().await == undisturbed, "the stream has other tokens");
        let functions = until(LONG, "pods of the other tag", async || {
            let now = pods::list(scene, pods::FUNCTIONS).await;
            let upgraded = |pod: &Pod| {
                let image = pod.spec.as_ref().and_then(|spec| spec.containers[0].image.as_deref());
                image.is_some_and(|image| image.ends_with("-upgraded"))
            };
            (now.len() == before.len() && now.iter().all(upgraded)).then_some(now)
        })
        .await;
        assert!(functions.iter().all(|pod| before.iter().all(|known| known.uid() != pod.uid())));
        assert_eq!(deployment.wait_until_settled().await["plan"], plan);
        assert_eq!(placement(scene).await, told);
    })
    .await;
}

/// Removes `verb` on `resource` from the operator's role `name`.
async fn forbid(cluster: &Cluster, name: &str, verb: &str, resource: &str) -> ClusterRole {
    let roles = Api::<ClusterRole>::all(cluster.client.clone());
    let role = roles.get(name).await.unwrap();
    let mut less = role.clone();
    let rules = less.rules.iter_mut().flatten();
    let about = |resources: &Option<Vec<String>>| resources.iter().flatten().any(|each| each == resource);
    for rule in rules.filter(|rule| about(&rule.resources)) {
        assert!(rule.verbs.iter().any(|each| each == verb), "the role has {verb} on {resource}");
        rule.verbs.retain(|each| each != verb);
    }
    // A rule without verbs is invalid.
    less.rules.iter_mut().for_each(|rules| rules.retain(|rule| !rule.verbs.is_empty()));
    roles.replace(name, &PostParams::default(), &less).await.unwrap();
    role
}

async fn restore(cluster: &Cluster, role: ClusterRole) {
    let roles = Api::<ClusterRole>::all(cluster.client.clone());
    let name = role.name_any();
    let mut live = roles.get(&name).await.unwrap();
    live.rules = role.rules;
    roles.replace(&name, &PostParams::default(), &live).await.unwrap();
}

/// A missing verb in the role is reported by the deployment's conditions, or by its events. Once the verb is
/// restored, the report disappears.
#[tokio::test(flavor = "multi_thread")]
async fn missing_verb_of_the_role_is_reported() {
    Scene::run("missing_verb_of_the_role_is_reported", async |scene| {
        let cluster = &scene.cluster;
        let mut alone = release::exclusive(cluster, 1).await;
        // Restores the chart's role for the next test, also after a failure.
        alone.install(cluster, &["replicas=1"]).await;
        claim::with_demo_model(scene, "models").await;
        let role = forbid(cluster, release::FUNCTIONS_ROLE, "create", "pods").await;
        let deployment = Deployment::apply(scene, "demo", &demo("Never")).await;
        let planned = deployment.wait_for_reason("Planned", "NotPermitted").await;
        assert!(
            planned["message"].as_str().unwrap().contains("cannot create resource \"pods\""),
            "{planned}"
        );
        restore(cluster, role).await;
        deployment.wait_until_settled().await;

        for (verb, resource, change) in [
            ("patch", "moedeployments/status", json!({"spec": {"replicas": 2}})),
            ("create", "moeplans", json!({"spec": {"pricing": {"cpuCoreHour": "0.3"}}})),
        ] {
            let role = forbid(cluster, release::ROLE, verb, resource).await;
            deployment.patch(&change).await;
            let what = format!("an event about {verb} on {resource}");
            until(LONG, &what, async || {
                let events = scene.api::<Event>().list(&ListParams::default()).await.unwrap();
                let told = |event: &Event| {
                    let note = event.note.as_deref().unwrap_or_default();
                    event.reason.as_deref() == Some("ReconcileFailed")
                        && note.contains(&format!("cannot {verb} resource \"{resource}\""))
                };
                events.items.iter().any(told).then_some(())
            })
            .await;
            restore(cluster, role).await;
            deployment.wait_until_settled().await;
        }
        assert_eq!(deployment.status().await["functions"], "2/2");
    })
    .await;
}

/// With enforced network policies, the operator reaches the main functions: the policy selects the chart's pods.
#[tokio::test(flavor = "multi_thread")]
async fn network_policy_allows_the_operator() {
    Scene::run("network_policy_allows_the_operator", async |scene| {
        let cluster = &scene.cluster;
        let _operator = release::shared(cluster).await;
        Deployment::apply(scene, "demo", &demo("Never")).await;
        let policies = scene.api::<k8s_openapi::api::networking::v1::NetworkPolicy>();
        let policy = until(LONG, "the policy of main functions", async || {
            policies.get_opt("demo-main").await.unwrap()
        })
        .await;
        let policy = serde_json::to_value(policy).unwrap();
        let peer = &policy["spec"]["ingress"][1]["from"][0];
        let namespace = &peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"];
        assert_eq!(namespace, release::NAMESPACE);
        let labels = peer["podSelector"]["matchLabels"].as_object().unwrap();
        let selector: Vec<String> =
            labels.iter().map(|(key, value)| format!("{key}={}", value.as_str().unwrap())).collect();
        let operators = Api::<Pod>::namespaced(cluster.client.clone(), release::NAMESPACE);
        let selected = operators.list(&ListParams::default().labels(&selector.join(","))).await.unwrap();
        assert!(!selected.items.is_empty(), "{selector:?}");
        assert!(selected.items.iter().all(|pod| pod.name_any().starts_with(release::NAME)));
    })
    .await;
}
