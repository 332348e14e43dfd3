//! Node without contact to the control plane: temporarily, while all functions keep running, and permanently.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};
use remoe_e2e::deployment::{Deployment, chat};
use remoe_e2e::host_operator::HostOperator;
use remoe_e2e::scene::Scene;
use remoe_e2e::{audit, claim, figures, pods, release};
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::process::signal;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Duration of the silence. Nodes become unreachable after 40 s, and their pods unready.
const CUT: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_secs(2);

/// Paused kubelet, which resumes on drop.
struct Silenced(u32);

impl Silenced {
    fn new(kubelet: u32) -> Self {
        signal(kubelet, Signal::STOP);
        Self(kubelet)
    }

    /// Ends it permanently; the supervisor of the node's parts starts another one.
    fn kill(self) {
        signal(self.0, Signal::KILL);
        #[expect(clippy::disallowed_methods, reason = "dropping it would wake the process that was killed")]
        std::mem::forget(self);
    }
}

impl Drop for Silenced {
    fn drop(&mut self) {
        signal(self.0, Signal::CONT);
    }
}

/// Returns the functions with their numbers of restarts.
async fn function_restarts(scene: &Scene) -> BTreeMap<String, i32> {
    let pods = scene.api::<Pod>().list(&ListParams::default().labels(pods::FUNCTIONS)).await.unwrap();
    let life = |pod: &Pod| {
        assert!(pod.metadata.deletion_timestamp.is_none(), "{} is to end", pod.name_any());
        (pod.uid().unwrap(), pods::restart_count(pod))
    };
    pods.iter().map(life).collect()
}

async fn wait_for_node_status(scene: &Scene, status: &str) {
    let nodes = Api::<Node>::all(scene.cluster.client.clone());
    until(LONG, &format!("the node to be {status}"), async || {
        let node = nodes.list(&ListParams::default()).await.unwrap().items.into_iter().next()?;
        let conditions = node.status?.conditions?;
        conditions.iter().any(|it| it.type_ == "Ready" && it.status == status).then_some(())
    })
    .await;
}

fn spec() -> Value {
    json!({
        "model": {"source": "pvc://models/demo"},
        "profile": figures::reference(),
        "main": {"memoryMB": {"min": 200, "max": 4000}},
        "remoteExperts": {"mode": "Always", "memoryMB": {"min": 100, "max": 1000}, "maxReplicas": 2},
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn node_silent_for_two_minutes_loses_no_function() {
    Scene::run("node_silent_for_two_minutes_loses_no_function", async |scene| {
        let cluster = &scene.cluster;
        let _operator = release::shared(cluster).await;
        claim::with_demo_model(scene, "models").await;
        let demo = Deployment::apply(scene, "demo", &spec()).await;
        let settled = demo.wait_until_settled().await;
        let (before, address) = (function_restarts(scene).await, demo.client_addresses(scene).await[0]);
        let answer = chat(address, "demo", "Read Genesis 1:1.").await;
        let start = audit::position(cluster);
        let begun = Instant::now();
        let silenced = Silenced::new(cluster.kubelet());
        wait_for_node_status(scene, "Unknown").await;
        while begun.elapsed() < CUT {
            assert_eq!(function_restarts(scene).await, before);
            let again = chat(address, "demo", "Read Genesis 1:1.").await;
            assert_eq!(again["choices"], answer["choices"]);
            sleep(LOOK).await;
        }
        drop(silenced);
        wait_for_node_status(scene, "True").await;
        assert_eq!(demo.wait_until_settled().await["plan"], settled["plan"]);
        assert_eq!(function_restarts(scene).await, before);
        let deleted = audit::entries_since(cluster, start).into_iter().filter(|request| {
            request.verb == "delete" && request.resource() == "pods" && request.namespace() == scene.namespace
        });
        assert_eq!(deleted.count(), 0);
    })
    .await;
}

/// A node's machine is lost, and an administrator removes the node from the cluster. Its pods are replaced before
/// there is another node, and serve once there is one.
#[tokio::test(flavor = "multi_thread")]
async fn functions_of_a_lost_node_are_replaced() {
    Scene::run("functions_of_a_lost_node_are_replaced", async |scene| {
        let cluster = &scene.cluster;
        // The operator runs outside the cluster, because it would be lost with the only node.
        let alone = release::exclusive(cluster, 0).await;
        claim::with_demo_model(scene, "models").await;
        let _operator = HostOperator::start(cluster, &alone, None).await;
        let demo = Deployment::apply(scene, "demo", &spec()).await;
        let settled = demo.wait_until_settled().await;
        let before = pods::list(scene, pods::FUNCTIONS).await;
        let answer = chat(demo.client_addresses(scene).await[0], "demo", "Read Genesis 1:1.").await;

        let silenced = Silenced::new(cluster.kubelet());
        before.iter().filter_map(pods::process_id).for_each(|process| signal(process, Signal::KILL));
        let nodes = Api::<Node>::all(cluster.client.clone());
        let node = nodes.list(&ListParams::default()).await.unwrap().items.remove(0);
        nodes.delete(&node.name_any(), &DeleteParams::default()).await.unwrap();
        let is_new = |pod: &Pod| before.iter().all(|known| known.uid() != pod.uid());
        until(LONG, "pods in place of those that the node had", async || {
            let now = pods::list(scene, pods::FUNCTIONS).await;
            (now.len() == before.len() && now.iter().all(is_new)).then_some(())
        })
        .await;
        assert!(nodes.list(&ListParams::default()).await.unwrap().items.is_empty(), "there is no node yet");

        // A new machine, which knows nothing of the pods of the previous one.
        silenced.kill();
        wait_for_node_status(scene, "True").await;
        let another = nodes.list(&ListParams::default()).await.unwrap().items.remove(0);
        assert_ne!(another.uid(), node.uid());
        assert_eq!(demo.wait_until_settled().await["plan"], settled["plan"]);
        let now = pods::list(scene, pods::FUNCTIONS).await;
        assert!(now.len() == before.len() && now.iter().all(is_new));
        let again = chat(demo.client_addresses(scene).await[0], "demo", "Read Genesis 1:1.").await;
        assert_eq!(again["choices"], answer["choices"]);
    })
    .await;
}
