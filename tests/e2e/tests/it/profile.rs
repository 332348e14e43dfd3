//! Serving by the hardware prior, then measuring and planning again with the profile.

use remoe_e2e::deployment::{Deployment, chat, find};
use remoe_e2e::scene::Scene;
use remoe_e2e::{audit, claim, release};
use remoe_test_support::deadline::{LONG, until};
use serde_json::{Value, json};

/// Two deployments share one measurement: one profiler runs, and its profile is deleted with the last of them.
#[tokio::test(flavor = "multi_thread")]
async fn hardware_is_measured_once_for_all_that_run_on_it() {
    Scene::run("hardware_is_measured_once_for_all_that_run_on_it", async |scene| {
        let cluster = &scene.cluster;
        let _operator = release::shared(cluster).await;
        claim::with_demo_model(scene, "models").await;
        let start = audit::position(cluster);
        let first = Deployment::apply(scene, "first", &spec("Always")).await;
        // It serves before the measurement, without a claimed saving.
        first.wait_for_condition("Ready", "True").await;
        let prior = first.status().await;
        let columns = scene.kubectl(&["get", "moep", "--no-headers"]).await;
        let shown: Vec<&str> = columns.split_whitespace().collect();
        // Columns: name, deployment, profile and size. Times and costs have a unit and three digits.
        assert!(shown.len() == 10 && ["us", "ms", "s"].contains(&shown[5]), "{columns}");
        assert!(shown[8].starts_with('$') && shown[8].len() <= 7, "{columns}");
        assert_eq!(find(&prior, "Planned").unwrap()["reason"], "PriorProfile", "{prior}");
        assert_eq!(prior["saving"], "n/a");
        first.wait_for_reason("Planned", "MeasuredProfile").await;
        let profiles = profiles(scene).await;
        assert_eq!(profiles.len(), 1, "{profiles:?}");
        let profile: Value = serde_json::from_str(profiles[0]["spec"]["json"].as_str().unwrap()).unwrap();
        assert_eq!(profile["origin"], "measured");
        let measured = first.wait_until_settled().await;
        // The plan uses the measured profile: other times, and the resulting saving.
        let (assumed, planned) = (plan(scene, "first", &prior).await, plan(scene, "first", &measured).await);
        assert_eq!((&assumed["profile"], &planned["profile"]), (&json!("Prior"), &json!("Measured")));
        for time in ["ttftSeconds", "tpotSeconds", "prefillSeconds", "decodeSeconds"] {
            assert_ne!(
                assumed["numbers"]["times"][time], planned["numbers"]["times"][time],
                "{time}: {planned}"
            );
        }
        let share = planned["numbers"]["savings"]["mix"].as_f64().expect("all experts fit into one function");
        let saving =
            if share < 0.0 { "n/a (costs more)".to_owned() } else { format!("{:.0} %", share * 100.0) };
        assert_eq!(measured["saving"], saving);

        let second = Deployment::apply(scene, "second", &spec("Never")).await;
        second.wait_for_condition("Ready", "True").await;
        second.wait_for_reason("Planned", "MeasuredProfile").await;
        let profilers = audit::entries_since(cluster, start).into_iter().filter(|request| {
            let created = request.verb == "create" && request.resource() == "pods";
            created && request.namespace() == scene.namespace && request.name().starts_with("remoe-profile-")
        });
        assert_eq!(profilers.count(), 1, "pods that measured");
        assert_eq!(scene.kubectl(&["get", "pods", "--selector", PROFILER, "--output", "name"]).await, "");

        let answer = chat(first.client_addresses(scene).await[0], "first", "Read Genesis 1:1.").await;
        assert!(answer["usage"]["remoe"]["experts"]["remote"].as_u64() > Some(0), "{answer}");

        first.delete().await;
        // The other deployment still needs it.
        second.wait_for_condition("Ready", "True").await;
        assert_eq!(self::profiles(scene).await.len(), 1);
        second.delete().await;
        until(LONG, "the end of the profile", async || self::profiles(scene).await.is_empty().then_some(()))
            .await;
    })
    .await;
}

/// A supplied profile is used from the start, and nothing is measured.
#[tokio::test(flavor = "multi_thread")]
async fn supplied_profile_is_used_or_reported_if_invalid() {
    Scene::run("supplied_profile_is_used_or_reported_if_invalid", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        claim::with_demo_model(scene, "models").await;
        let mut wanted = spec("Auto");
        wanted["profile"] = json!({"configMapName": "mine"});
        let deployment = Deployment::apply(scene, "demo", &wanted).await;
        let missing = deployment.wait_for_reason("Planned", "ProfileMissing").await;
        assert!(missing["message"].as_str().unwrap().contains("missing ConfigMap mine"), "{missing}");
        scene.kubectl(&["create", "configmap", "mine", "--from-literal=profile.json={}"]).await;
        deployment.wait_for_reason("Planned", "ProfileInvalid").await;
    })
    .await;
}

/// Returns the spec of the running plan by `status`.
async fn plan(scene: &Scene, deployment: &str, status: &Value) -> Value {
    let name = format!("{deployment}-{}", status["plan"].as_str().expect("a plan runs"));
    let plan = scene.kubectl(&["get", "moeplan", &name, "--output", "json"]).await;
    serde_json::from_str::<Value>(&plan).expect("kubectl prints JSON")["spec"].clone()
}

const PROFILER: &str = "app.kubernetes.io/component=profiler";

fn spec(mode: &str) -> Value {
    json!({
        "model": {"source": "pvc://models/demo"},
        "main": {"memoryMB": {"min": 200, "max": 2000, "step": 100}},
        "remoteExperts": {
            "mode": mode, "maxReplicas": 1, "memoryMB": {"min": 100, "max": 1000, "step": 100},
        },
    })
}

async fn profiles(scene: &Scene) -> Vec<Value> {
    let listed = scene.kubectl(&["get", "moerecords", "--output", "json"]).await;
    let listed: Value = serde_json::from_str(&listed).expect("kubectl prints JSON");
    let records = listed["items"].as_array().expect("a list has items").iter();
    records.filter(|record| record["spec"]["of"] == "Profile").cloned().collect()
}
