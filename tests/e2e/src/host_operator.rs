//! Operator as a process on this host, so that a test can kill it at any time. It uses the account of the installed
//! chart and thus its roles.

use crate::audit::{self, AuditEntry, CREDENTIAL, LogPosition};
use crate::cluster::Cluster;
use crate::release::{self, Exclusive};
use crate::tool;
use remoe_test_support::binaries::program;
use remoe_test_support::deadline::{SOON, until};
use remoe_test_support::http;
use remoe_test_support::process::Process;
use serde_json::{Value, json};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::Command;
use tempfile::NamedTempFile;

/// Running operator.
pub struct HostOperator {
    /// Process of the operator, which is killed by `kill -9` on drop.
    pub process: Process,
    /// Address of its metrics and probes.
    pub metrics: SocketAddr,
    /// Id of its token at the API server, different for each operator.
    pub credential: String,
    _kubeconfig: NamedTempFile,
}

impl HostOperator {
    /// Starts an operator beside a release without one and waits until it has read the cluster.
    pub async fn start(cluster: &Cluster, alone: &Exclusive, api_server: Option<&str>) -> Self {
        Self::launch(cluster, alone, "host", &[], api_server).await
    }

    /// Starts an operator as [`Self::start`] does, with the identity `name` and further `arguments`.
    pub async fn start_named(cluster: &Cluster, alone: &Exclusive, name: &str, arguments: &[&str]) -> Self {
        Self::launch(cluster, alone, name, arguments, None).await
    }

    async fn launch(
        cluster: &Cluster,
        _alone: &Exclusive,
        name: &str,
        arguments: &[&str],
        api_server: Option<&str>,
    ) -> Self {
        let kubeconfig = kubeconfig(cluster, api_server).await;
        let credential = credential(cluster, &kubeconfig).await;
        let metrics = free_address();
        let mut command = Command::new(program("remoe-operator"));
        command.arg(format!("--metrics-listen={metrics}")).env("KUBECONFIG", kubeconfig.path());
        command.env("POD_NAMESPACE", release::NAMESPACE).env("POD_NAME", name);
        command.env("REMOE_MAIN_IMAGE", image("main")).env("REMOE_REMOTE_IMAGE", image("remote-expert"));
        command.args(arguments);
        let process = Process::start("remoe-operator", command, |_line| ());
        let mut operator = Self { process, metrics, credential, _kubeconfig: kubeconfig };
        until(SOON, "the operator's /readyz", async || {
            assert!(operator.process.ended().is_none(), "the operator ended: {:?}", operator.process.log());
            let listens = tokio::net::TcpStream::connect(metrics).await.is_ok();
            (listens && http::get(metrics, "/readyz").await.status == 200).then_some(())
        })
        .await;
        operator
    }

    /// Returns the writes of the operator since `mark`, by the audit log, except those of its Lease.
    #[must_use]
    pub fn writes(&self, cluster: &Cluster, mark: LogPosition) -> Vec<AuditEntry> {
        // The test itself sends the second kind to learn the id of the credential.
        let apart = |kind: &str| matches!(kind, "leases" | "selfsubjectreviews");
        let asked = audit::entries_since(cluster, mark).into_iter();
        asked
            .filter(|each| each.credential() == self.credential && each.writes() && !apart(each.resource()))
            .collect()
    }
}

/// Returns the id of the credential in `kubeconfig` at the API server.
async fn credential(cluster: &Cluster, kubeconfig: &NamedTempFile) -> String {
    let kubectl = cluster.tool("kubectl");
    let said = tool::run(&kubectl, kubeconfig.path(), &["auth", "whoami", "--output", "json"]).await;
    let said: Value = serde_json::from_str(&said).expect("kubectl prints JSON");
    let id = said["status"]["userInfo"]["extra"][CREDENTIAL][0].as_str();
    id.expect("a token of an account has a name").to_owned()
}

/// Returns the name of an image from `make images`.
#[must_use]
pub fn image(name: &str) -> String {
    format!("ghcr.io/remoe/remoe-{name}:{}", env!("CARGO_PKG_VERSION"))
}

/// Returns a kubeconfig of the operator's account in the chart, with `api_server` instead of the cluster's own
/// address if given.
pub async fn kubeconfig(cluster: &Cluster, api_server: Option<&str>) -> NamedTempFile {
    let token = cluster.kubectl(&["create", "token", release::NAME, "--namespace", release::NAMESPACE]).await;
    let text = fs::read_to_string(&cluster.kubeconfig).expect("the kubeconfig can be read");
    let mut config: Value = serde_json::from_str(&text).expect("the cluster's kubeconfig is JSON");
    config["users"][0]["user"] = json!({"token": token.trim()});
    if let Some(address) = api_server {
        config["clusters"][0]["cluster"]["server"] = json!(address);
    }
    let file = NamedTempFile::new().expect("a temporary file can be made");
    fs::write(file.path(), config.to_string()).expect("the kubeconfig can be written");
    file
}

fn free_address() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("there is a free port");
    listener.local_addr().expect("a listener has an address")
}
