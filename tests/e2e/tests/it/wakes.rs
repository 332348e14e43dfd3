//! Scale to zero and wakes at critical moments: no request is lost, whatever component is killed.

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use remoe_e2e::cluster::Cluster;
use remoe_e2e::deployment::Deployment;
use remoe_e2e::gateways::{self, TimedResponse};
use remoe_e2e::scene::Scene;
use remoe_e2e::{claim, demo, pods, release};
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::http;
use remoe_test_support::process::signal;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn scale_to_zero(window: &str) -> Value {
    json!({"scaling": {"min": 0, "idleWindow": window}})
}

async fn deploy_demo(scene: &Scene, window: &str) -> Deployment {
    demo::deploy(scene, &scale_to_zero(window)).await
}

async fn function_uids(scene: &Scene) -> BTreeSet<String> {
    pods::list(scene, pods::FUNCTIONS).await.iter().filter_map(Pod::uid).collect()
}

/// Kills the process of the operator's pod, which its node restarts.
async fn kill_operator(cluster: &Cluster) {
    let api = Api::<Pod>::namespaced(cluster.client.clone(), release::NAMESPACE);
    let ours = ListParams::default().labels("app.kubernetes.io/component=operator");
    let pods = api.list(&ours).await.unwrap().items;
    let process = pods.iter().find_map(pods::process_id).expect("the operator runs");
    signal(process, Signal::KILL);
}

/// Number of requests that wait for one wake.
const CLIENTS: usize = 50;

/// The operator, the first main function and one of two gateways are killed while functions start.
#[tokio::test(flavor = "multi_thread")]
async fn kills_during_start_lose_no_request() {
    Scene::run("kills_during_start_lose_no_request", async |scene| {
        let cluster = &scene.cluster;
        let mut alone = release::exclusive(cluster, 1).await;
        alone.install(cluster, &["replicas=1", "gateway.replicas=2"]).await;
        let demo = deploy_demo(scene, "3s").await;
        let name = format!("{}/demo", scene.namespace);
        for (wake, victim) in ["operator", "main", "gateway"].into_iter().enumerate() {
            gateways::wait_until_asleep(scene, &demo).await;
            let gateway_pods = gateways::pods(cluster, 2).await;
            let (one, other) = (gateways::address(&gateway_pods[0]), gateways::address(&gateway_pods[1]));
            let requests = join_all((0..CLIENTS).map(|number| {
                let (first, second) = if number % 2 == 0 { (one, other) } else { (other, one) };
                gateways::ask(first, second, &name)
            }));
            let kill = async {
                gateways::wait_for_phase(scene, "demo", "Waking").await;
                match victim {
                    "operator" => kill_operator(cluster).await,
                    "gateway" => {
                        let api = Api::<Pod>::namespaced(cluster.client.clone(), release::NAMESPACE);
                        let at_once = DeleteParams::default().grace_period(0);
                        api.delete(&gateway_pods[0].name_any(), &at_once).await.unwrap();
                    }
                    _ => {
                        let main = until(LONG, "a main function that loads", async || {
                            let mains = pods::list(scene, "remoe.dev/function=main").await;
                            mains.iter().find_map(pods::process_id)
                        })
                        .await;
                        signal(main, Signal::KILL);
                    }
                }
            };
            let (answers, ()) = tokio::join!(requests, kill);
            assert_eq!(answers.len(), CLIENTS, "{victim}");
            assert_eq!(
                gateways::demand(scene, "demo").await["spec"]["wakes"],
                wake + 1,
                "{victim}: one wake"
            );
        }
        gateways::wait_until_asleep(scene, &demo).await;
        demo.delete().await;
        demo.wait_until_gone(scene).await;
    })
    .await;
}

/// Requests that arrive just before functions terminate are answered by the same functions. Repeated requests around
/// that moment wake functions, and none is lost.
#[tokio::test(flavor = "multi_thread")]
async fn request_during_scale_down_keeps_functions() {
    Scene::run("request_during_scale_down_keeps_functions", async |scene| {
        let cluster = &scene.cluster;
        let _release = release::shared(cluster).await;
        let demo = deploy_demo(scene, "2s").await;
        let gateway = gateways::address(&gateways::pods(cluster, 1).await[0]);
        let name = format!("{}/demo", scene.namespace);
        // Draining is short, so the test repeats until it observes it.
        let mut kept = 0;
        for round in 0..12_u64 {
            gateways::ask(gateway, gateway, &name).await;
            let (before, woken) = (function_uids(scene).await, wake_count(scene).await);
            tokio::time::sleep(Duration::from_millis(1_900 + 60 * round)).await;
            gateways::ask(gateway, gateway, &name).await;
            if wake_count(scene).await == woken {
                kept += 1;
                assert_eq!(function_uids(scene).await, before, "no wake: the same functions");
            }
        }
        eprintln!("{kept} of 12 requests around the end of the window kept the functions");
        gateways::wait_until_asleep(scene, &demo).await;
        demo.delete().await;
        demo.wait_until_gone(scene).await;
    })
    .await;
}

async fn wake_count(scene: &Scene) -> u64 {
    gateways::demand(scene, "demo").await["spec"]["wakes"].as_u64().unwrap_or(0)
}

/// Number of wakes of each deployment.
const WAKES: u64 = 20;
/// Number of concurrent deployments.
const SLEEPERS: usize = 5;

/// Moment between awake and asleep at which clients send requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// The phase has just changed.
    Phase(&'static str),
    /// The idle window since the last request ends within some milliseconds.
    WindowCloses(i64),
    /// The first function was told to terminate.
    FirstEnds,
    /// No function is left.
    AllGone,
    /// A starting main function has an address.
    MainHasAddress,
}

/// Moments of waking requests. Further requests follow at the moments after them during the start.
const WORST: [(Moment, &[Moment]); 8] = [
    (Moment::Phase("Draining"), &[]),
    (Moment::Phase("Asleep"), &[Moment::Phase("Waking")]),
    (Moment::FirstEnds, &[Moment::MainHasAddress]),
    (Moment::AllGone, &[Moment::Phase("Waking"), Moment::MainHasAddress]),
    (Moment::WindowCloses(-30), &[]),
    (Moment::WindowCloses(0), &[Moment::Phase("Active")]),
    (Moment::WindowCloses(60), &[]),
    (Moment::AllGone, &[Moment::Phase("Active")]),
];

const WINDOW: Duration = Duration::from_secs(1);

/// Waits for `moment` of the deployment `name`, whose last request was at `answered` and which had `woken` wakes by
/// then. Most moments are short: one that has passed counts.
async fn wait_for_moment(scene: &Scene, name: &str, moment: Moment, (answered, woken): (Instant, u64)) {
    let functions =
        || ListParams::default().labels(&format!("remoe.dev/deployment={name},{}", pods::FUNCTIONS));
    let ours = async || scene.api::<Pod>().list(&functions()).await.unwrap().items;
    match moment {
        Moment::Phase(phase) => {
            until(LONG, &format!("{name} to be {phase}"), async || {
                let spec = gateways::demand(scene, name).await["spec"].clone();
                let now = &spec["phase"];
                let passed = match phase {
                    "Draining" => now == "Asleep",
                    "Waking" | "Active" => spec["wakes"].as_u64() > Some(woken) && now != "Waking",
                    _ => false,
                };
                (now == phase || passed).then_some(())
            })
            .await;
        }
        Moment::WindowCloses(milliseconds) => {
            let offset = Duration::from_millis(milliseconds.unsigned_abs());
            let at = if milliseconds < 0 { WINDOW.saturating_sub(offset) } else { WINDOW + offset };
            tokio::time::sleep_until((answered + at).into()).await;
        }
        Moment::FirstEnds => {
            until(LONG, &format!("a function of {name} to end"), async || {
                let pods = ours().await;
                let ends = |pod: &Pod| pod.metadata.deletion_timestamp.is_some();
                (pods.is_empty() || pods.iter().any(ends)).then_some(())
            })
            .await;
        }
        Moment::AllGone => {
            until(LONG, &format!("the end of {name}'s functions"), async || {
                ours().await.is_empty().then_some(())
            })
            .await;
        }
        Moment::MainHasAddress => {
            until(LONG, &format!("an address of {name}'s main function"), async || {
                let spec = gateways::demand(scene, name).await["spec"].clone();
                let passed = spec["wakes"].as_u64() > Some(woken) && spec["phase"] != "Waking";
                (passed || spec["mains"].as_array().is_some_and(|mains| !mains.is_empty())).then_some(())
            })
            .await;
        }
    }
}

/// A hundred wakes of five deployments, with requests at critical moments: all requests are answered, no deployment
/// gets stuck, and nothing is left.
#[tokio::test(flavor = "multi_thread")]
async fn hundred_wakes_at_critical_moments_lose_no_request() {
    Scene::run("hundred_wakes_at_critical_moments_lose_no_request", async |scene| {
        let cluster = &scene.cluster;
        let _release = release::shared(cluster).await;
        claim::with_demo_model(scene, "models").await;
        let gateway = gateways::address(&gateways::pods(cluster, 1).await[0]);
        let window = format!("{}s", WINDOW.as_secs());
        let sleepers = join_all((0..SLEEPERS).map(|number| {
            let window = &window;
            async move {
                let demo =
                    Deployment::apply(scene, &format!("demo-{number}"), &demo::spec(&scale_to_zero(window)))
                        .await;
                demo.wait_for_condition("Ready", "True").await;
                demo
            }
        }))
        .await;
        let answered = join_all(sleepers.iter().enumerate().map(|(number, demo)| async move {
            let name = &demo.name;
            let model = format!("{}/{name}", scene.namespace);
            let ask = async |count: usize| {
                join_all((0..count).map(|_| gateways::ask(gateway, gateway, &model))).await.len()
            };
            let woken = async || gateways::demand(scene, name).await["spec"]["wakes"].as_u64().unwrap_or(0);
            let mut answered = ask(1).await;
            let mut rounds = number;
            while woken().await < WAKES {
                let last = (Instant::now(), woken().await);
                let (moment, then) = WORST[rounds % WORST.len()];
                rounds += 1;
                wait_for_moment(scene, name, moment, last).await;
                let later = join_all(then.iter().map(|moment| async {
                    wait_for_moment(scene, name, *moment, last).await;
                    ask(2).await
                }));
                let (first, later) = tokio::join!(ask(3), later);
                answered += first + later.iter().sum::<usize>();
            }
            eprintln!("{name}: {} wakes in {rounds} rounds, {answered} requests answered", woken().await);
            answered
        }))
        .await;
        eprintln!("{} requests, all of them answered", answered.iter().sum::<usize>());
        for demo in &sleepers {
            demo.wait_for_reason("Active", "Asleep").await;
        }
        until(LONG, "the last function to be gone", async || {
            let left = scene.api::<Pod>().list(&ListParams::default().labels(pods::FUNCTIONS)).await.unwrap();
            left.items.is_empty().then_some(())
        })
        .await;
        for demo in &sleepers {
            let demand = gateways::demand(scene, &demo.name).await;
            for entry in demand["status"]["gateways"].as_array().into_iter().flatten() {
                assert_eq!((&entry["waiting"], &entry["inFlight"]), (&json!(0), &json!(0)), "{demand}");
            }
            demo.delete().await;
            demo.wait_until_gone(scene).await;
        }
    })
    .await;
}

/// One of three gateways is paused or cut off from the API server and loses its Lease. The leader of two operators is
/// killed while it waits for the gateways' consent to scale down. The other gateways serve meanwhile, and that one
/// serves when it is back.
#[tokio::test(flavor = "multi_thread")]
async fn isolated_gateway_or_killed_leader_loses_no_request() {
    Scene::run("isolated_gateway_or_killed_leader_loses_no_request", async |scene| {
        let cluster = &scene.cluster;
        let mut alone = release::exclusive(cluster, 1).await;
        alone.install(cluster, &["replicas=2", "gateway.replicas=3"]).await;
        let demo = deploy_demo(scene, "2s").await;
        let name = format!("{}/demo", scene.namespace);
        let gateway_pods = gateways::pods(cluster, 3).await;
        let at: Vec<_> = gateway_pods.iter().map(gateways::address).collect();
        for round in 0..3 {
            gateways::ask(at[0], at[1], &name).await;
            let stopped = pods::process_id(&gateway_pods[2]).expect("the gateway runs");
            let is_cut_off = round > 0;
            if is_cut_off {
                gateways::cut_off(cluster, &gateway_pods[2]).await;
            } else {
                signal(stopped, Signal::STOP);
            }
            // A gateway that is cut off continues with its last state, until functions may end without its consent.
            // From then on its requests are unknown to others.
            let enough = Arc::new(AtomicBool::new(!is_cut_off));
            let held = tokio::spawn({
                let (address, name, enough) = (at[2], name.clone(), enough.clone());
                async move {
                    let mut answered = 0;
                    loop {
                        gateways::ask(address, address, &name).await;
                        answered += 1;
                        if enough.load(Ordering::SeqCst) {
                            return answered;
                        }
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                }
            });
            // It cannot confirm that it holds new requests, so functions stay until its Lease expires.
            gateways::wait_for_phase(scene, "demo", "Draining").await;
            signal(release::leader(cluster).await.process, Signal::KILL);
            if round == 1 {
                // A request arrives while no operator leads.
                gateways::ask(at[0], at[1], &name).await;
            }
            gateways::wait_until_asleep(scene, &demo).await;
            let woken = wake_count(scene).await;
            join_all((0..CLIENTS).map(|number| gateways::ask(at[number % 2], at[1 - number % 2], &name)))
                .await;
            assert_eq!(wake_count(scene).await, woken + 1, "one wake");
            assert!(!held.is_finished(), "an isolated gateway sends no request to functions");
            enough.store(true, Ordering::SeqCst);
            if is_cut_off {
                gateways::rejoin(cluster, &gateway_pods[2]).await;
            } else {
                signal(stopped, Signal::CONT);
            }
            let answered = held.await.unwrap();
            eprintln!("round {round}: the third gateway answered {answered} requests");
            gateways::pods(cluster, 3).await;
        }
        gateways::wait_until_asleep(scene, &demo).await;
        demo.delete().await;
        demo.wait_until_gone(scene).await;
    })
    .await;
}

/// Returns the (token, expert) pairs of an answer by place of computation.
fn computed_tokens(answer: &TimedResponse, how: &str) -> u64 {
    answer.body["usage"]["remoe"]["experts"][how].as_u64().expect("a count")
}

/// Remote functions scale to zero one by one while the main function runs, and requests wake them. All answers are
/// the same despite kills. The main function sleeps last, and all wake together.
#[tokio::test(flavor = "multi_thread")]
async fn sleeping_groups_wake_on_request_and_lose_none() {
    Scene::run("sleeping_groups_wake_on_request_and_lose_none", async |scene| {
        let cluster = &scene.cluster;
        let _release = release::exclusive(cluster, 1).await;
        let scaling = |window: &str| json!({"min": 0, "idleWindow": window, "remoteIdleWindow": "2s"});
        let demo = demo::deploy(scene, &json!({"scaling": scaling("1h")})).await;
        let gateway = gateways::address(&gateways::pods(cluster, 1).await[0]);
        let name = format!("{}/demo", scene.namespace);
        let main = async || {
            let mains = pods::list(scene, "remoe.dev/function=main").await;
            mains.iter().filter_map(Pod::uid).collect::<BTreeSet<_>>()
        };
        let first = main().await;
        let expected = gateways::ask(gateway, gateway, &name).await.body["choices"].clone();
        let mut awake = function_uids(scene).await;
        for victim in ["none", "operator", "remote function", "none"] {
            until(LONG, "all groups to sleep", async || {
                let groups = gateways::demand(scene, "demo").await["spec"]["groups"].clone();
                let sleep =
                    groups.as_array().is_some_and(|groups| groups.iter().all(|it| it["asleep"] == true));
                (sleep && function_uids(scene).await == first).then_some(())
            })
            .await;
            until(LONG, "a placement whose groups sleep", async || {
                let page = http::get(gateway, &format!("/v1/placement?model={name}")).await.body;
                let page: Value = serde_json::from_str(&page).unwrap();
                let groups = page["groups"].as_array().expect("groups").clone();
                let sleeps = |group: &Value| group["asleep"] == true && group["experts"] != "";
                (!groups.is_empty() && groups.iter().all(sleeps)).then_some(())
            })
            .await;
            let requests = join_all((0..CLIENTS).map(|_| gateways::ask(gateway, gateway, &name)));
            let kill = async {
                match victim {
                    "operator" => kill_operator(cluster).await,
                    "remote function" => {
                        let process = until(LONG, "a remote function that starts", async || {
                            let all = pods::list(scene, "remoe.dev/function!=main,remoe.dev/function").await;
                            all.iter().find_map(pods::process_id)
                        })
                        .await;
                        signal(process, Signal::KILL);
                    }
                    _ => {}
                }
            };
            let (answers, ()) = tokio::join!(requests, kill);
            assert!(answers.iter().all(|answer| answer.body["choices"] == expected), "{victim}");
            assert!(answers.iter().any(|answer| computed_tokens(answer, "fallback") > 0), "{victim}");
            until(LONG, "answers by the groups that were woken", async || {
                let answer = gateways::ask(gateway, gateway, &name).await;
                assert_eq!(answer.body["choices"], expected, "{victim}");
                (computed_tokens(&answer, "fallback") == 0 && computed_tokens(&answer, "remote") > 0)
                    .then_some(())
            })
            .await;
            let now = function_uids(scene).await;
            assert!(now.is_superset(&first) && now.is_disjoint(&(&awake - &first)), "{victim}: {now:?}");
            assert_eq!(gateways::demand(scene, "demo").await["spec"]["wakes"], 0, "the main function ran");
            awake = now;
        }
        demo.patch(&json!({"spec": {"scaling": scaling("2s")}})).await;
        gateways::wait_until_asleep(scene, &demo).await;
        let answers = join_all((0..CLIENTS).map(|_| gateways::ask(gateway, gateway, &name))).await;
        assert!(answers.iter().all(|answer| answer.body["choices"] == expected));
        assert_eq!(gateways::demand(scene, "demo").await["spec"]["wakes"], 1);
        gateways::wait_until_asleep(scene, &demo).await;
        demo.delete().await;
        demo.wait_until_gone(scene).await;
    })
    .await;
}

/// Prints for the docs the duration of a wake and the node's time to start the same containers.
#[tokio::test(flavor = "multi_thread")]
async fn wake_time_beside_pod_start_time() {
    Scene::run("wake_time_beside_pod_start_time", async |scene| {
        let cluster = &scene.cluster;
        let _release = release::exclusive(cluster, 1).await;
        let demo = deploy_demo(scene, "2s").await;
        let copies: Vec<Pod> = pods::list(scene, pods::FUNCTIONS).await.iter().map(plain_copy).collect();
        let gateway = gateways::address(&gateways::pods(cluster, 1).await[0]);
        let name = format!("{}/demo", scene.namespace);
        for _ in 0..5 {
            gateways::wait_until_asleep(scene, &demo).await;
            let plain = start_pods(scene, &copies).await;
            let TimedResponse { body, took } = gateways::ask(gateway, gateway, &name).await;
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

/// Returns a pod with the same containers, without an owner.
fn plain_copy(pod: &Pod) -> Pod {
    let mut spec = pod.spec.clone().unwrap();
    spec.node_name = None;
    spec.topology_spread_constraints = None;
    // Without their preStop hooks, which would take longer.
    spec.termination_grace_period_seconds = Some(0);
    spec.containers.iter_mut().for_each(|container| container.lifecycle = None);
    let metadata = kube::api::ObjectMeta {
        name: Some(format!("copy-{}", pod.name_any())),
        ..kube::api::ObjectMeta::default()
    };
    Pod { metadata, spec: Some(spec), status: None }
}

/// Creates `pods` together and returns the time until all their containers run. Deletes them afterwards.
async fn start_pods(scene: &Scene, pods: &[Pod]) -> Duration {
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
