//! Remote groups that each host a part of every layer, with their own vCPUs.

use crate::deployments::remote;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use remoe_e2e::deployment::{Deployment, chat};
use remoe_e2e::scene::Scene;
use remoe_e2e::{claim, pods, release};
use remoe_test_support::binaries::workspace;
use remoe_test_support::up::Up;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

const PROMPT: &str = "Read Genesis 1:1.";

#[tokio::test(flavor = "multi_thread")]
async fn groups_are_pods_with_vcpus_of_their_own() {
    Scene::run("groups_are_pods_with_vcpus_of_their_own", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        claim::with_demo_model(scene, "models").await;
        let mut spec = remote();
        spec["main"]["cpu"] = json!({"min": 500, "max": 1500, "step": 250});
        spec["remoteExperts"]["cpu"] = json!({"min": 250, "max": 1000, "step": 250});
        spec["remoteExperts"]["maxGroups"] = json!(3);
        let demo = Deployment::apply(scene, "demo", &spec).await;
        let status = demo.wait_until_settled().await;

        let plan = plan(scene, &status).await;
        let groups = plan["groups"].as_array().expect("the plan has groups");
        assert!((1..=3).contains(&groups.len()), "{plan}");
        assert_eq!(plan["remote"], json!([]));
        let mut wanted = BTreeMap::new();
        for (number, group) in groups.iter().enumerate() {
            let millicores = group["cpuMillicores"].as_u64().expect("vCPUs are a decision");
            assert!((250..=1000).contains(&millicores) && millicores % 250 == 0, "{group}");
            // All groups work on every layer.
            assert!(group["experts"].as_str().unwrap().matches(':').count() > 1, "{group}");
            for _ in 0..group["replicas"].as_u64().unwrap() {
                *wanted.entry((format!("g{number}"), millicores)).or_insert(0) += 1;
            }
        }
        let main = plan["main"]["cpuMillicores"].as_u64().expect("vCPUs are a decision");
        wanted.insert(("main".to_owned(), main), 1);
        let mut there = BTreeMap::new();
        for pod in pods::list(scene, pods::FUNCTIONS).await {
            *there.entry((pod.labels()[pods::FUNCTIONS].clone(), millicores(&pod))).or_insert(0) += 1;
        }
        assert_eq!(there, wanted);

        let answer = chat(demo.client_addresses(scene).await[0], "demo", PROMPT).await;
        let local = Up::start(&workspace().join("demo/model"), 1).await;
        let local = chat(local.ready.http(), "model", PROMPT).await;
        assert_eq!(answer["choices"], local["choices"]);
        let figures = &answer["usage"]["remoe"];
        assert!(figures["experts"]["remote"].as_u64() > Some(0), "{figures}");
        assert_eq!(figures["experts"]["fallback"], 0, "{figures}");
        for side in ["expected", "measured"] {
            for figure in ["ttft_s", "tpot_s", "cost"] {
                let value = figures["plan"][side][figure].as_f64();
                assert!(value.is_some_and(|value| value > 0.0), "{side} {figure}: {figures}");
            }
        }

        // Scaling does not change the plan, and no pod is deleted.
        let before = uids(scene).await;
        scene.kubectl(&["scale", "moedeployment", "demo", "--replicas=2"]).await;
        let scaled = demo.wait_until_settled().await;
        assert_eq!(scaled["plan"], status["plan"]);
        let after = uids(scene).await;
        assert!(after.is_superset(&before) && after.len() == before.len() + 1, "{before:?} {after:?}");
        for endpoint in demo.client_addresses(scene).await {
            let figures = &chat(endpoint, "demo", PROMPT).await["usage"]["remoe"];
            assert!(figures["plan"]["expected"]["cost"].as_f64() > Some(0.0), "{figures}");
        }
    })
    .await;
}

async fn uids(scene: &Scene) -> BTreeSet<String> {
    pods::list(scene, pods::FUNCTIONS).await.iter().filter_map(Pod::uid).collect()
}

async fn plan(scene: &Scene, status: &Value) -> Value {
    let name = format!("demo-{}", status["plan"].as_str().expect("a plan runs"));
    let plan = scene.kubectl(&["get", "moeplan", &name, "--output", "json"]).await;
    serde_json::from_str::<Value>(&plan).expect("kubectl prints JSON")["spec"].clone()
}

/// Returns the CPU that the pod requests, which is also its limit, in millicores.
fn millicores(pod: &Pod) -> u64 {
    let resources = pod.spec.as_ref().unwrap().containers[0].resources.as_ref().unwrap();
    assert_eq!(resources.requests, resources.limits);
    let cpu = &resources.limits.as_ref().unwrap()["cpu"].0;
    match cpu.strip_suffix('m') {
        Some(millicores) => millicores.parse().unwrap(),
        None => cpu.parse::<u64>().unwrap() * 1000,
    }
}
