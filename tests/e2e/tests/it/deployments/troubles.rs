//! Faults that users must fix: a condition reports each one until it is fixed.

use crate::deployments::local;
use k8s_openapi::api::core::v1::{LimitRange, ResourceQuota, Secret};
use kube::api::{DeleteParams, PostParams};
use remoe_e2e::deployment::{Deployment, find};
use remoe_e2e::scene::Scene;
use remoe_e2e::{claim, release};
use remoe_test_support::deadline::{LONG, until};
use serde_json::{Value, json};

/// Asserts that the condition's message has all of `words`.
fn says(condition: &Value, words: &[&str]) {
    let message = condition["message"].as_str().unwrap();
    assert!(words.iter().all(|word| message.contains(word)), "{words:?} in {message:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn exhausted_resource_quota_is_reported() {
    Scene::run("exhausted_resource_quota_is_reported", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        claim::with_demo_model(scene, "models").await;
        // Memory for the inspecting agent, but not for a function.
        let quota = json!({"metadata": {"name": "small"}, "spec": {"hard": {"requests.memory": "310M"}}});
        let quotas = scene.api::<ResourceQuota>();
        quotas.create(&PostParams::default(), &serde_json::from_value(quota).unwrap()).await.unwrap();
        let mut spec = local();
        spec["main"]["memoryMB"]["min"] = json!(400);
        let demo = Deployment::apply(scene, "demo", &spec).await;
        let degraded = demo.wait_for_reason("Degraded", "QuotaExceeded").await;
        says(&degraded, &["pod demo-main-", "exceeded quota: small", "requests.memory"]);
        assert_eq!(demo.wait_for_reason("Ready", "QuotaExceeded").await["status"], "False");
        quotas.delete("small", &DeleteParams::default()).await.unwrap();
        demo.wait_until_settled().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejecting_limit_range_is_reported() {
    Scene::run("rejecting_limit_range_is_reported", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        claim::with_demo_model(scene, "models").await;
        let limits = json!({"metadata": {"name": "tiny"}, "spec": {"limits": [
            {"type": "Container", "max": {"memory": "100Mi"}},
        ]}});
        let ranges = scene.api::<LimitRange>();
        ranges.create(&PostParams::default(), &serde_json::from_value(limits).unwrap()).await.unwrap();
        let demo = Deployment::apply(scene, "demo", &local()).await;
        let planned = demo.wait_for_reason("Planned", "PodRefused").await;
        says(&planned, &["pod demo-inspect-", "maximum memory usage per Container is 100Mi"]);
        ranges.delete("tiny", &DeleteParams::default()).await.unwrap();
        demo.wait_until_settled().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_claim_is_reported() {
    Scene::run("missing_claim_is_reported", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        let demo = Deployment::apply(scene, "demo", &local()).await;
        says(&demo.wait_for_reason("Planned", "ClaimMissing").await, &["\"models\"", "not found"]);
        assert_eq!(demo.wait_for_reason("Ready", "ClaimMissing").await["status"], "False");
        claim::with_demo_model(scene, "models").await;
        demo.wait_until_settled().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn path_without_a_model_is_reported() {
    Scene::run("path_without_a_model_is_reported", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        claim::with_demo_model(scene, "models").await;
        let mut spec = local();
        spec["model"]["source"] = json!("pvc://models/dmo");
        let demo = Deployment::apply(scene, "demo", &spec).await;
        says(&demo.wait_for_reason("Planned", "ModelUnreadable").await, &["/models/dmo"]);
        demo.patch(&json!({"spec": {"model": {"source": "pvc://models/demo"}}})).await;
        demo.wait_until_settled().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_that_are_not_there() {
    Scene::run("credentials_that_are_not_there", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        let spec = json!({
            "model": {"source": "hf://remoe/demo", "credentialsSecretName": "hub"},
            "remoteExperts": {"mode": "Never"},
        });
        let demo = Deployment::apply(scene, "demo", &spec).await;
        says(&demo.wait_for_reason("Planned", "CredentialsMissing").await, &["secret \"hub\" not found"]);
        let secret = json!({"metadata": {"name": "hub"}, "stringData": {"HF_TOKEN": "none"}});
        let secret: Secret = serde_json::from_value(secret).unwrap();
        scene.api::<Secret>().create(&PostParams::default(), &secret).await.unwrap();
        // No hub can be reached from here, which is another fault.
        until(LONG, "another state", async || {
            let planned = find(&demo.status().await, "Planned")?;
            (planned["reason"] != "CredentialsMissing").then_some(())
        })
        .await;
    })
    .await;
}

/// The plan's inputs change while its pods are refused: the next plan is applied at once.
#[tokio::test(flavor = "multi_thread")]
async fn size_beyond_a_quota_is_reported() {
    Scene::run("size_beyond_a_quota_is_reported", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        claim::with_demo_model(scene, "models").await;
        let quota = json!({"metadata": {"name": "small"}, "spec": {"hard": {"requests.memory": "2G"}}});
        let quota: ResourceQuota = serde_json::from_value(quota).unwrap();
        scene.api::<ResourceQuota>().create(&PostParams::default(), &quota).await.unwrap();
        let mut spec = local();
        spec["main"]["memoryMB"] = json!({"min": 4000, "max": 4000});
        let demo = Deployment::apply(scene, "demo", &spec).await;
        demo.wait_for_reason("Ready", "QuotaExceeded").await;
        demo.patch(&json!({"spec": {"main": {"memoryMB": {"min": 200, "max": 1000}}}})).await;
        demo.wait_until_settled().await;
    })
    .await;
}
