//! Installed chart: one release for all tests of a program.

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

/// Namespace of the release.
pub const NAMESPACE: &str = "remoe-system";
/// Name of the release and prefix of its objects.
pub const NAME: &str = "remoe";
/// ClusterRole of the operator.
pub const ROLE: &str = "remoe-system:remoe";
/// ClusterRole of the operator for pods of functions, if the release serves all namespaces.
pub const FUNCTIONS_ROLE: &str = "remoe-system:remoe-functions";
/// User name of the operator at the API server.
pub const ACCOUNT: &str = "system:serviceaccount:remoe-system:remoe";

/// User name of the gateways at the API server.
pub const GATEWAY_ACCOUNT: &str = "system:serviceaccount:remoe-system:remoe-gateway";

/// Number of operators in the release, `None` before the first test that needs one.
type Replicas = Option<u32>;

static INSTALLED: LazyLock<Arc<RwLock<Replicas>>> = LazyLock::new(Arc::default);

/// Shared guard of a release with one running operator.
pub struct OperatorGuard(#[allow(dead_code, reason = "held, not read")] OwnedRwLockReadGuard<Replicas>);

/// Exclusive guard of the release, for tests that change it.
pub struct Exclusive(OwnedRwLockWriteGuard<Replicas>);

/// Installs the chart with one operator, unless it is installed, and waits until it is ready.
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

/// Installs the chart with `replicas` operators, 0 for a test that runs its own beside the cluster.
pub async fn exclusive(cluster: &Cluster, replicas: u32) -> Exclusive {
    let mut exclusive = Exclusive(INSTALLED.clone().write_owned().await);
    if *exclusive.0 != Some(replicas) {
        exclusive.install(cluster, &[&format!("replicas={replicas}")]).await;
        *exclusive.0 = Some(replicas);
    }
    exclusive
}

/// Leading operator.
pub struct Leader {
    /// Name of its pod.
    pub pod: String,
    /// Process id on this host.
    pub process: u32,
    /// Time of its last renewal of the Lease.
    pub renewed: Timestamp,
}

/// Waits for a running leader.
pub async fn leader(cluster: &Cluster) -> Leader {
    let leases = Api::<Lease>::namespaced(cluster.client.clone(), NAMESPACE);
    let api = Api::<Pod>::namespaced(cluster.client.clone(), NAMESPACE);
    until(LONG, "a leader that runs", async || {
        let lease = leases.get_opt(&format!("{NAME}-operator")).await.expect("leases can be read")?.spec?;
        let (pod, renewed) = (lease.holder_identity?, lease.renew_time?.0);
        let process = pods::process_id(&api.get_opt(&pod).await.expect("pods can be read")?)?;
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
    /// Installs the chart with other values. The next test restores the release.
    pub async fn install(&mut self, cluster: &Cluster, values: &[&str]) {
        *self.0 = None;
        let chart = workspace().join("charts/remoe");
        let chart = chart.to_str().expect("the path of the chart is text");
        // The images were loaded before, so none is pulled.
        let mut arguments = vec!["upgrade", "--install", NAME, chart, "--namespace", NAMESPACE];
        arguments.extend([
            "--create-namespace",
            "--wait",
            "--timeout",
            "2m",
            "--set",
            "images.pullPolicy=IfNotPresent",
            // Tests create namespaces on demand.
            "--set",
            "identity.allNamespaces=true",
            // The GPU image has gigabytes and is not built for tests.
            "--set",
            "images.mainCuda.repository=ghcr.io/remoe/remoe-main",
        ]);
        // Tests send requests without keys by default.
        if !values.iter().any(|value| value.starts_with("gateway.keysSecretName=")) {
            arguments.extend(["--set", "gateway.open=true"]);
        }
        // Tests serve models on this host's address for pods.
        let host = format!("sources.allowedRanges={{{}}}", cluster.host);
        arguments.extend(["--set", &host]);
        // Gateways wait for an operator to sign their certificates.
        if values.contains(&"replicas=0") {
            arguments.extend(["--set", "gateway.enabled=false"]);
        }
        for value in values {
            arguments.extend(["--set", value]);
        }
        cluster.helm(&arguments).await;
    }
}
