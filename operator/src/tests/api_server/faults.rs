//! Faults of the API server and the network: conflicts, throttling, failures, lost answers, broken watches, stale
//! lists. Whatever happens, the end state is the same.

use crate::names::{COMPONENT, Component, label};
use crate::tests::api_server::proxy::{FAULTS, Proxy};
use crate::tests::api_server::routing_push::RecordingMain;
use crate::tests::api_server::stage::{Budget, Operator, POLL_INTERVAL, deploy, objects};
use crate::tests::api_server::{Server, eventually, with_server, with_servers};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use remoe_api::{ConditionType, MoEDeployment};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use tokio::time::sleep;

/// Additional arguments of the operator: main functions answer without certificates.
const FURTHER: [&str; 2] = ["--signer", "none"];
/// Checks without a write after which the operator is idle: longer than its retry delays.
const QUIET: u32 = 10;

/// Nodes on which every pod runs, and cooperative main functions.
struct Nodes {
    net: u8,
    next: AtomicUsize,
    /// Main functions by the UID of their pod.
    addresses: Mutex<BTreeMap<String, String>>,
    mains: Mutex<BTreeMap<String, RecordingMain>>,
}

impl Nodes {
    fn new() -> Self {
        static NETS: AtomicU8 = AtomicU8::new(100);
        Self {
            net: NETS.fetch_add(1, Ordering::Relaxed),
            next: AtomicUsize::new(0),
            addresses: Mutex::default(),
            mains: Mutex::default(),
        }
    }

    async fn run(&self, server: &Server) {
        let api = server.api::<Pod>();
        for pod in api.list(&ListParams::default()).await.unwrap() {
            if pod.metadata.deletion_timestamp.is_some() {
                continue;
            }
            let (uid, component) = (pod.uid().unwrap(), label(&pod.metadata, COMPONENT).to_owned());
            let known = self.addresses.lock().unwrap().get(&uid).cloned();
            let ip = known.unwrap_or_else(|| {
                let number = self.next.fetch_add(1, Ordering::Relaxed);
                format!("127.{}.{}.{}", self.net, number / 250, number % 250 + 1)
            });
            self.addresses.lock().unwrap().insert(uid.clone(), ip.clone());
            let is_main = component == Component::Main.name();
            if is_main && !self.mains.lock().unwrap().contains_key(&uid) {
                let main = RecordingMain::at(&ip).await;
                self.mains.lock().unwrap().insert(uid.clone(), main);
            }
            let is_told = !is_main || !self.mains.lock().unwrap()[&uid].received().is_empty();
            let ready = if is_told { "True" } else { "False" };
            let is_so =
                pod.status.as_ref().and_then(|status| status.conditions.as_ref()).is_some_and(|all| {
                    all.iter().any(|condition| condition.type_ == "Ready" && condition.status == ready)
                });
            if is_so {
                continue;
            }
            let now = jiff::Timestamp::now().to_string();
            let ready = json!({"type": "Ready", "status": ready, "lastTransitionTime": now});
            let status = json!({"status": {
                "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "startTime": now, "conditions": [ready],
            }});
            // It may be deleted by now.
            let _gone =
                api.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(&status)).await;
        }
    }
}

/// Returns whether the status says that all of the current spec runs.
async fn is_settled(server: &Server) -> bool {
    let owner = server.api::<MoEDeployment>().get("demo").await.unwrap();
    let generation = owner.metadata.generation;
    let Some(status) = owner.status else { return false };
    let is = |of: ConditionType, value: &str| {
        let condition = status.condition(of);
        condition.is_some_and(|it| it.status == value && it.observed_generation == generation)
    };
    is(ConditionType::Ready, "True") && is(ConditionType::Progressing, "False")
}

/// Waits until the deployment runs as desired, no more writes come, and all faults are used up. A settled operator
/// sends few requests, so `proxy` is told when no more will meet a fault.
async fn settled(server: &Server, nodes: &Nodes, operator: &Operator, proxy: &Proxy) {
    let mut seen = (operator.budget.made(), 0);
    eventually("a settled deployment", async || {
        nodes.run(server).await;
        sleep(POLL_INTERVAL).await;
        let made = operator.budget.made();
        let quiet = made == seen.0 && is_settled(server).await;
        seen = (made, if quiet { seen.1 + 1 } else { 0 });
        if seen.1 == QUIET {
            proxy.corrupt(0);
        }
        seen.1 >= 2 * QUIET
    })
    .await;
}

/// Successive changes of a deployment; the first one is its creation.
fn life() -> [Option<Value>; 3] {
    let other_plan = json!({"slo": {"ttft": "9s", "tpot": "140ms"}, "remoteExperts": {"maxReplicas": 2}});
    [None, Some(json!({"scaling": {"min": 3}})), Some(other_plan)]
}

/// Makes each change while requests meet `faults`. Returns the objects after each.
async fn live(server: &Server, proxy: &Proxy, faults: u64) -> Vec<BTreeMap<String, Value>> {
    let nodes = Nodes::new();
    deploy(server).await;
    proxy.corrupt(faults);
    let operator = Operator::start_behind(server, proxy, Budget::unlimited(), &FURTHER).await;
    let owners = server.api::<MoEDeployment>();
    let mut ends = Vec::new();
    for change in life() {
        if let Some(spec) = change {
            proxy.corrupt(faults);
            let change = Patch::Merge(json!({ "spec": spec }));
            owners.patch("demo", &PatchParams::default(), &change).await.unwrap();
        }
        settled(server, &nodes, &operator, proxy).await;
        ends.push(objects(server).await);
    }
    proxy.corrupt(faults);
    owners.delete("demo", &DeleteParams::background()).await.unwrap();
    let mut looks = 0;
    eventually("the end of everything", async || {
        sleep(POLL_INTERVAL).await;
        let nothing = objects(server).await.is_empty() && owners.get_opt("demo").await.unwrap().is_none();
        looks = if nothing { looks + 1 } else { 0 };
        looks >= 8
    })
    .await;
    operator.kill().await;
    ends
}

/// Describes the differences.
fn same(one: &BTreeMap<String, Value>, other: &BTreeMap<String, Value>, when: &str) {
    let names = |of: &BTreeMap<String, Value>| of.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(names(one), names(other), "{when}");
    for (name, object) in one {
        assert_eq!(Some(object), other.get(name), "{when}: {name}");
    }
}

#[test]
fn bad_days_change_nothing_but_incarnations() {
    let mut expected = Vec::new();
    with_server(async |server| {
        let proxy = Proxy::start().await;
        expected = live(&server, &proxy, 0).await;
        assert!(proxy.met().is_empty());
    });
    if expected.is_empty() {
        return;
    }
    assert!(expected.iter().all(|end| end.len() > 10), "{expected:?}");
    let met = Mutex::new(BTreeMap::new());
    // Few enough that the operator's back-off stays shorter than the wait for a settled deployment.
    with_servers([4, 5, 6, 7], async |server, faults| {
        let proxy = Proxy::start().await;
        let ends = live(&server, &proxy, faults).await;
        for (number, (end, expected)) in ends.iter().zip(&expected).enumerate() {
            same(end, expected, &format!("step {number} with {faults} faults"));
        }
        let mut all = met.lock().unwrap();
        proxy.met().into_iter().for_each(|(fault, count)| *all.entry(fault).or_insert(0) += count);
    });
    let met = met.into_inner().unwrap();
    println!("met {met:?}");
    assert!(FAULTS.iter().all(|fault| met.contains_key(fault)), "{met:?}");
}

/// The operator dies after a write amid faults; its successor meets faults too.
#[test]
fn killed_on_a_bad_day_the_operator_ends_at_the_same_state() {
    let mut reference = None;
    with_server(async |server| {
        let (nodes, proxy) = (Nodes::new(), Proxy::start().await);
        deploy(&server).await;
        let operator = Operator::start_behind(&server, &proxy, Budget::unlimited(), &FURTHER).await;
        settled(&server, &nodes, &operator, &proxy).await;
        reference = Some((objects(&server).await, operator.budget.made()));
        operator.kill().await;
    });
    let Some((expected, writes)) = reference else { return };
    // Every second write; crash.rs covers all of them without faults.
    with_servers((1..writes).step_by(2), async |server, crash| {
        let (nodes, proxy) = (Nodes::new(), Proxy::start().await);
        deploy(&server).await;
        proxy.corrupt(6);
        let budget = Budget::of(usize::try_from(crash).unwrap());
        let operator = Operator::start_behind(&server, &proxy, budget, &FURTHER).await;
        let mut looks = 0;
        eventually("the last write", async || {
            nodes.run(&server).await;
            sleep(POLL_INTERVAL / 5).await;
            // The number of status writes differs between runs: there may be fewer.
            looks = if is_settled(&server).await { looks + 1 } else { 0 };
            operator.budget.is_spent() || looks >= 20
        })
        .await;
        operator.kill().await;
        proxy.corrupt(6);
        let operator = Operator::start_behind(&server, &proxy, Budget::unlimited(), &FURTHER).await;
        settled(&server, &nodes, &operator, &proxy).await;
        same(&objects(&server).await, &expected, &format!("after {crash} writes"));
        operator.kill().await;
    });
}
