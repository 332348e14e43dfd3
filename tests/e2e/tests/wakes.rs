//! Sleep and wake at the worst moments: whoever is killed, nobody who asked is lost.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use remoe_e2e::cluster::Cluster;
use remoe_e2e::deployment::Deployment;
use remoe_e2e::gateways::{self, Answered};
use remoe_e2e::scene::Scene;
use remoe_e2e::{claim, figures, pods, release};
use remoe_tests::deadline::{LONG, until};
use remoe_tests::process::signal;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

fn spec(window: &str) -> Value {
    json!({
        "model": {"source": "pvc://models/demo"},
        "profile": figures::reference(),
        "scaling": {"min": 0, "idleWindow": window},
        "main": {"memoryMB": {"min": 200, "max": 4000}},
        "remoteExperts": {"mode": "Always", "memoryMB": {"min": 100, "max": 1000}, "maxReplicas": 1},
    })
}

async fn serving(scene: &Scene, window: &str) -> Deployment {
    claim::with_demo_model(scene, "models").await;
    let demo = Deployment::apply(scene, "demo", &spec(window)).await;
    demo.condition("Ready", "True").await;
    demo
}

async fn functions(scene: &Scene) -> BTreeSet<String> {
    pods::selected(scene, pods::FUNCTIONS).await.iter().filter_map(Pod::uid).collect()
}

/// Kills the process of the operator's pod; its node starts it again.
async fn kill_operator(cluster: &Cluster) {
    let api = Api::<Pod>::namespaced(cluster.client.clone(), release::NAMESPACE);
    let ours = ListParams::default().labels("app.kubernetes.io/component=operator");
    let pods = api.list(&ours).await.unwrap().items;
    let process = pods.iter().find_map(pods::process).expect("the operator runs");
    signal(process, Signal::KILL);
}

/// The operator, the first main function and one of two gateways are killed while functions start.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_killed_while_functions_start_nobody_is_lost() {
    Scene::run("whoever_is_killed_while_functions_start_nobody_is_lost", async |scene| {
        let cluster = &scene.cluster;
        let mut alone = release::exclusive(cluster, 1).await;
        alone.install(cluster, &["replicas=1", "gateway.replicas=2"]).await;
        let demo = serving(scene, "3s").await;
        let name = format!("{}/demo", scene.namespace);
        for (wake, victim) in ["operator", "main", "gateway"].into_iter().enumerate() {
            gateways::asleep(scene, &demo).await;
            let doors = gateways::pods(cluster, 2).await;
            let (one, other) = (gateways::address(&doors[0]), gateways::address(&doors[1]));
            let asking = join_all((0..20).map(|number| {
                let (first, second) = if number % 2 == 0 { (one, other) } else { (other, one) };
                gateways::ask(first, second, &name)
            }));
            let killing = async {
                gateways::phase(scene, "demo", "Waking").await;
                match victim {
                    "operator" => kill_operator(cluster).await,
                    "gateway" => {
                        let api = Api::<Pod>::namespaced(cluster.client.clone(), release::NAMESPACE);
                        let at_once = DeleteParams::default().grace_period(0);
                        api.delete(&doors[0].name_any(), &at_once).await.unwrap();
                    }
                    _ => {
                        let main = until(LONG, "a main function that loads", async || {
                            let mains = pods::selected(scene, "remoe.dev/function=main").await;
                            mains.iter().find_map(pods::process)
                        })
                        .await;
                        signal(main, Signal::KILL);
                    }
                }
            };
            let (answers, ()) = tokio::join!(asking, killing);
            assert_eq!(answers.len(), 20, "{victim}");
            assert_eq!(
                gateways::demand(scene, "demo").await["spec"]["wakes"],
                wake + 1,
                "{victim}: one wake"
            );
        }
        gateways::asleep(scene, &demo).await;
        demo.delete().await;
        demo.gone(scene).await;
    })
    .await;
}

/// Who asks while functions are about to end is answered by the same; asking again and again around that moment wakes
/// and sleeps, and nobody is lost.
#[tokio::test(flavor = "multi_thread")]
async fn who_asks_while_functions_are_about_to_end_keeps_them() {
    Scene::run("who_asks_while_functions_are_about_to_end_keeps_them", async |scene| {
        let cluster = &scene.cluster;
        let _release = release::shared(cluster).await;
        let demo = serving(scene, "2s").await;
        let gateway = gateways::address(&gateways::pods(cluster, 1).await[0]);
        let name = format!("{}/demo", scene.namespace);
        // Draining lasts for a moment: it is met sooner or later.
        let mut kept = 0;
        for round in 0..12_u64 {
            gateways::ask(gateway, gateway, &name).await;
            let (before, woken) = (functions(scene).await, wakes(scene).await);
            tokio::time::sleep(Duration::from_millis(1_900 + 60 * round)).await;
            gateways::ask(gateway, gateway, &name).await;
            if wakes(scene).await == woken {
                kept += 1;
                assert_eq!(functions(scene).await, before, "nobody woke: the same functions");
            }
        }
        eprintln!("{kept} of 12 requests around the end of the window kept the functions");
        gateways::asleep(scene, &demo).await;
        demo.delete().await;
        demo.gone(scene).await;
    })
    .await;
}

async fn wakes(scene: &Scene) -> u64 {
    gateways::demand(scene, "demo").await["spec"]["wakes"].as_u64().unwrap_or(0)
}

/// What a wake takes beside what the node takes to start the same containers: printed, for the docs.
#[tokio::test(flavor = "multi_thread")]
async fn a_wake_beside_the_start_of_its_pods() {
    Scene::run("a_wake_beside_the_start_of_its_pods", async |scene| {
        let cluster = &scene.cluster;
        let _release = release::exclusive(cluster, 1).await;
        let demo = serving(scene, "2s").await;
        let copies: Vec<Pod> = pods::selected(scene, pods::FUNCTIONS).await.iter().map(copy).collect();
        let gateway = gateways::address(&gateways::pods(cluster, 1).await[0]);
        let name = format!("{}/demo", scene.namespace);
        for _ in 0..5 {
            gateways::asleep(scene, &demo).await;
            let plain = started(scene, &copies).await;
            let Answered { body, took } = gateways::ask(gateway, gateway, &name).await;
            eprintln!(
                "{} pods: containers of their copies run after {:.2} s; a wake answers after {:.2} s: {}",
                copies.len(),
                plain.as_secs_f64(),
                took.as_secs_f64(),
                body["usage"]["remoe"]["timing"]
            );
        }
    })
    .await;
}

/// A pod with the same containers that belongs to nobody.
fn copy(pod: &Pod) -> Pod {
    let mut spec = pod.spec.clone().unwrap();
    spec.node_name = None;
    spec.topology_spread_constraints = None;
    spec.termination_grace_period_seconds = Some(0);
    let metadata = kube::api::ObjectMeta {
        name: Some(format!("copy-{}", pod.name_any())),
        ..kube::api::ObjectMeta::default()
    };
    Pod { metadata, spec: Some(spec), status: None }
}

/// Makes `pods` at once, and returns how long it takes until all of their containers run. They are gone then.
async fn started(scene: &Scene, pods: &[Pod]) -> Duration {
    let api = scene.api::<Pod>();
    let begun = Instant::now();
    join_all(pods.iter().map(|pod| async { api.create(&PostParams::default(), pod).await.unwrap() })).await;
    let runs = |pod: &Pod| {
        let containers = pod.status.iter().filter_map(|status| status.container_statuses.as_ref()).flatten();
        containers.into_iter().any(|each| each.state.as_ref().is_some_and(|state| state.running.is_some()))
    };
    let took = until(LONG, "the copies to run", async || {
        let there = api.list(&ListParams::default()).await.unwrap().items;
        let copies: Vec<_> = there.iter().filter(|pod| pod.name_any().starts_with("copy-")).collect();
        (copies.len() == pods.len() && copies.iter().all(|pod| runs(pod))).then(|| begun.elapsed())
    })
    .await;
    for pod in pods {
        api.delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await.unwrap();
    }
    until(LONG, "the copies to be gone", async || {
        let there = api.list(&ListParams::default()).await.unwrap().items;
        there.iter().all(|pod| !pod.name_any().starts_with("copy-")).then_some(())
    })
    .await;
    took
}
