//! Real Prometheus on this host that scrapes the pods of a cluster.

use remoe_test_support::binaries::workspace;
use remoe_test_support::deadline::{SOON, until};
use remoe_test_support::http;
use remoe_test_support::process::Process;
use serde_json::{Value, json};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Command;
use tempfile::TempDir;

/// Values of a dashboard's variables in tests.
const VARIABLES: [(&str, &str); 4] =
    [("$job", ".+"), ("$model", ".*"), ("$__rate_interval", "15s"), ("$__range", "600s")];

/// Running Prometheus, which ends on drop.
pub struct Prometheus {
    address: SocketAddr,
    folder: TempDir,
    _process: Process,
}

impl Prometheus {
    /// Starts `prometheus` from PATH (Debian's package) with the chart's rules. It sends `key` to its targets.
    pub async fn start(key: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let at = |name: &str| folder.path().join(name);
        let configuration = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [workspace().join("charts/remoe/files/rules/remoe.yaml")],
            "scrape_configs": [{
                "job_name": "remoe",
                "authorization": {"credentials": key},
                "file_sd_configs": [{"files": [at("targets.json")], "refresh_interval": "1s"}],
            }],
        });
        fs::write(at("prometheus.yml"), configuration.to_string()).expect("a file can be written");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("there is a free port");
        let address = listener.local_addr().expect("a listener has an address");
        drop(listener);
        let mut command = Command::new("prometheus");
        command.arg(format!("--config.file={}", at("prometheus.yml").display()));
        command.arg(format!("--storage.tsdb.path={}", at("data").display()));
        command.arg(format!("--web.listen-address={address}")).arg("--log.level=error");
        let process = Process::start("prometheus", command, |_line| ());
        let started = Self { address, folder, _process: process };
        started.scrape(&[]);
        until(SOON, "Prometheus to answer", async || {
            tokio::net::TcpStream::connect(address).await.ok()?;
            (http::get(address, "/-/ready").await.status == 200).then_some(())
        })
        .await;
        started
    }

    /// Sets its targets to `targets`, as host:port.
    pub fn scrape(&self, targets: &[String]) {
        let path = |name: &str| -> PathBuf { self.folder.path().join(name) };
        fs::write(path("next"), json!([{"targets": targets}]).to_string()).expect("a file can be written");
        fs::rename(path("next"), path("targets.json")).expect("a file can be renamed");
    }

    /// Evaluates `expression` and returns (labels, value). Variables of dashboards match everything.
    pub async fn query(&self, expression: &str) -> Vec<(Value, f64)> {
        let expression =
            VARIABLES.iter().fold(expression.to_owned(), |text, (name, value)| text.replace(name, value));
        let encoded: String = expression.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let answer = http::get(self.address, &format!("/api/v1/query?query={encoded}")).await;
        assert_eq!(answer.status, 200, "{expression}: {}", answer.body);
        let answer: Value = serde_json::from_str(&answer.body).expect("the answer is JSON");
        let samples = answer["data"]["result"].as_array().cloned().unwrap_or_default();
        let value = |sample: &Value| sample["value"][1].as_str().and_then(|text| text.parse().ok());
        samples.iter().filter_map(|sample| Some((sample["metric"].clone(), value(sample)?))).collect()
    }
}

/// Returns the panels of the chart's dashboard `name` with their expressions.
#[must_use]
pub fn panels(name: &str) -> Vec<(String, String)> {
    let path = workspace().join(format!("charts/remoe/files/dashboards/{name}.json"));
    let text = fs::read_to_string(path).expect("the dashboard can be read");
    let dashboard: Value = serde_json::from_str(&text).expect("the dashboard is JSON");
    let panels = dashboard["panels"].as_array().expect("a dashboard has panels");
    let of = |panel: &Value| {
        let title = panel["title"].as_str().unwrap_or_default().to_owned();
        let targets = panel["targets"].as_array().cloned().unwrap_or_default();
        targets
            .into_iter()
            .map(move |target| (title.clone(), target["expr"].as_str().unwrap_or_default().to_owned()))
    };
    panels.iter().flat_map(of).collect()
}
