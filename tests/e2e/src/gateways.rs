//! Gateways of the installed release, and their clients.

use crate::cluster::Cluster;
use crate::deployment::Deployment;
use crate::pods::is_ready;
use crate::release;
use crate::scene::Scene;
use crate::tool;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt;
use kube::api::{Api, DynamicObject, GroupVersionKind, ListParams};
use kube::core::ApiResource;
use remoe_test_support::deadline::{LONG, until, within};
use remoe_test_support::http;
use serde_json::{Value, json};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

/// Waits until `count` gateways are ready and returns their pods.
pub async fn pods(cluster: &Cluster, count: usize) -> Vec<Pod> {
    let api = Api::<Pod>::namespaced(cluster.client.clone(), release::NAMESPACE);
    let ours = ListParams::default().labels("app.kubernetes.io/component=gateway");
    until(LONG, "gateways to be ready", async || {
        let pods = api.list(&ours).await.expect("pods can be listed").items;
        let there = |pod: &&Pod| pod.metadata.deletion_timestamp.is_none() && is_ready(pod);
        let pods: Vec<Pod> = pods.iter().filter(there).cloned().collect();
        (pods.len() == count).then_some(pods)
    })
    .await
}

/// Returns the HTTP address of the gateway in `pod`.
#[must_use]
pub fn address(pod: &Pod) -> SocketAddr {
    let ip = pod.status.as_ref().and_then(|status| status.pod_ip.as_deref());
    let ip: IpAddr = ip.and_then(|ip| ip.parse().ok()).expect("a pod that is ready has an address");
    SocketAddr::new(ip, 8000)
}

/// Cuts the network between the gateway in `pod` and the API server in both directions. Clients and main functions
/// stay reachable.
pub async fn cut_off(cluster: &Cluster, pod: &Pod) {
    // Packets from addresses without a route are dropped as well.
    reach(cluster, pod, "add", '1').await;
}

/// Restores the network.
pub async fn rejoin(cluster: &Cluster, pod: &Pod) {
    reach(cluster, pod, "del", '0').await;
}

async fn reach(cluster: &Cluster, pod: &Pod, change: &str, filters: char) {
    let services = Api::<Service>::namespaced(cluster.client.clone(), "default");
    let server = services.get("kubernetes").await.expect("the API server has a Service").spec;
    let server = server.and_then(|spec| spec.cluster_ip).expect("the Service has an address");
    let process = crate::pods::process_id(pod).expect("the gateway runs").to_string();
    let script = format!(
        "echo {filters} > /proc/sys/net/ipv4/conf/all/rp_filter && ip route {change} blackhole {server}/32"
    );
    let arguments = ["--target", process.as_str(), "--net", "sh", "-c", script.as_str()];
    tool::run(Path::new("nsenter"), &cluster.kubeconfig, &arguments).await;
}

/// Runs `remoe cost` with `arguments` in the gateway's pod, on the gateway's ledgers, and returns its output.
pub async fn cost(cluster: &Cluster, pod: &Pod, arguments: &[&str]) -> String {
    let name = pod.name_any();
    let command = ["exec", "--namespace", release::NAMESPACE, &name, "--", "remoe", "cost", "/ledger"];
    cluster.kubectl(&[&command[..], arguments].concat()).await
}

/// Reads the MoEDemand `name`, by which gateways and the operator inform each other.
pub async fn demand(scene: &Scene, name: &str) -> Value {
    let kind = ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk("remoe.dev", "v1alpha1", "MoEDemand"),
        "moedemands",
    );
    let api: Api<DynamicObject> = Api::namespaced_with(scene.cluster.client.clone(), &scene.namespace, &kind);
    api.get(name).await.expect("the MoEDemand can be read").data
}

/// Waits until the demand has the phase `phase` and returns it.
pub async fn wait_for_phase(scene: &Scene, name: &str, phase: &str) -> Value {
    until(LONG, &format!("{name} to be {phase}"), async || {
        let demand = demand(scene, name).await;
        (demand["spec"]["phase"] == phase).then_some(demand)
    })
    .await
}

/// Waits until no function of the deployment is left.
pub async fn wait_until_asleep(scene: &Scene, deployment: &Deployment) {
    deployment.wait_for_reason("Active", "Asleep").await;
    until(LONG, "the last function to be gone", async || {
        let pods = scene.api::<Pod>().list(&ListParams::default().labels(crate::pods::FUNCTIONS)).await;
        pods.expect("pods can be listed").items.is_empty().then_some(())
    })
    .await;
    let ready = crate::deployment::find(&deployment.status().await, "Ready").expect("a condition");
    assert_eq!((&ready["status"], &ready["reason"]), (&json!("True"), &json!("Asleep")));
}

/// Response with the client's waiting time.
#[derive(Debug)]
pub struct TimedResponse {
    /// Body of the response.
    pub body: Value,
    /// Time from before the connection to the end of the response.
    pub took: Duration,
}

/// Requests one token of the model `name` from a gateway. After a lost connection, retries, at `elsewhere` if that
/// differs.
pub async fn ask(gateway: SocketAddr, elsewhere: SocketAddr, name: &str) -> TimedResponse {
    let body = json!({
        "model": name,
        "messages": [{"role": "user", "content": "Read Genesis 1:1."}],
        "max_tokens": 1,
        "temperature": 0,
        "include_figures": true,
    });
    let begun = Instant::now();
    let mut refusals = 0;
    loop {
        let asked = async {
            let address = if refusals % 2 == 0 { gateway } else { elsewhere };
            http::post(address, "/v1/chat/completions", &body).await?.finish().await
        };
        match within(LONG, "an answer of the gateway", asked).await {
            Ok(answer) => {
                assert_eq!(answer.status, 200, "{}", answer.body);
                let body = serde_json::from_str(&answer.body).expect("the answer is JSON");
                return TimedResponse { body, took: begun.elapsed() };
            }
            Err(error) => {
                refusals += 1;
                assert!(refusals < 100, "no gateway answers: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

impl TimedResponse {
    /// Returns the sum of the parts of the time to first token.
    #[must_use]
    pub fn accounted(&self) -> Duration {
        let timing = self.body["usage"]["remoe"]["timing"].as_object().expect("a timeline");
        let parts = timing.values().map(|part| part.as_f64().expect("milliseconds"));
        Duration::from_secs_f64(parts.sum::<f64>() / 1e3)
    }
}
