//! Cluster under test.

use crate::tool;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::ffi::OsStr;
use std::io::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Test cluster with administrator access.
#[derive(Clone)]
pub struct Cluster {
    /// API client with administrator rights.
    pub client: Client,
    /// Kubeconfig of the administrator.
    pub kubeconfig: PathBuf,
    /// Folder with kubectl and helm.
    tools: PathBuf,
    /// Audit log of the API server.
    pub audit_log: PathBuf,
    /// Name of the cluster in `tests/cluster/cluster.py`.
    pub name: String,
    /// Address of this host for pods.
    pub host: IpAddr,
}

impl Cluster {
    /// Returns the cluster of the environment (`tests/cluster/cluster.py env`). Prints a line and returns `None`
    /// without one.
    pub async fn find(test: &str) -> Option<Self> {
        let Some(kubeconfig) = variable("REMOE_E2E_KUBECONFIG") else {
            // Does not use eprintln, whose output is hidden when a test passes.
            let line = format!(
                "{test}: SKIPPED: REMOE_E2E_KUBECONFIG names no cluster; run `make e2e` (docs/cluster.md)\n"
            );
            std::io::stderr().write_all(line.as_bytes()).expect("standard error can be written");
            return None;
        };
        let beside = |name: &str| {
            variable(name)
                .unwrap_or_else(|| panic!("{name} is not set: eval \"$(tests/cluster/cluster.py env)\""))
        };
        Some(Self {
            client: client(&kubeconfig).await,
            kubeconfig,
            tools: beside("REMOE_E2E_TOOLS"),
            audit_log: beside("REMOE_E2E_AUDIT_LOG"),
            name: beside("REMOE_E2E_CLUSTER").to_string_lossy().into_owned(),
            host: address(&beside("REMOE_E2E_HOST").to_string_lossy()),
        })
    }

    /// Returns true if pods can run: a cluster of the fast tier has no node.
    pub async fn has_node(&self) -> bool {
        let nodes = Api::<Node>::all(self.client.clone()).list(&ListParams::default()).await;
        !nodes.expect("nodes can be listed").items.is_empty()
    }

    /// Returns the folder with `kubectl` and `helm`.
    #[must_use]
    pub fn tool(&self, name: &str) -> PathBuf {
        self.tools.join(name)
    }

    /// Returns the folder of the cluster on this host.
    #[must_use]
    pub fn folder(&self) -> &Path {
        let logs = self.audit_log.parent().expect("the audit log lies in a folder");
        logs.parent().expect("the folder of logs lies in the cluster's")
    }

    /// Adds the tag `to` to the image `from` on the node.
    pub async fn tag(&self, from: &str, to: &str) {
        let socket = self.folder().join("run/containerd.sock");
        let socket = socket.to_str().expect("the path of the socket is text");
        let namespace = ["--address", socket, "--namespace", "k8s.io"];
        let arguments = [&namespace[..], &["images", "tag", "--force", from, to]].concat();
        tool::run(Path::new("ctr"), &self.kubeconfig, &arguments).await;
    }

    /// Returns the process id of the node's kubelet on this host.
    #[must_use]
    pub fn kubelet(&self) -> u32 {
        let root = format!("--root-dir={}", self.folder().join("kubelet").display());
        let processes = std::fs::read_dir("/proc").expect("processes can be listed");
        let ids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
        let mut kubelets = ids.filter(|id| {
            let command = std::fs::read_to_string(format!("/proc/{id}/cmdline")).unwrap_or_default();
            let mut arguments = command.split('\0');
            arguments.next().is_some_and(|program| program.ends_with("/kubelet"))
                && arguments.any(|it| it == root)
        });
        kubelets.next().expect("the node has a kubelet")
    }

    /// Runs `kubectl` as administrator and returns its output.
    pub async fn kubectl(&self, arguments: &[impl AsRef<OsStr>]) -> String {
        tool::run(&self.tool("kubectl"), &self.kubeconfig, arguments).await
    }

    /// Runs `helm` as administrator and returns its output.
    pub async fn helm(&self, arguments: &[impl AsRef<OsStr>]) -> String {
        tool::run(&self.tool("helm"), &self.kubeconfig, arguments).await
    }
}

/// Returns a client for `kubeconfig`.
pub async fn client(kubeconfig: &Path) -> Client {
    let read = Kubeconfig::read_from(kubeconfig);
    let read = read.unwrap_or_else(|error| panic!("{}: {error}", kubeconfig.display()));
    let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await;
    let mut config = config.unwrap_or_else(|error| panic!("{}: {error}", kubeconfig.display()));
    config.read_timeout = Some(READ_TIMEOUT);
    Client::try_from(config).unwrap_or_else(|error| panic!("{}: {error}", kubeconfig.display()))
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap_or_else(|error| panic!("REMOE_E2E_HOST={text}: {error}"))
}
