//! Mode Advisory: plans are shown, and run once accepted.

use crate::deployments::{local, remote};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use remoe_e2e::deployment::{Deployment, find};
use remoe_e2e::scene::Scene;
use remoe_e2e::{claim, pods, release};
use remoe_test_support::deadline::{LONG, until};
use serde_json::{Value, json};

async fn proposal(deployment: &Deployment, other_than: &[&str]) -> String {
    until(LONG, "a proposed plan", async || {
        let proposed = deployment.status().await["proposedPlan"].as_str()?.to_owned();
        (!other_than.contains(&proposed.as_str())).then_some(proposed)
    })
    .await
}

async fn accept(deployment: &Deployment, plan: &str) -> Value {
    deployment.patch(&json!({"spec": {"acceptedPlan": plan}})).await;
    let status = deployment.wait_until_settled().await;
    assert_eq!(status["plan"], plan);
    status
}

#[tokio::test(flavor = "multi_thread")]
async fn plans_run_when_they_are_accepted() {
    Scene::run("plans_run_when_they_are_accepted", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        claim::with_demo_model(scene, "models").await;
        let mut spec = local();
        spec["mode"] = json!("Advisory");
        let demo = Deployment::apply(scene, "demo", &spec).await;
        let status = demo.wait_for_conditions(&[("Planned", "True"), ("Active", "False"), ("Ready", "False")]).await;
        assert_eq!(find(&status, "Active").unwrap()["reason"], "Advisory");
        assert_eq!(find(&status, "Ready").unwrap()["reason"], "AwaitingAcceptance");
        let first = proposal(&demo, &[]).await;
        assert!(pods::list(scene, pods::FUNCTIONS).await.is_empty());

        let status = accept(&demo, &first).await;
        assert!(status["proposedPlan"].is_null(), "{status}");
        let running = names(scene).await;

        // New prices give a new plan; the accepted one keeps running.
        demo.patch(&json!({"spec": {"pricing": {"cpuCoreHour": "0.3"}}})).await;
        let second = proposal(&demo, &[&first]).await;
        demo.wait_until_settled().await;
        assert_eq!(demo.status().await["plan"], first.as_str());
        assert_eq!(names(scene).await, running);

        demo.patch(&json!({"spec": {"acceptedPlan": "0123456789"}})).await;
        let degraded = demo.wait_for_reason("Degraded", "PlanUnknown").await;
        let message = degraded["message"].as_str().unwrap();
        assert!(message.contains("spec.acceptedPlan") && message.contains("0123456789"), "{message}");
        assert_eq!(names(scene).await, running);

        accept(&demo, &second).await;
        let remote = json!({"spec": {"mode": "Active", "acceptedPlan": null, "remoteExperts": remote()["remoteExperts"]}});
        demo.patch(&remote).await;
        let status = demo.wait_until_settled().await;
        assert!(![first, second].contains(&status["plan"].as_str().unwrap().to_owned()), "{status}");
        assert_ne!(status["functions"], "1/1");
    })
    .await;
}

async fn names(scene: &Scene) -> Vec<String> {
    let mut names: Vec<String> = pods::list(scene, pods::FUNCTIONS).await.iter().map(Pod::name_any).collect();
    names.sort();
    names
}
