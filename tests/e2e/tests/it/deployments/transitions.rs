//! Changes of the spec while clients are served.

use crate::deployments::{local, remote};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use remoe_e2e::deployment::{Deployment, chat, find};
use remoe_e2e::scene::Scene;
use remoe_e2e::{claim, figures, pods, release};
use remoe_test_support::binaries::workspace;
use remoe_test_support::deadline::{LONG, until};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

const PROMPT: &str = "Read Genesis 1:1.";

async fn uids(scene: &Scene) -> BTreeSet<String> {
    pods::list(scene, pods::FUNCTIONS).await.iter().filter_map(Pod::uid).collect()
}

/// Waits until the deployment matches `spec` and all other pods are gone.
async fn changed(demo: &Deployment, spec: Value) -> Value {
    demo.patch(&json!({ "spec": spec })).await;
    demo.wait_until_settled().await
}

/// Sends requests to a ready main function repeatedly; all must be answered.
struct SteadyClient {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU32>,
    task: tokio::task::JoinHandle<()>,
}

impl SteadyClient {
    fn start(scene: &Scene, name: &str) -> Self {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::<AtomicU32>::default());
        let (stopped, count) = (stop.clone(), answered.clone());
        let (scene, demo) = (scene.clone(), Deployment::existing(scene, name));
        let task = tokio::spawn(async move {
            while !stopped.load(Ordering::SeqCst) {
                let ready = demo.client_addresses(&scene).await;
                let address = *ready.first().expect("a main function is ready at any time");
                chat(address, &demo.name, PROMPT).await;
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self { stop, answered, task }
    }

    async fn finish(self) {
        self.stop.store(true, Ordering::SeqCst);
        self.task.await.expect("every request was answered");
        assert!(self.answered.load(Ordering::SeqCst) > 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn main_functions_come_and_go_while_clients_are_served() {
    Scene::run("main_functions_come_and_go_while_clients_are_served", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        claim::with_demo_model(scene, "models").await;
        let demo = Deployment::apply(scene, "demo", &local()).await;
        demo.wait_until_settled().await;
        let client = SteadyClient::start(scene, "demo");

        let one = uids(scene).await;
        let plan = demo.status().await["plan"].clone();
        scene.kubectl(&["scale", "moedeployment", "demo", "--replicas=2"]).await;
        let status = demo.wait_until_settled().await;
        assert_eq!((&status["functions"], &status["plan"]), (&json!("2/2"), &plan), "no other plan");
        assert_eq!(demo.endpoints(scene).await.len(), 2);
        assert!(uids(scene).await.is_superset(&one), "the first one stays");
        scene.kubectl(&["scale", "moedeployment", "demo", "--replicas=1"]).await;
        assert_eq!(demo.wait_until_settled().await["functions"], "1/1");
        assert_eq!(uids(scene).await, one);

        // A plan that differs only in cost moves nothing.
        let before = demo.status().await["plan"].clone();
        let status = changed(&demo, json!({"pricing": {"memoryGBHour": "0.04"}})).await;
        assert_ne!(status["plan"], before);
        assert_eq!(uids(scene).await, one);

        demo.patch(&json!({"metadata": {"annotations": {"remoe.dev/restartedAt": "now"}}})).await;
        let restarted = until(LONG, "other functions", async || {
            let uids = uids(scene).await;
            (!uids.is_empty() && uids.is_disjoint(&one)).then_some(uids)
        })
        .await;
        demo.wait_until_settled().await;
        let template = json!({"main": {"template": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}}});
        changed(&demo, template).await;
        assert!(uids(scene).await.is_disjoint(&restarted));
        client.finish().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn experts_move_out_and_in_again() {
    Scene::run("experts_move_out_and_in_again", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        let model = format!("demo={}", workspace().join("demo/model").display());
        let copy = format!("copy={}", workspace().join("demo/model").display());
        claim::create(scene, "models", &["--put", &model, "--put", &copy]).await;
        let demo = Deployment::apply(scene, "demo", &remote()).await;
        let remote = demo.wait_until_settled().await["functions"].clone();
        assert_ne!(remote, "1/1");
        let client = SteadyClient::start(scene, "demo");
        assert_eq!(changed(&demo, json!({"remoteExperts": {"mode": "Never"}})).await["functions"], "1/1");
        changed(&demo, json!({"remoteExperts": {"mode": "Auto"}})).await;
        assert_eq!(changed(&demo, json!({"remoteExperts": {"mode": "Always"}})).await["functions"], remote);
        client.finish().await;

        // An infeasible spec is rejected, and the present plan keeps running.
        demo.patch(&json!({"spec": {"slo": {"ttft": "1us", "tpot": "1us"}}})).await;
        let refused = demo.wait_for_reason("Planned", "Infeasible").await;
        assert!(refused["message"].as_str().unwrap().contains("infeasible"), "{refused}");
        assert_eq!(demo.status().await["functions"], remote);
        // With the prior, which is conservative, it is only a warning.
        let status = changed(&demo, json!({"profile": null})).await;
        let planned = find(&status, "Planned").unwrap();
        assert!(planned["message"].as_str().unwrap().contains("limits not met"), "{planned}");

        let source =
            json!({"model": {"source": "pvc://models/copy"}, "slo": null, "profile": figures::reference()});
        let status = changed(&demo, source).await;
        assert_eq!(status["model"]["source"], "pvc://models/copy");
        changed(&demo, json!({"servedName": "other"})).await;
        let answer = chat(demo.client_addresses(scene).await[0], "other", PROMPT).await;
        assert_eq!(answer["model"], "other");

        for (change, field) in [
            (json!({"replicas": 0}), "spec.replicas"),
            (json!({"model": {"source": "models/demo"}}), "spec.model.source"),
            (json!({"main": {"memoryMB": {"max": 100}}}), "spec.main.memoryMB"),
            (json!({"acceptedPlan": "0123456789"}), "spec.acceptedPlan"),
            (json!({"main": {"device": "cuda"}}), "spec.main.gpu"),
        ] {
            let refusal = demo.try_patch(&json!({ "spec": change })).await.expect_err(field);
            assert!(refusal.contains(field), "{change}: {refusal}");
        }
        assert_eq!(demo.wait_until_settled().await["functions"], remote);
    })
    .await;
}
