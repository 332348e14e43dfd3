//! Test models, and the `remoe-fetch` program that copies them.

use remoe_hub::{Access, FetchTimeouts, FetchedStore};
use remoe_model::Store;
use remoe_test_sources::Content;
use remoe_test_support::checkpoint::{Sizes, generate};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

pub(crate) const WEIGHTS: &str = "model.safetensors";
pub(crate) const ANY_PORT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// Generates a model whose experts have 3 MiB each.
pub(crate) fn model() -> TempDir {
    generate(Sizes {
        layers: 1,
        hidden: 256,
        width: 1024,
        experts: 8,
        top_k: 2,
        vocabulary: 256,
        context: 64,
    })
}

/// Reads all files of a folder.
pub(crate) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
    entries
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .collect()
}

pub(crate) fn total_bytes(folder: &Path) -> u64 {
    files(folder).values().map(|bytes| bytes.len() as u64).sum()
}

/// Returns short timeouts for tests.
pub(crate) fn short_timeouts() -> FetchTimeouts {
    FetchTimeouts {
        connect: Duration::from_secs(2),
        idle: Duration::from_millis(300),
        attempts: 3,
        first_pause: Duration::from_millis(10),
        longest_pause: Duration::from_millis(50),
        other_process: Duration::from_secs(20),
        stall_limit: None,
    }
}

/// Connects to `model` with short timeouts, on a thread that may block.
pub(crate) async fn connect(model: &str, cache: &Path) -> Result<Arc<FetchedStore>, String> {
    connect_with(model, cache, short_timeouts()).await
}

/// Connects to `model` with the given timeouts.
pub(crate) async fn connect_with(
    model: &str,
    cache: &Path,
    timeouts: FetchTimeouts,
) -> Result<Arc<FetchedStore>, String> {
    let (location, cache) = (model.parse().unwrap(), cache.to_owned());
    let access = Access { timeouts, ..Access::default() };
    let connecting =
        tokio::task::spawn_blocking(move || FetchedStore::connect(&location, &cache, &access).map(Arc::new));
    connecting.await.unwrap().map_err(|error| error.to_string())
}

/// Reads all bytes of a file through the store.
pub(crate) async fn read(store: &Arc<FetchedStore>, name: &'static str) -> Result<Vec<u8>, String> {
    let store = Arc::clone(store);
    let reading = tokio::task::spawn_blocking(move || {
        let file = store.open(name)?.ok_or_else(|| std::io::Error::other("absent"))?;
        let mut bytes = vec![0; file.size() as usize];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    });
    reading.await.unwrap().map_err(|error: std::io::Error| error.to_string())
}

/// Starts a web server for the model in `folder`.
pub(crate) async fn web(folder: &Path) -> (remoe_test_sources::Web, Arc<Content>) {
    let content = Content::new(folder);
    (remoe_test_sources::Web::start(ANY_PORT, content.clone()).await.unwrap(), content)
}

/// Running `remoe-fetch`.
pub(crate) struct CopyProcess {
    child: Child,
    pub(crate) to: PathBuf,
}

/// Starts a copy of `model` into `to` through `cache`.
pub(crate) fn start_copy(
    model: &str,
    cache: &Path,
    to: &Path,
    environment: &[(&str, String)],
) -> CopyProcess {
    start_copy_with(model, cache, to, environment, &[])
}

/// Starts a copy with further flags.
pub(crate) fn start_copy_with(
    model: &str,
    cache: &Path,
    to: &Path,
    environment: &[(&str, String)],
    flags: &[&str],
) -> CopyProcess {
    let mut command = Command::new(env!("CARGO_BIN_EXE_remoe-fetch"));
    for name in [
        "HF_ENDPOINT",
        "HF_TOKEN",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_REGION",
        "AWS_SESSION_TOKEN",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
    ] {
        command.env_remove(name);
    }
    command.arg("--model").arg(model).arg("--model-cache").arg(cache).arg("--to").arg(to).args(flags);
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    CopyProcess { child, to: to.to_owned() }
}

impl CopyProcess {
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for the process to end, and returns its output.
    pub(crate) async fn wait(self) -> Output {
        tokio::task::spawn_blocking(|| self.child.wait_with_output()).await.unwrap().unwrap()
    }

    /// Waits for the process to end, asserts success, and returns the copied files.
    pub(crate) async fn expect_files(self) -> BTreeMap<String, Vec<u8>> {
        let to = self.to.clone();
        let output = self.wait().await;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        files(&to)
    }

    /// Waits for the process to end, asserts failure, and returns its standard error.
    pub(crate) async fn expect_failure(self) -> String {
        let output = self.wait().await;
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    }
}
