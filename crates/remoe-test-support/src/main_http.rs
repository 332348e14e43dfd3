//! Main function with only local experts, for tests of its HTTP interface.

use crate::binaries;
use crate::control::Control;
use crate::deadline::{SOON, within};
use crate::metrics::MetricsPage;
use crate::process::Process;
use remoe_process::Announcement;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use tokio::sync::mpsc;

/// Running main function without remote functions.
pub struct MainHttp {
    /// HTTP address.
    pub address: SocketAddr,
    /// Address of the probes, if enabled.
    pub health: Option<SocketAddr>,
    /// Process of the function.
    pub process: Process,
    control: Control,
}

impl MainHttp {
    /// Starts a main function with further arguments and environment variables, and places all experts.
    pub async fn start(model: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let server = Self::unplaced(model, arguments, variables).await;
        server.place().await;
        server
    }

    /// Starts a main function without a placement.
    pub async fn unplaced(model: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(binaries::program("main-model-fn"));
        command.args(["--http-listen", "127.0.0.1:0", "--threads", "1", "--dtype", "float32"]);
        command.arg("--launcher-pid").arg(std::process::id().to_string());
        command.args(arguments).arg("--model").arg(model);
        command.env_remove("REMOE_LOG").env_remove("REMOE_API_KEY").envs(variables.iter().copied());
        let (sender, mut lines) = mpsc::unbounded_channel();
        let mut process = Process::start("main-model-fn", command, move |line| drop(sender.send(line)));
        let Some(line) = within(SOON, "the announcement of a function", lines.recv()).await else {
            panic!("the function ended before its announcement: {:?}", process.end(SOON).await)
        };
        let announcement: Announcement = serde_json::from_str(&line).expect("an announcement");
        let address = announcement.http.expect("a main function with HTTP announces where");
        let health = announcement.health;
        Self { address, health, process, control: Control::new(announcement.grpc) }
    }

    /// Places all experts locally, so that requests are accepted.
    pub async fn place(&self) {
        self.control.route(&[], &[]).await;
    }

    /// Reads the metrics of the function.
    pub async fn metrics(&self) -> MetricsPage {
        MetricsPage::read(self.address).await
    }

    /// Waits until `series` has `value`.
    pub async fn settles(&self, series: &str, value: u64) {
        MetricsPage::settle(self.address, series, value).await;
    }

    /// Returns the number of open file descriptors.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        self.process.descriptors()
    }

    /// Returns the present and the largest resident memory (`VmRSS`, `VmHWM`), in bytes.
    #[must_use]
    pub fn memory(&self) -> (u64, u64) {
        self.process.memory()
    }
}
