//! Main functions on a GPU: the node only declares one, which is allocated.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, ListParams, Patch, PatchParams};
use remoe_e2e::deployment::{Deployment, find};
use remoe_e2e::scene::Scene;
use remoe_e2e::{claim, pods, release};
use remoe_test_support::deadline::{LONG, until};
use serde_json::json;

const GPU: &str = "nvidia.com/gpu";
const MAINS: &str = "app.kubernetes.io/component=main,remoe.dev/deployment=";

async fn one_gpu(scene: &Scene) {
    let nodes = Api::<Node>::all(scene.cluster.client.clone());
    let node = nodes.list(&ListParams::default()).await.unwrap().items.remove(0).name_any();
    let capacity = json!({"status": {"capacity": {GPU: "1"}}});
    nodes.patch_status(&node, &PatchParams::default(), &Patch::Merge(&capacity)).await.unwrap();
    until(LONG, "a GPU to give out", async || {
        let allocatable = nodes.get(&node).await.unwrap().status?.allocatable?;
        allocatable.get(GPU).filter(|quantity| quantity.0 == "1").map(|_| ())
    })
    .await;
}

async fn main_pod(scene: &Scene, deployment: &str) -> Pod {
    until(LONG, "a main function", async || pods::list(scene, &format!("{MAINS}{deployment}")).await.pop())
        .await
}

async fn scheduled(scene: &Scene, deployment: &str) {
    until(LONG, &format!("a node for {deployment}"), async || {
        main_pod(scene, deployment).await.spec.and_then(|spec| spec.node_name)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_deployments_share_one_gpu_in_turn() {
    Scene::run("two_deployments_share_one_gpu_in_turn", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        claim::with_demo_model(scene, "models").await;
        one_gpu(scene).await;
        let spec = json!({
            "model": {"source": "pvc://models/demo"},
            "main": {"device": "cuda", "gpu": {"count": 1}, "memoryMB": {"min": 200, "max": 4000}},
            "remoteExperts": {"mode": "Never"},
            "pricing": {"gpuHour": "2.50", "gpuMemoryMB": 16000},
        });
        let first = Deployment::apply(scene, "first", &spec).await;
        scheduled(scene, "first").await;
        let pod = main_pod(scene, "first").await.spec.unwrap();
        let resources = pod.containers[0].resources.clone().unwrap();
        assert_eq!(resources.requests.unwrap()[GPU].0, "1");
        assert!(pod.containers[0].args.iter().flatten().any(|argument| argument == "cuda"));

        let second = Deployment::apply(scene, "second", &spec).await;
        let ready = second.wait_for_reason("Ready", "Unschedulable").await;
        assert_eq!(ready["status"], "False");
        assert!(ready["message"].as_str().unwrap().contains("Insufficient nvidia.com/gpu"), "{ready}");
        // The images have no CUDA: the function reports that, and the status repeats it.
        let failed = first.wait_for_reason("Ready", "CrashLooping").await;
        let message = failed["message"].as_str().unwrap();
        assert!(message.to_lowercase().contains("cuda"), "{message}");
        assert_eq!(find(&first.status().await, "Planned").unwrap()["status"], "True");

        first.delete().await;
        scheduled(scene, "second").await;
    })
    .await;
}
