//! A gateway process, and a main function that names itself in its answers.

use crate::api::Api;
use axum::body::Bytes;
use axum::http::{Request, header};
use axum::routing::{get, post};
use axum::{Json, Router};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use remoe_test_support::deadline::{SOON, until, within};
use remoe_test_support::process::Process;
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;
use tokio::net::TcpStream;

/// A gateway process. It is killed when this value is dropped.
pub(crate) struct Gateway {
    pub(crate) address: SocketAddr,
    pub(crate) metrics: SocketAddr,
    _folder: TempDir,
    pub(crate) process: Process,
}

impl Gateway {
    /// Starts the gateway of pod `pod` with `flags`, the API server `api` and a key file of `keys`, if given. Waits
    /// until it accepts requests.
    pub(crate) async fn start(api: &Api, pod: &str, keys: Option<&str>, flags: &[&str]) -> Self {
        let gateway = Self::spawn(api, pod, keys, flags);
        until(SOON, "the gateway to take requests", async || {
            TcpStream::connect(gateway.address).await.ok()?;
            (gateway.get("/health", None).await.0 == 200).then_some(())
        })
        .await;
        gateway
    }

    /// Starts a gateway that serves TLS. Waits until its port is open.
    pub(crate) async fn start_within_tls(api: &Api, keys: &str, flag: &str) -> Self {
        let gateway = Self::spawn(api, "gateway", Some(keys), &[flag]);
        until(SOON, "the port of the gateway", async || TcpStream::connect(gateway.address).await.ok()).await;
        gateway
    }

    fn spawn(api: &Api, pod: &str, keys: Option<&str>, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let cluster = json!({"name": "c", "cluster": {"server": format!("http://{}", api.address)}});
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "clusters": [cluster],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
        });
        let path_of = |name: &str| folder.path().join(name);
        std::fs::write(path_of("kubeconfig"), config.to_string()).unwrap();
        let (address, metrics) = (free_address(), free_address());
        let mut command = Command::new(env!("CARGO_BIN_EXE_remoe-gateway"));
        command.env("KUBECONFIG", path_of("kubeconfig"));
        command.args([format!("--listen={address}"), format!("--metrics-listen={metrics}")]);
        command.args(["--namespace=remoe-system", &format!("--pod={pod}"), &format!("--uid={pod}-uid")]);
        if let Some(keys) = keys {
            std::fs::write(path_of("keys.yaml"), keys).unwrap();
            command.arg(format!("--keys={}", path_of("keys.yaml").display()));
        }
        command.args(flags);
        let process = Process::start(pod, command, |_line| ());
        Self { address, metrics, _folder: folder, process }
    }

    /// Requests a completion of `model` with `key`.
    pub(crate) async fn ask(&self, key: Option<&str>, model: Option<&str>) -> (u16, String) {
        let mut body = json!({"prompt": "x"});
        if let Some(model) = model {
            body["model"] = json!(model);
        }
        self.post("/v1/completions", key, &body).await
    }

    pub(crate) async fn post(&self, path: &str, key: Option<&str>, body: &Value) -> (u16, String) {
        send(self.address, "POST", path, key, &body.to_string()).await
    }

    pub(crate) async fn get(&self, path: &str, key: Option<&str>) -> (u16, String) {
        send(self.address, "GET", path, key, "").await
    }

    /// Scrapes the metrics port.
    pub(crate) async fn scrape(&self, key: Option<&str>) -> (u16, String) {
        send(self.metrics, "GET", "/metrics", key, "").await
    }
}

async fn send(address: SocketAddr, method: &str, path: &str, key: Option<&str>, body: &str) -> (u16, String) {
    let mut request = Request::builder().method(method).uri(format!("http://{address}{path}"));
    request = request.header(header::CONTENT_TYPE, "application/json");
    if let Some(key) = key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let request = request.body(Full::<Bytes>::from(body.to_owned())).unwrap();
    let client = Client::builder(TokioExecutor::new()).build_http();
    let (head, body) = within(SOON, path, client.request(request)).await.unwrap().into_parts();
    let body = within(SOON, "a body", body.collect()).await.unwrap().to_bytes();
    (head.status.as_u16(), String::from_utf8_lossy(&body).into_owned())
}

fn free_address() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}

/// Starts a main function that answers each request with `name`.
pub(crate) async fn main_function(name: &str) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answer = json!({"answered_by": name});
    let routes = Router::new()
        .route("/health", get(|| async { "ok" }))
        .route("/v1/completions", post(move || async move { Json(answer) }));
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    address
}

/// Returns the name of the main function that answered, or `None` for an error.
pub(crate) fn answered_by(answer: &(u16, String)) -> Option<String> {
    let body: Value = serde_json::from_str(&answer.1).ok()?;
    Some(body["answered_by"].as_str()?.to_owned()).filter(|_| answer.0 == 200)
}

/// Writes a ledger of the pod `pod` into `folder` in which requests of `tenant` have cost `nanodollars` today.
pub(crate) fn write_spending(folder: &Path, pod: &str, tenant: &str, nanodollars: u64) {
    use remoe_billing::{Ledger, LedgerLimits, Phases, Record, RequestRecord, Share};
    let ledger = Ledger::open(&folder.join(pod), LedgerLimits::default()).unwrap();
    let cost = Phases { prefill: nanodollars, decode: 0 };
    let share = Share { tier: "main".to_owned(), cost, ..Share::default() };
    let request = RequestRecord {
        at: remoe_gateway_core::CostAccounting::now(),
        id: String::new(),
        model: "a/demo".to_owned(),
        tenant: tenant.to_owned(),
        function: "f".to_owned(),
        prompt_tokens: 1,
        completion_tokens: 1,
        shares: [("f".to_owned(), share)].into(),
        rivals: [].into(),
        served: 0,
    };
    ledger.append(&Record::Request(request)).unwrap();
}
