//! Running `remoe up` and its events.

use crate::binaries;
use crate::control::Control;
use crate::deadline::{self, LONG, within};
use crate::process::{Process, lives};
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tokio::sync::mpsc;

/// Event of `remoe up`.
#[derive(Debug, Clone, Deserialize)]
pub struct UpEvent {
    /// `ready`, `restarted`, `asleep`, `awake`, `joined` or `replanned`.
    pub event: String,
    /// Model of the event.
    pub model: String,
    /// URL of the HTTP endpoint.
    pub endpoint: String,
    /// Durations of the start, in the first event.
    pub start: Option<StartParts>,
    /// Settings of a planned main function, in the first event.
    pub main: Option<MainSettings>,
    /// Present functions.
    pub functions: Vec<FunctionState>,
}

/// Durations of the parts of a start, in seconds.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct StartParts {
    /// Collection of the plan's input.
    pub facts_s: f64,
    /// Planning.
    pub plan_s: f64,
    /// Start of all functions.
    pub functions_s: f64,
    /// Loading until the placement was in force.
    pub placement_s: f64,
}

/// Settings of a planned main function.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct MainSettings {
    /// Number of concurrent requests.
    pub concurrency: u32,
    /// Number of threads.
    pub threads: usize,
    /// Size of the KV cache, in bytes.
    pub kv_cache_bytes: u64,
    /// Size of the KV cache, in tokens.
    pub kv_cache_tokens: u64,
}

/// Function in an event.
#[derive(Debug, Clone, Deserialize)]
pub struct FunctionState {
    /// Process id.
    pub pid: Option<u32>,
    /// gRPC address.
    pub address: Option<SocketAddr>,
    /// Address of `/metrics`.
    pub metrics: Option<SocketAddr>,
    /// `main` or `remote`.
    pub role: String,
    /// Listing of its experts.
    pub experts: String,
    /// State, such as `serving`.
    pub state: String,
}

impl UpEvent {
    /// Returns the main function.
    #[must_use]
    pub fn main(&self) -> &FunctionState {
        self.functions.iter().find(|function| function.role == "main").expect("there is a main function")
    }

    /// Returns the process ids of the remote functions.
    #[must_use]
    pub fn remote_pids(&self) -> Vec<u32> {
        let remote = self.functions.iter().filter(|function| function.role == "remote");
        remote.filter_map(|function| function.pid).collect()
    }

    /// Returns the process ids of all functions.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.functions.iter().filter_map(|function| function.pid).collect()
    }

    /// Returns true if all functions serve and no process id is in `gone`.
    #[must_use]
    pub fn is_whole_without(&self, gone: &[u32]) -> bool {
        self.functions.iter().all(|function| {
            function.state == "serving" && function.pid.is_some_and(|pid| !gone.contains(&pid))
        })
    }

    /// Returns the HTTP address.
    #[must_use]
    pub fn http(&self) -> SocketAddr {
        let address = self.endpoint.strip_prefix("http://").expect("the endpoint is an HTTP URL");
        address.parse().expect("the endpoint is an address")
    }

    /// Returns a control client of the main function.
    #[must_use]
    pub fn control(&self) -> Control {
        Control::new(self.main().address.expect("the main function listens"))
    }
}

/// Running `remoe up`.
pub struct Up {
    /// Process of the command.
    pub process: Process,
    /// First event.
    pub ready: UpEvent,
    events: mpsc::UnboundedReceiver<String>,
}

impl Up {
    /// Starts `model` with half of its experts in `replicas` remote functions, on any free port, and waits until it
    /// is ready.
    pub async fn start(model: &Path, replicas: u32) -> Self {
        let count = replicas.to_string();
        let up = Self::start_with(model, &["--remote-ratio", "0.5", "--replicas", &count]).await;
        assert_eq!(up.ready.remote_pids().len(), replicas as usize, "{:?}", up.ready);
        up
    }

    /// Starts `model` with further arguments, on any free port, and waits until it is ready.
    pub async fn start_with(model: &Path, arguments: &[&str]) -> Self {
        let model = model.to_str().expect("paths of tests are UTF-8");
        Self::start_models(&[model], arguments).await
    }

    /// Starts `models` with further arguments, on any free port, and waits until the first is ready.
    pub async fn start_models(models: &[&str], arguments: &[&str]) -> Self {
        Self::start_logging(models, arguments, None).await
    }

    /// Starts models as [`Self::start_models`] does, with `filter` as `REMOE_LOG`.
    pub async fn start_logging(models: &[&str], arguments: &[&str], filter: Option<&str>) -> Self {
        let filter = filter.map(|filter| ("REMOE_LOG", filter.to_owned()));
        Self::start_in(models, arguments, filter.as_slice()).await
    }

    /// Starts models as [`Self::start_models`] does, with additional environment variables.
    pub async fn start_in(models: &[&str], arguments: &[&str], variables: &[(&str, String)]) -> Self {
        let mut command = Command::new(binaries::program("remoe"));
        command.args(["up", "--json", "--port", "0", "--threads", "1"]).args(arguments).args(models);
        command.env_remove("REMOE_LOG").env_remove("REMOE_API_KEY");
        command.env("REMOE_BIN_DIR", binaries::folder());
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        let (sender, mut events) = mpsc::unbounded_channel();
        let mut process = Process::start("remoe up", command, move |line| drop(sender.send(line)));
        let Some(line) = within(LONG, "the first event of `up`", events.recv()).await else {
            panic!("`up` ended before it was ready: {:?}", process.end(LONG).await)
        };
        let ready = parse(&line);
        assert_eq!(ready.event, "ready");
        Self { process, ready, events }
    }

    /// Waits until all functions serve again, without the processes `gone`.
    pub async fn whole_without(&mut self, gone: &[u32]) -> UpEvent {
        within(LONG, "an event of `up` with all functions serving again", async {
            loop {
                let line = self.events.recv().await.expect("`up` lives on");
                let event = parse(&line);
                assert_eq!(event.event, "restarted");
                if event.is_whole_without(gone) {
                    return event;
                }
            }
        })
        .await
    }

    /// Waits for the next event, which must be `name`.
    pub async fn next(&mut self, name: &str) -> UpEvent {
        self.next_of(&[name]).await
    }

    /// Waits for the next event, which must be one of `names`.
    pub async fn next_of(&mut self, names: &[&str]) -> UpEvent {
        let line = within(LONG, "an event of `up`", self.events.recv()).await.expect("`up` lives on");
        let event = parse(&line);
        assert!(names.contains(&event.event.as_str()), "{event:?}, expected one of {names:?}");
        event
    }

    /// Returns the unread events.
    pub fn unread(&mut self) -> Vec<UpEvent> {
        std::iter::from_fn(|| self.events.try_recv().ok()).map(|line| parse(&line)).collect()
    }
}

/// Waits until all processes have ended.
pub async fn all_gone(pids: &[u32], limit: Duration) {
    let what = format!("the end of the processes {pids:?}");
    deadline::until(limit, &what, async || (!pids.iter().any(|&pid| lives(pid))).then_some(())).await;
}

fn parse(line: &str) -> UpEvent {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("event {line:?}: {error}"))
}
