//! The chart, installed: one release for all tests of a program.

use crate::cluster::Cluster;
use crate::pods;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ListParams};
use remoe_test_support::binaries::workspace;
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::metrics::MetricsPage;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

/// Where the chart is installed.
pub const NAMESPACE: &str = "remoe-system";
/// The release, and the names of its objects.
pub const NAME: &str = "remoe";
/// The operator's ClusterRole.
pub const ROLE: &str = "remoe-system:remoe";
/// The operator's ClusterRole for pods of functions, where the release serves all namespaces.
pub const FUNCTIONS_ROLE: &str = "remoe-system:remoe-functions";
/// How the API server knows the operator.
pub const ACCOUNT: &str = "system:serviceaccount:remoe-system:remoe";

/// And the gateways.
pub const GATEWAY_ACCOUNT: &str = "system:serviceaccount:remoe-system:remoe-gateway";

/// Operators that the release has; none before the first test has asked.
type Replicas = Option<u32>;

static INSTALLED: LazyLock<Arc<RwLock<Replicas>>> = LazyLock::new(Arc::default);

/// The right to count on one running operator, until it is dropped. Tests share it.
pub struct OperatorGuard(#[allow(dead_code, reason = "held, not read")] OwnedRwLockReadGuard<Replicas>);

/// The right to do with the release what a test likes, until it is dropped.
pub struct Exclusive(OwnedRwLockWriteGuard<Replicas>);

/// Installs the chart with one operator, unless it is, and waits until it is ready.
pub async fn shared(cluster: &Cluster) -> OperatorGuard {
    loop {
        let guard = INSTALLED.clone().read_owned().await;
        if *guard == Some(1) {
            return OperatorGuard(guard);
        }
        drop(guard);
        exclusive(cluster, 1).await;
    }
}

/// Installs the chart with `replicas` operators, none for a test that runs its own beside the cluster.
pub async fn exclusive(cluster: &Cluster, replicas: u32) -> Exclusive {
    let mut exclusive = Exclusive(INSTALLED.clone().write_owned().await);
    if *exclusive.0 != Some(replicas) {
        exclusive.install(cluster, &[&format!("replicas={replicas}")]).await;
        *exclusive.0 = Some(replicas);
    }
    exclusive
}

/// The operator that leads.
pub struct Leader {
    /// The name of its pod.
    pub pod: String,
    /// Process id, as this host numbers it.
    pub process: u32,
    /// When it last said that it leads.
    pub renewed: Timestamp,
}

/// Waits for an operator that leads, and runs.
pub async fn leader(cluster: &Cluster) -> Leader {
    let leases = Api::<Lease>::namespaced(cluster.client.clone(), NAMESPACE);
    let api = Api::<Pod>::namespaced(cluster.client.clone(), NAMESPACE);
    until(LONG, "a leader that runs", async || {
        let lease = leases.get_opt(&format!("{NAME}-operator")).await.expect("leases can be read")?.spec?;
        let (pod, renewed) = (lease.holder_identity?, lease.renew_time?.0);
        let process = pods::process(&api.get_opt(&pod).await.expect("pods can be read")?)?;
        Some(Leader { pod, process, renewed })
    })
    .await
}

/// Reads the metrics of the release's operator.
pub async fn operator_metrics(cluster: &Cluster) -> MetricsPage {
    let api = Api::<Pod>::namespaced(cluster.client.clone(), NAMESPACE);
    let ours = ListParams::default().labels("app.kubernetes.io/component=operator");
    let pods = api.list(&ours).await.expect("pods can be listed").items;
    let ip = pods.iter().find_map(|pod| pod.status.as_ref()?.pod_ip.as_ref()?.parse::<IpAddr>().ok());
    MetricsPage::read(SocketAddr::new(ip.expect("the operator runs"), 8080)).await
}

impl Exclusive {
    /// Installs the chart with other values. The next test gets the release as it should be.
    pub async fn install(&mut self, cluster: &Cluster, values: &[&str]) {
        *self.0 = None;
        let chart = workspace().join("charts/remoe");
        let chart = chart.to_str().expect("the path of the chart is text");
        // The images are those of `load`, so nothing is pulled.
        let mut arguments = vec!["upgrade", "--install", NAME, chart, "--namespace", NAMESPACE];
        arguments.extend([
            "--create-namespace",
            "--wait",
            "--timeout",
            "2m",
            "--set",
            "images.pullPolicy=IfNotPresent",
            // Tests make namespaces as they need them.
            "--set",
            "identity.allNamespaces=true",
            // The image for GPUs is gigabytes, and there is none.
            "--set",
            "images.mainCuda.repository=ghcr.io/remoe/remoe-main",
        ]);
        // Tests ask without keys, unless they bring some.
        if !values.iter().any(|value| value.starts_with("gateway.keysSecretName=")) {
            arguments.extend(["--set", "gateway.open=true"]);
        }
        // Tests serve models on the address of this host that pods reach.
        let host = format!("sources.allowedRanges={{{}}}", cluster.host);
        arguments.extend(["--set", &host]);
        // Gateways wait for an operator to sign for them.
        if values.contains(&"replicas=0") {
            arguments.extend(["--set", "gateway.enabled=false"]);
        }
        for value in values {
            arguments.extend(["--set", value]);
        }
        cluster.helm(&arguments).await;
    }
}
