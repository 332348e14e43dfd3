//! From `helm install` to an answer and to complete removal.

use remoe_e2e::deployment::{Deployment, chat};
use remoe_e2e::forward::Forward;
use remoe_e2e::scene::Scene;
use remoe_e2e::{audit, claim, pods, release};
use remoe_test_support::binaries::workspace;
use remoe_test_support::up::Up;

const PROMPT: &str = "Read Genesis 1:1.";

/// The placement does not change the answer: pods give the answers of processes on one machine.
#[tokio::test(flavor = "multi_thread")]
async fn demo_is_served_and_removed() {
    Scene::run("demo_is_served_and_removed", async |scene| {
        let cluster = &scene.cluster;
        let _operator = release::shared(cluster).await;
        claim::with_demo_model(scene, "models").await;
        let start = audit::position(cluster);
        let file = workspace().join("examples/demo.yaml");
        scene.kubectl(&["apply", "--filename", file.to_str().unwrap()]).await;
        let demo = Deployment::existing(scene, "demo");
        demo.wait_for_condition("Ready", "True").await;

        let doors = demo.client_addresses(scene).await;
        assert_eq!(doors.len(), 1, "one main function");
        let name = served_name(&demo).await;
        let direct = chat(doors[0], &name, PROMPT).await;
        let beside = Scene { namespace: release::NAMESPACE.to_owned(), ..scene.clone() };
        let forward = Forward::start(&beside, "service/remoe-gateway", 8000).await;
        let full_name = format!("{}/{name}", scene.namespace);
        let forwarded = chat(forward.address, &full_name, PROMPT).await;
        let local = Up::start(&workspace().join("demo/model"), 1).await;
        let local = chat(local.ready.http(), "model", PROMPT).await;
        for answer in [&direct, &forwarded] {
            assert_eq!(answer["choices"], local["choices"]);
            assert!(answer["usage"]["remoe"]["experts"]["remote"].as_u64() > Some(0), "{answer}");
        }

        demo.delete().await;
        demo.wait_until_gone(scene).await;
        assert!(pods::list(scene, "remoe.dev/deployment").await.is_empty());
        let asked = audit::entries_since(cluster, start);
        let denied: Vec<_> =
            asked.iter().filter(|each| each.user() == release::ACCOUNT && each.denied()).collect();
        assert!(denied.is_empty(), "the chart's role does not reach: {denied:?}");
    })
    .await;
}

/// Model name in requests.
async fn served_name(demo: &Deployment) -> String {
    let object = demo.api.get(&demo.name).await.expect("the MoEDeployment can be read");
    object.data["spec"]["servedName"].as_str().unwrap_or(&demo.name).to_owned()
}
