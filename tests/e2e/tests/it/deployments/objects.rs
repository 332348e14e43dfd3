//! Objects of a deployment that are deleted or edited by hand: the operator restores them.

use crate::deployments::remote;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, ListParams};
use remoe_e2e::claim;
use remoe_e2e::deployment::Deployment;
use remoe_e2e::release;
use remoe_e2e::scene::Scene;
use remoe_e2e::tool;
use remoe_test_support::deadline::{LONG, until};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const KINDS: &str = "services,networkpolicies,poddisruptionbudgets,moerecords,moeplans,pods";

/// Returns the operator's objects without fields of the API server and fields that differ between incarnations.
async fn made(scene: &Scene) -> BTreeMap<String, Value> {
    let listed =
        scene.kubectl(&["get", KINDS, "--selector", "remoe.dev/deployment=demo", "--output", "json"]).await;
    let listed: Value = serde_json::from_str(&listed).expect("kubectl prints JSON");
    let mut all = BTreeMap::new();
    for item in listed["items"].as_array().unwrap() {
        let (kind, name) = (item["kind"].as_str().unwrap(), item["metadata"]["name"].as_str().unwrap());
        if !item["metadata"]["deletionTimestamp"].is_null() {
            continue;
        }
        let mut content = json!({
            "labels": item["metadata"]["labels"],
            "owners": item["metadata"]["ownerReferences"],
            "spec": item["spec"],
        });
        if let Some(generations) = content["spec"]["generations"].as_object_mut() {
            // Generation numbers only grow.
            generations.values_mut().for_each(|generation| generation["number"] = Value::Null);
            content["spec"]["about"] = Value::Null;
        }
        all.insert(format!("{kind}/{name}"), content);
    }
    all
}

async fn restored(scene: &Scene, before: &BTreeMap<String, Value>, what: &str) {
    let mut seen = made(scene).await;
    let deadline = tokio::time::timeout(LONG, async {
        while seen != *before {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            seen = made(scene).await;
        }
    });
    if deadline.await.is_err() {
        for (name, content) in before {
            if seen.get(name) != Some(content) {
                eprintln!("{name}: was {content}\nis {:?}", seen.get(name));
            }
        }
        panic!("{what}: not as before: {:?}", seen.keys().collect::<Vec<_>>());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_or_edited_objects_are_restored() {
    Scene::run("deleted_or_edited_objects_are_restored", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        claim::with_demo_model(scene, "models").await;
        let mut spec = remote();
        spec["replicas"] = json!(2);
        let demo = Deployment::apply(scene, "demo", &spec).await;
        let plan = demo.wait_until_settled().await["plan"].as_str().unwrap().to_owned();
        let before = made(scene).await;
        let objects: Vec<&String> = before.keys().filter(|name| !name.starts_with("Pod/")).collect();
        assert!(objects.iter().any(|name| *name == "PodDisruptionBudget/demo-main"), "{objects:?}");
        for object in &objects {
            scene.kubectl(&["delete", object, "--wait=false"]).await;
            restored(scene, &before, object).await;
        }
        for object in &objects {
            scene.kubectl(&["label", object, "remoe.dev/deployment-"]).await;
            restored(scene, &before, object).await;
        }
        for (object, change) in [
            ("service/demo-main", json!({"spec": {"selector": {"remoe.dev/deployment": "other"}}})),
            ("service/demo-remote", json!({"spec": {"selector": {"more": "x"}}})),
            ("service/demo-main", json!({"spec": {"ports": [{"name": "http", "port": 80}]}})),
            (
                "service/demo-main",
                json!({"spec": {"ports": [{"name": "http", "port": 8000}, {"name": "x", "port": 81}]}}),
            ),
            ("moerecord/demo-model", json!({"spec": {"about": "nothing"}})),
            ("networkpolicy/demo-main", json!({"spec": {"ingress": [{}]}})),
            (
                "networkpolicy/demo-remote-expert",
                json!({"spec": {"podSelector": {"matchLabels": {"x": "y"}}}}),
            ),
            ("poddisruptionbudget/demo-main", json!({"spec": {"minAvailable": 0}})),
            ("moerecord/demo-model", json!({"spec": {"json": "{}"}})),
            (
                "moerecord/demo-routing",
                json!({"spec": {"generations": {"x": {
                    "number": 9, "plan": "p", "revision": "r", "remote": "", "endpoints": [],
                }}}}),
            ),
        ] {
            scene.kubectl(&["patch", object, "--type=merge", "--patch", &change.to_string()]).await;
            restored(scene, &before, object).await;
        }
        let pods: Vec<&String> = before.keys().filter(|name| name.starts_with("Pod/")).collect();
        let remote = pods.iter().find(|name| !name.starts_with("Pod/demo-main-")).unwrap();
        let main = pods.iter().find(|name| name.starts_with("Pod/demo-main-")).unwrap();
        for pod in [main, remote] {
            for label in [
                "remoe.dev/deployment-",
                "remoe.dev/function=other",
                "remoe.dev/identity-",
                "app.kubernetes.io/component=other",
            ] {
                scene.kubectl(&["label", "--overwrite", pod, label]).await;
                restored(scene, &before, label).await;
            }
        }

        let kubectl = scene.cluster.tool("kubectl");
        let plan = format!("moeplan/demo-{plan}");
        let change = json!({"spec": {"main": {"memoryMB": 100}}}).to_string();
        let arguments = ["patch", &plan, "--namespace", &scene.namespace, "--type=merge", "--patch", &change];
        let refused = tool::attempt(&kubectl, &scene.cluster.kubeconfig, &arguments).await.unwrap_err();
        assert!(refused.contains("spec is immutable"), "{refused}");

        let slices = scene.api::<EndpointSlice>();
        let ready = demo.endpoints(scene).await.len();
        slices.delete_collection(&DeleteParams::default(), &ListParams::default()).await.unwrap();
        until(LONG, "endpoints", async || (demo.endpoints(scene).await.len() == ready).then_some(())).await;
        demo.wait_until_settled().await;
    })
    .await;
}
