//! Complete use case: install the chart, apply a resource, serve requests, scale to zero, wake, and account for all
//! costs.

use k8s_openapi::api::core::v1::Pod;
use remoe_e2e::pod_lives::{self as lives, LOOK, PodLives};
use remoe_e2e::prometheus::{Prometheus, panels};
use remoe_e2e::scene::Scene;
use remoe_e2e::{demo, gateways, release};
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::raw;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

const KEYS: &str = "tenants: [{name: team, keys: [sk-team], dollarsPerDay: 1}, \
     {name: metrics, keys: [sk-metrics], admin: true, models: []}]";

/// Observes the pods of functions without end and makes Prometheus scrape them.
async fn follow(scene: Scene, lives: PodLives, prometheus: Arc<Prometheus>, gateway: SocketAddr) {
    loop {
        let there = lives.look(&scene).await;
        let metrics = |pod: &Pod| Some(format!("{}:9090", pod.status.as_ref()?.pod_ip.clone()?));
        let own = format!("{}:9090", gateway.ip());
        prometheus.scrape(&there.iter().filter_map(metrics).chain([own]).collect::<Vec<_>>());
        sleep(LOOK).await;
    }
}

async fn ask(gateway: SocketAddr, model: &str) -> Value {
    let body = json!({"model": model, "prompt": "In the beginning", "max_tokens": 24, "temperature": 0,
        "ignore_eos": true, "include_figures": true});
    let request = raw::post("/v1/completions", &body.to_string());
    let answer =
        raw::ask(gateway, request.replacen("\r\n", "\r\nAuthorization: Bearer sk-team\r\n", 1)).await;
    answer.ok()["usage"]["remoe"].clone()
}

fn dollars(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no amount")) / 1e9
}

#[tokio::test(flavor = "multi_thread")]
async fn deployment_serves_sleeps_wakes_and_accounts_its_cost() {
    Scene::run("deployment_serves_sleeps_wakes_and_accounts_its_cost", async |scene| {
        let cluster = &scene.cluster;
        let mut alone = release::exclusive(cluster, 1).await;
        let secret = format!("--from-literal=keys.yaml={KEYS}");
        let place = ["--namespace", release::NAMESPACE];
        let forget = ["delete", "secret", "keys", "--ignore-not-found", "--namespace", release::NAMESPACE];
        cluster.kubectl(&forget).await;
        cluster.kubectl(&[&["create", "secret", "generic", "keys", &secret][..], &place].concat()).await;
        alone.install(cluster, &["replicas=1", "gateway.keysSecretName=keys"]).await;
        let door = gateways::pods(cluster, 1).await.remove(0);
        let gateway = gateways::address(&door);
        let (lives, prometheus) = (PodLives::default(), Arc::new(Prometheus::start("sk-metrics").await));
        let following = tokio::spawn(follow(scene.clone(), lives.clone(), prometheus.clone(), gateway));

        let more = json!({
            "scaling": {"min": 0, "idleWindow": "40s"},
            "pricing": lives::pricing(),
        });
        let demo = demo::deploy(scene, &more).await;
        let name = format!("{}/demo", scene.namespace);
        let mut told = 0.0;
        for wake in 0..2 {
            for _ in 0..80 {
                let figures = ask(gateway, &name).await;
                assert!(figures["experts"]["remote"].as_u64() > Some(0), "remote pods answer: {figures}");
                told += dollars(&figures["cost"]["total"]);
                assert!(dollars(&figures["cost"]["remote"]) > 0.0, "{figures}");
                sleep(Duration::from_millis(500)).await;
            }
            let columns = scene.kubectl(&["get", "moed", "demo"]).await;
            assert!(columns.contains("$/H") && columns.contains('$'), "{columns}");
            eprintln!("{columns}");
            if wake == 0 {
                gateways::wait_until_asleep(scene, &demo).await;
                until(LONG, "a price of nothing", async || {
                    let rates = prometheus.query("sum(remoe_cost_rate_nanodollars_per_hour)").await;
                    let free = demo.status().await["costPerHour"] == "$0";
                    (free && rates.first().is_some_and(|(_, rate)| *rate == 0.0)).then_some(())
                })
                .await;
            }
        }
        // Reads while it is awake, after the series have the events.
        for (panel, expression) in panels("cost") {
            let what = format!("{panel}: {expression}");
            until(LONG, &what, async || {
                let found = prometheus.query(&expression).await;
                found.iter().any(|(_, value)| value.is_finite()).then_some(())
            })
            .await;
        }
        gateways::wait_until_asleep(scene, &demo).await;
        sleep(Duration::from_secs(2)).await;
        following.abort();

        // The only ledger of this gateway.
        let account = gateways::cost(cluster, &door, &["--json", "--reconcile"]).await;
        let account: Value = serde_json::from_str(&account).expect("remoe cost prints JSON");
        let (lived, _) = lives.dollars();
        let paid = dollars(&account["paid"]) - dollars(&account["overhead"]);
        eprintln!("alive pod-seconds x price: ${lived:.9}; the ledger: ${paid:.9} of functions: {account}");
        assert!((paid / lived - 1.0).abs() < 0.01, "{paid} by the ledger, {lived} by the API: {account}");
        assert!((dollars(&account["total"]) - told).abs() < 1e-12, "{told} was told: {account}");
        assert_eq!((account["reconciled"].as_bool(), account["unknown"].as_u64()), (Some(true), Some(0)));
        demo.delete().await;
        demo.wait_until_gone(scene).await;
        cluster.kubectl(&forget).await;
    })
    .await;
}
