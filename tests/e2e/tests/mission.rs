//! The mission from one end to the other: a chart, a resource, a request that pods answer for each other, sleep, wake,
//! and what all of it cost.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;
use remoe_e2e::prometheus::{Prometheus, panels};
use remoe_e2e::scene::Scene;
use remoe_e2e::{demo, gateways, pods, release};
use remoe_tests::deadline::{LONG, until};
use remoe_tests::raw;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::sleep;

/// Dollars an hour.
const CORE: f64 = 0.03;
const GIGABYTE: f64 = 0.004;
/// Between two looks at what pods there are.
const LOOK: Duration = Duration::from_millis(100);
const KEYS: &str = "tenants: [{name: team, keys: [sk-team], dollarsPerDay: 1}]";

/// What this test saw of the life of a pod, in seconds since 1970, and what it reserves.
#[derive(Debug, Clone, Copy)]
struct Life {
    started: f64,
    ended: Option<f64>,
    per_hour: f64,
}

type Lives = Arc<Mutex<BTreeMap<String, Life>>>;

fn now() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64()
}

/// Dollars an hour of what a pod asks for: the amounts that the operator writes.
fn per_hour(pod: &Pod) -> f64 {
    let containers = &pod.spec.as_ref().unwrap().containers;
    let requests = containers[0].resources.as_ref().unwrap().requests.as_ref().unwrap();
    let amount = |name: &str| {
        let text = &requests[name].0;
        let units = [("m", 1e-3), ("M", 1e6), ("G", 1e9), ("", 1.0)];
        let (number, unit) =
            units.iter().find_map(|(unit, by)| Some((text.strip_suffix(unit)?, by))).unwrap();
        number.parse::<f64>().unwrap() * unit
    };
    amount("cpu") * CORE + amount("memory") / 1e9 * GIGABYTE
}

/// Follows the pods of functions for ever, and has Prometheus scrape those that there are.
async fn follow(scene: Scene, lives: Lives, prometheus: Arc<Prometheus>, gateway: SocketAddr) {
    let api = scene.api::<Pod>();
    loop {
        let there = api.list(&ListParams::default().labels(pods::FUNCTIONS)).await.unwrap().items;
        let seen = now();
        {
            let mut lives = lives.lock().unwrap();
            for pod in &there {
                let started = pod.status.as_ref().and_then(|status| status.start_time.clone());
                let Some(started) = started else { continue };
                let started = started.0.as_second() as f64;
                let life = Life { started, ended: None, per_hour: per_hour(pod) };
                lives.entry(pod.uid().unwrap()).or_insert(life);
            }
            let gone = |uid: &String| there.iter().all(|pod| pod.uid().as_ref() != Some(uid));
            for (_, life) in lives.iter_mut().filter(|(uid, _)| gone(uid)) {
                life.ended.get_or_insert(seen);
            }
        }
        let metrics = |pod: &Pod| {
            let ip = pod.status.as_ref()?.pod_ip.clone()?;
            let port = if pod.labels()["remoe.dev/function"] == "main" { 8000 } else { 9090 };
            Some(format!("{ip}:{port}"))
        };
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

/// What the gateway's ledger says of this deployment; it is the only one that this gateway has ever had.
async fn ledger(scene: &Scene, gateway: &Pod) -> Value {
    let name = gateway.name_any();
    let arguments = [
        "exec",
        "--namespace",
        release::NAMESPACE,
        &name,
        "--",
        "remoe",
        "cost",
        "/ledger",
        "--json",
        "--reconcile",
    ];
    let said = scene.cluster.kubectl(&arguments).await;
    serde_json::from_str(&said).expect("remoe cost prints JSON")
}

fn dollars(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no amount")) / 1e9
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resource_serves_sleeps_wakes_and_says_what_it_cost() {
    Scene::run("a_resource_serves_sleeps_wakes_and_says_what_it_cost", async |scene| {
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
        let (lives, prometheus) = (Lives::default(), Arc::new(Prometheus::start().await));
        let following = tokio::spawn(follow(scene.clone(), lives.clone(), prometheus.clone(), gateway));

        let more = json!({
            "scaling": {"min": 0, "idleWindow": "40s"},
            "pricing": {"cpuCoreHour": CORE.to_string(), "memoryGBHour": GIGABYTE.to_string()},
        });
        let demo = demo::serving(scene, &more).await;
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
                gateways::asleep(scene, &demo).await;
                until(LONG, "a price of nothing", async || {
                    let rates = prometheus.query("sum(remoe_cost_rate_nanodollars_per_hour)").await;
                    let free = demo.status().await["costPerHour"] == "$0";
                    (free && rates.first().is_some_and(|(_, rate)| *rate == 0.0)).then_some(())
                })
                .await;
            }
        }
        // While it is awake, and after what happened is in the series.
        for (panel, expression) in panels("cost") {
            let what = format!("{panel}: {expression}");
            until(LONG, &what, async || {
                let found = prometheus.query(&expression).await;
                found.iter().any(|(_, value)| value.is_finite()).then_some(())
            })
            .await;
        }
        gateways::asleep(scene, &demo).await;
        sleep(Duration::from_secs(2)).await;
        following.abort();

        let account = ledger(scene, &door).await;
        let lived: f64 = lives
            .lock()
            .unwrap()
            .values()
            .map(|life| (life.ended.unwrap() - life.started) * life.per_hour / 3600.0)
            .sum();
        let paid = dollars(&account["paid"]) - dollars(&account["overhead"]);
        eprintln!("alive pod-seconds x price: ${lived:.9}; the ledger: ${paid:.9} of functions: {account}");
        assert!((paid / lived - 1.0).abs() < 0.01, "{paid} by the ledger, {lived} by the API: {account}");
        assert!((dollars(&account["total"]) - told).abs() < 1e-12, "{told} was told: {account}");
        assert_eq!((account["reconciled"].as_bool(), account["unknown"].as_u64()), (Some(true), Some(0)));
        demo.delete().await;
        demo.gone(scene).await;
        cluster.kubectl(&forget).await;
    })
    .await;
}
