//! Ports forwarded by `kubectl port-forward`.

use crate::scene::Scene;
use remoe_test_support::deadline::{SOON, within};
use remoe_test_support::process::Process;
use std::net::SocketAddr;
use std::process::Command;
use tokio::sync::mpsc;

/// Forwarded port, which is closed on drop.
pub struct Forward {
    /// Local address.
    pub address: SocketAddr,
    _process: Process,
}

impl Forward {
    /// Forwards a free port to `port` of `target`, which is `pod/NAME` or `service/NAME`.
    pub async fn start(scene: &Scene, target: &str, port: u16) -> Self {
        let mut command = Command::new(scene.cluster.tool("kubectl"));
        command.args(["port-forward", "--namespace", &scene.namespace, target, &format!(":{port}")]);
        command.env("KUBECONFIG", &scene.cluster.kubeconfig);
        let (sender, mut lines) = mpsc::unbounded_channel();
        let process = Process::start("kubectl port-forward", command, move |line| drop(sender.send(line)));
        let line = within(SOON, "kubectl port-forward", lines.recv()).await;
        let line = line.unwrap_or_else(|| panic!("kubectl port-forward: {:?}", process.log()));
        // Forwarding from 127.0.0.1:45678 -> 8000
        let address = line.strip_prefix("Forwarding from ").and_then(|rest| rest.split(" -> ").next());
        let address = address.and_then(|address| address.parse().ok());
        Self { address: address.unwrap_or_else(|| panic!("an address in {line:?}")), _process: process }
    }
}
