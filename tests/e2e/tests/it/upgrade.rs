//! Upgrade from the release that stored records in ConfigMaps, with a running deployment.

use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};
use remoe_e2e::deployment::{CompletionStream, Deployment};
use remoe_e2e::host_operator::HostOperator;
use remoe_e2e::scene::Scene;
use remoe_e2e::{audit, claim, pods, release};
use remoe_test_support::deadline::{LONG, until};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

const TOKENS: u32 = 900;
const PROMPT: &str = "Read Genesis 1:1.";

/// The profile is measured, so that it is stored as well.
fn spec() -> Value {
    json!({
        "model": {"source": "pvc://models/demo"},
        "main": {"memoryMB": {"min": 200, "max": 2000, "step": 100}},
        "remoteExperts": {
            "mode": "Always", "maxReplicas": 1, "memoryMB": {"min": 100, "max": 1000, "step": 100},
        },
        "workload": {
            "maxInputTokens": 100, "maxOutputTokens": 910, "typicalInputTokens": 50, "typicalOutputTokens": 50,
        },
    })
}

/// Returns the MoERecords, by name.
async fn records(scene: &Scene) -> BTreeMap<String, Value> {
    let listed = scene.kubectl(&["get", "moerecords", "--output", "json"]).await;
    let listed: Value = serde_json::from_str(&listed).expect("kubectl prints JSON");
    let records = listed["items"].as_array().expect("a list has items").iter();
    records.map(|record| (record["metadata"]["name"].as_str().unwrap().to_owned(), record.clone())).collect()
}

/// Returns `record` in the form of the earlier release.
fn config_map(record: &Value) -> ConfigMap {
    let spec = &record["spec"];
    let mut labels = record["metadata"]["labels"].clone();
    let data: Map<String, Value> = match spec["of"].as_str() {
        Some("Model") => {
            labels["remoe.dev/subject"] = spec["subject"].clone();
            [("model.json".to_owned(), spec["json"].clone())].into_iter().collect()
        }
        Some("Profile") => [("profile.json".to_owned(), spec["json"].clone())].into_iter().collect(),
        Some("Routing") => {
            let generations = spec["generations"].as_object().expect("generations have names").iter();
            generations.map(|(of, told)| (format!("{of}.json"), json!(told.to_string()))).collect()
        }
        other => panic!("{other:?} is not known"),
    };
    let map = json!({
        "metadata": {
            "name": record["metadata"]["name"], "labels": labels,
            "ownerReferences": record["metadata"]["ownerReferences"],
        },
        "data": data,
    });
    serde_json::from_value(map).expect("the ConfigMap is well formed")
}

/// Returns the pods of functions with their restarts.
async fn function_restarts(scene: &Scene) -> BTreeMap<String, i32> {
    let all = pods::list(scene, pods::FUNCTIONS).await;
    all.iter().map(|pod: &Pod| (pod.uid().unwrap(), pods::restart_count(pod))).collect()
}

/// Records in ConfigMaps of an earlier release are read after the upgrade and stored in the present form. No pod is
/// created or deleted, nothing is fetched or measured again, and a streaming client does not notice.
#[tokio::test(flavor = "multi_thread")]
async fn records_in_config_maps_of_earlier_release_are_migrated() {
    Scene::run("records_in_config_maps_of_earlier_release_are_migrated", async |scene| {
        let cluster = &scene.cluster;
        let mut alone = release::exclusive(cluster, 0).await;
        claim::with_demo_model(scene, "models").await;
        let operator = HostOperator::start(cluster, &alone, None).await;
        let demo = Deployment::apply(scene, "demo", &spec()).await;
        demo.wait_for_reason("Planned", "MeasuredProfile").await;
        let settled = demo.wait_until_settled().await;
        let (before, kept) = (function_restarts(scene).await, records(scene).await);
        assert_eq!(kept.len(), 3, "{kept:?}");
        let address = demo.client_addresses(scene).await[0];
        let undisturbed = CompletionStream::with_tokens(TOKENS, address, "demo", PROMPT).await.finish().await;
        let mut stream = CompletionStream::with_tokens(TOKENS, address, "demo", PROMPT).await;
        stream.next().await.expect("a first token");

        drop(operator);
        for record in kept.values() {
            let maps = scene.api::<ConfigMap>();
            maps.create(&PostParams::default(), &config_map(record)).await.expect("the ConfigMap is taken");
        }
        // That release had no MoERecords, and its chart no definition of them.
        cluster.kubectl(&["delete", "crd", "moerecords.remoe.dev"]).await;
        alone.install(cluster, &["replicas=0"]).await;
        let start = audit::position(cluster);
        let operator = HostOperator::start(cluster, &alone, None).await;
        until(LONG, "the records", async || {
            let now = records(scene).await;
            let is_same = |(name, record): (&String, &Value)| {
                now.get(name).map(|it| &it["spec"]) == Some(&record["spec"])
            };
            kept.iter().all(is_same).then_some(())
        })
        .await;
        assert!(stream.finish().await == undisturbed, "the stream has other tokens");
        let now = demo.wait_until_settled().await;
        assert_eq!((&now["plan"], &now["functions"]), (&settled["plan"], &settled["functions"]));
        assert_eq!(function_restarts(scene).await, before);
        let written = operator.writes(cluster, start);
        let pods: Vec<_> = written.iter().filter(|request| request.resource() == "pods").collect();
        assert!(pods.is_empty(), "{pods:?}");
        for name in kept.keys() {
            scene.api::<ConfigMap>().delete(name, &DeleteParams::default()).await.expect("it is still there");
        }
        demo.delete().await;
    })
    .await;
}
