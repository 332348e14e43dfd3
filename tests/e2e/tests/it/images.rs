//! Images under the restricted profile on a real kubelet.

use remoe_e2e::host_operator::image;
use remoe_e2e::scene::Scene;
use remoe_e2e::{claim, pods};
use remoe_test_support::binaries::workspace;
use remoe_test_support::command::remoe;
use remoe_test_support::http;
use serde_json::{Value, json};
use std::net::SocketAddr;

/// Inspects the demo model in the image of main functions: the agent prints what `remoe inspect` prints on this host.
#[tokio::test(flavor = "multi_thread")]
async fn main_image_inspects_a_model() {
    Scene::run("main_image_inspects_a_model", async |scene| {
        claim::with_demo_model(scene, "models").await;
        let model = workspace().join("demo/model");
        let (code, expected) = remoe(&["inspect", "--model", model.to_str().unwrap()]).await;
        assert_eq!(code, Some(0));
        let container = json!({
            "image": image("main"),
            "command": ["/usr/bin/remoe-agent", "inspect", "--model=/models/demo"],
        });
        pods::create(scene, &pods::restricted("main", &container)).await;
        let printed: Value =
            serde_json::from_str(&pods::wait_until_completed(scene, "main").await).expect("one JSON object");
        assert_eq!(printed, expected);
    })
    .await;
}

/// All libraries are present, and a read-only root and no privileges suffice.
#[tokio::test(flavor = "multi_thread")]
async fn functions_start_from_their_images() {
    Scene::run("functions_start_from_their_images", async |scene| {
        claim::with_demo_model(scene, "models").await;
        let remote = json!({
            "image": image("remote-expert"),
            "args": ["--model=/models/demo", "--experts=0:0-3", "--listen=0.0.0.0:9001", "--metrics-listen=0.0.0.0:9090"],
            "readinessProbe": {"grpc": {"port": 9001}, "periodSeconds": 1},
        });
        pods::create(scene, &pods::restricted("remote", &remote)).await;
        // A main function without a placement responds that it is not ready.
        let main = json!({
            "image": image("main"),
            "args": ["--model=/models/demo", "--http-listen=0.0.0.0:8000", "--control-listen=0.0.0.0:9000"],
            "readinessProbe": {"httpGet": {"path": "/version", "port": 8000}, "periodSeconds": 1},
        });
        pods::create(scene, &pods::restricted("main", &main)).await;
        let remote = pods::wait_until_ready(scene, "remote").await;
        let metrics = http::get(address(&remote, 9090), "/metrics").await;
        assert!(metrics.body.contains("remoe_function_bytes_in_flight"), "{}", metrics.body);
        let main = pods::wait_until_ready(scene, "main").await;
        assert_eq!(http::get(address(&main, 8000), "/health").await.status, 503);
    })
    .await;
}

fn address(pod: &k8s_openapi::api::core::v1::Pod, port: u16) -> SocketAddr {
    let ip =
        pod.status.as_ref().and_then(|status| status.pod_ip.as_ref()).expect("a ready pod has an address");
    SocketAddr::new(ip.parse().expect("the pod's address"), port)
}
