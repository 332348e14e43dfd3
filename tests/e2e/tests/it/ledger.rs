//! All components are killed during many requests: finally the ledgers equal the costs reported to clients, and the
//! paid time equals the pods' lifetimes.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::DeleteParams;
use remoe_e2e::pod_lives::{self as lives, LOOK, PodLives};
use remoe_e2e::scene::Scene;
use remoe_e2e::{claim, demo, gateways, pods, release};
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::load_clients::{LoadClients, exported};
use remoe_test_support::process::signal;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::net::SocketAddr;
use tokio::sync::watch;

const CLIENTS: usize = 16;
/// Number of replicas of the operator and of the gateways.
const REPLICAS: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KilledFunction {
    /// The leading operator.
    Operator,
    Gateway,
    Main,
    Remote,
}

#[derive(Debug, Clone, Copy)]
enum KillMethod {
    /// Kills the process; the node restarts it in the same pod.
    Process,
    /// Deletes the pod without grace; its node ends the process soon.
    Pod,
}

const KILLS: [(KilledFunction, KillMethod); 8] = [
    (KilledFunction::Operator, KillMethod::Process),
    (KilledFunction::Remote, KillMethod::Process),
    (KilledFunction::Gateway, KillMethod::Process),
    (KilledFunction::Main, KillMethod::Process),
    (KilledFunction::Operator, KillMethod::Pod),
    (KilledFunction::Remote, KillMethod::Pod),
    (KilledFunction::Gateway, KillMethod::Pod),
    (KilledFunction::Main, KillMethod::Pod),
];

impl KilledFunction {
    fn selector(self) -> &'static str {
        match self {
            Self::Operator => "app.kubernetes.io/component=operator",
            Self::Gateway => "app.kubernetes.io/component=gateway",
            Self::Main => "remoe.dev/function=main",
            Self::Remote => "remoe.dev/function,remoe.dev/function!=main",
        }
    }

    /// Kills one pod or its process, calls `gone` with the pod, and waits for a replacement, which may be the same
    /// pod restarted.
    async fn kill(self, scene: &Scene, how: KillMethod, gone: impl FnOnce(&Pod)) {
        let before = pods::list(scene, self.selector()).await;
        let one = match self {
            Self::Operator => {
                scene.api::<Pod>().get(&release::leader(&scene.cluster).await.pod).await.unwrap()
            }
            _ => before[0].clone(),
        };
        let at = Timestamp::now();
        match how {
            KillMethod::Process => {
                signal(pods::process_id(&one).expect("who serves has a process"), Signal::KILL)
            }
            KillMethod::Pod => {
                let at_once = DeleteParams::default().grace_period(0);
                scene.api::<Pod>().delete(&one.name_any(), &at_once).await.unwrap();
            }
        }
        gone(&one);
        until(LONG, &format!("another {self:?}"), async || {
            let now = pods::list(scene, self.selector()).await;
            let is_killed =
                |pod: &Pod| pod.uid() == one.uid() && pods::restart_count(pod) == pods::restart_count(&one);
            let is_whole = now.len() == before.len() && now.iter().all(pods::is_ready);
            (is_whole && !now.iter().any(is_killed)).then_some(())
        })
        .await;
        if self == Self::Operator {
            let led = async || (release::leader(&scene.cluster).await.renewed > at).then_some(());
            until(LONG, "an operator that leads since", led).await;
        }
    }
}

fn dollars(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no amount")) / 1e9
}

/// `REMOE_COST_REQUESTS` is the number of complete answers.
#[tokio::test(flavor = "multi_thread")]
async fn ledgers_match_client_costs_after_any_kill() {
    Scene::run("ledgers_match_client_costs_after_any_kill", async |scene| {
        let count: usize = std::env::var("REMOE_COST_REQUESTS").map_or(900, |count| count.parse().unwrap());
        let cluster = &scene.cluster;
        let mut alone = release::exclusive(cluster, 1).await;
        // Ledgers outlive the pods of their gateways.
        let system = Scene { cluster: cluster.clone(), namespace: release::NAMESPACE.to_owned() };
        let ledgers = format!("ledgers-of-{}", scene.namespace);
        let folder = claim::create(&system, &ledgers, &[]).await;
        let replicas = [format!("replicas={REPLICAS}"), format!("gateway.replicas={REPLICAS}")];
        let kept = format!("gateway.ledger.claimName={ledgers}");
        alone.install(cluster, &[&replicas[0], &replicas[1], &kept]).await;
        let gateway_pods = async || gateways::pods(cluster, REPLICAS).await;
        let addresses = async || gateway_pods().await.iter().map(gateways::address).collect::<Vec<_>>();

        let lives = PodLives::default();
        let following = tokio::spawn({
            let (lives, scene) = (lives.clone(), scene.clone());
            async move {
                loop {
                    lives.look(&scene).await;
                    tokio::time::sleep(LOOK).await;
                }
            }
        });
        let more = json!({
            "scaling": {"min": 0, "idleWindow": "40s"},
            "pricing": lives::pricing(),
            // Replaces only killed pods.
            "prediction": {"replan": "Never"},
        });
        let demo = demo::deploy(scene, &more).await;
        let (address_sender, at) = watch::channel(addresses().await);
        let clients = LoadClients::start(CLIENTS, at, &format!("{}/demo", scene.namespace));
        for (kill, (victim, how)) in KILLS.into_iter().enumerate() {
            let due = (kill + 1) * count / (KILLS.len() + 1);
            until(LONG, "answers", async || (clients.answers() >= due).then_some(())).await;
            until(LONG, "requests under way", async || (clients.running() > 0).then_some(())).await;
            let (running, answers, broken) = (clients.running(), clients.answers(), clients.broken());
            let of = if matches!(victim, KilledFunction::Operator | KilledFunction::Gateway) { &system } else { scene };
            victim
                .kill(of, how, |one| {
                    // As with a Service, clients stop using a gateway whose pod is gone.
                    let is_gone = |at: &SocketAddr| victim == KilledFunction::Gateway && *at == gateways::address(one);
                    address_sender.send_modify(|gateways| gateways.retain(|gateway| !is_gone(gateway)));
                })
                .await;
            address_sender.send_replace(addresses().await);
            let again = async || (clients.answers() > answers + CLIENTS).then_some(());
            until(LONG, "answers after a kill", again).await;
            eprintln!(
                "{victim:?}, {how:?}: {running} requests were under way; until another one was there {} were answered and \
                 {} broke off",
                clients.answers() - answers,
                clients.broken() - broken
            );
        }
        until(LONG, "the last answers", async || (clients.answers() >= count).then_some(())).await;
        let outcome = clients.stop().await;
        assert!(outcome.asked.len() > outcome.told.len(), "no client noticed any kill");
        gateways::wait_until_asleep(scene, &demo).await;
        following.abort();
        lives.look(scene).await;

        let door = gateway_pods().await.remove(0);
        let cost = async |arguments: &[&str]| -> Value {
            let said = gateways::cost(cluster, &door, arguments).await;
            serde_json::from_str(&said).expect("remoe cost prints JSON")
        };
        until(LONG, "ledgers that know of every end", async || {
            (cost(&["--json"]).await["alive"] == 0).then_some(())
        })
        .await;
        let account = cost(&["--json", "--reconcile"]).await;
        let exported = exported(&gateways::cost(cluster, &door, &["--export", "json"]).await);
        let others = outcome.are_in(&exported, &account);
        assert_eq!(account["reconciled"], true, "{account}");
        let part = |name: &str| account[name].as_i64().unwrap();
        let parts = ["total", "earlier", "failed", "idle", "cold_start", "overlap", "overhead", "residual"];
        assert_eq!(parts.into_iter().map(part).sum::<i64>(), part("paid") + part("unknown"), "{account}");
        let (lived, dearest) = lives.dollars();
        let paid = dollars(&account["paid"]) - dollars(&account["overhead"]);
        let estimated = account["estimated_s"].as_f64().unwrap();
        eprintln!(
            "{} whole answers of {} requests, {others} in the ledgers that no client had whole; alive pod-seconds x price: \
             ${lived:.9}; the ledgers: ${paid:.9} of functions, {estimated} s of them estimated: {account}",
            outcome.told.len(),
            outcome.asked.len(),
        );
        let most = lived * 0.01 + estimated * dearest;
        assert!((paid - lived).abs() <= most, "{paid} by the ledgers, {lived} by the API: {account}");

        demo.delete().await;
        demo.wait_until_gone(scene).await;
        alone.install(cluster, &["replicas=1"]).await;
        // Waits until no pod uses it.
        system.kubectl(&["delete", "persistentvolumeclaim", &ledgers]).await;
        cluster.kubectl(&["delete", "persistentvolume", &format!("{}-{ledgers}", release::NAMESPACE)]).await;
        std::fs::remove_dir_all(&folder).expect("the ledgers' folder can be removed");
    })
    .await;
}
