//! Main and remote functions under check, and requests to them.

use super::DeviceArgs;
use super::recording::DeviceRecording;
use crate::error::{BenchError, ErrorContext, Result};
use crate::process::ChildProcess;
use remoe_model::Checkpoint;
use remoe_process::Announcement;
use remoe_proto::v1::generate_event::Event;
use remoe_proto::v1::main_model_client::MainModelClient;
use remoe_proto::v1::{
    DescribeMainRequest, Endpoint, Finished, GenerateEvent, GenerateRequest, InspectReply, InspectRequest,
    LayerExperts, Routing, TokenIds, generate_request, inspect_request,
};
use remoe_proto::{MAX_CONTROL_MESSAGE, format_listing};
use serde_json::Value;
use std::fmt::Display;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tonic::Streaming;
use tonic::transport::Channel;

/// Default bytes of the KV cache.
const CACHE_BYTES: u64 = 256 << 20;
/// Longest time without a byte of a response.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Settings of a main function beside its model.
#[derive(Debug, Clone)]
pub(super) struct FunctionSettings {
    pub(super) dtype: &'static str,
    pub(super) cache_bytes: u64,
    pub(super) max_batch: usize,
    pub(super) threads: Option<usize>,
}

impl FunctionSettings {
    pub(super) fn with_dtype(dtype: &'static str) -> Self {
        Self { dtype, cache_bytes: CACHE_BYTES, max_batch: 32, threads: Some(1) }
    }
}

/// A main function under check.
pub(super) struct MainProcess {
    pub(super) http: SocketAddr,
    client: MainModelClient<Channel>,
    recording: Option<PathBuf>,
    generation: u64,
    _process: ChildProcess,
}

/// A remote function under check.
pub(super) struct RemoteProcess {
    pub(super) address: SocketAddr,
    pub(super) process: ChildProcess,
}

impl MainProcess {
    /// Starts a main function, which has no placement yet.
    pub(super) async fn start(args: &DeviceArgs, model: &Path, settings: &FunctionSettings) -> Result<Self> {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let mut command = function_command(&args.main, model, settings.dtype, settings.threads);
        command.args(["--device", &args.device, "--http-listen", "127.0.0.1:0"]);
        command.args(["--kv-cache-bytes", &settings.cache_bytes.to_string()]);
        command.args(["--max-batch", &settings.max_batch.to_string()]);
        let recording = args.recorded.then(|| args.scratch.join(format!("recording-{number}.json")));
        if let Some(path) = &recording {
            command.env("REMOE_TEST_RECORDING", path);
        }
        let (process, announcement) = start_announced("main function", command)?;
        let http = announcement.http.doing(|| "reading the announcement of a main function")?;
        let address = format!("http://{}", announcement.grpc);
        let client = MainModelClient::connect(address).await.doing(|| "connecting to a main function")?;
        let client = client.max_decoding_message_size(MAX_CONTROL_MESSAGE);
        Ok(Self { http, client, recording, generation: 0, _process: process })
    }

    /// Places the experts `remote` on each of `functions` and waits until the others are loaded.
    pub(super) async fn route(
        &mut self,
        functions: &[&RemoteProcess],
        remote: &[LayerExperts],
    ) -> Result<()> {
        self.generation += 1;
        let endpoints = functions
            .iter()
            .map(|function| Endpoint { address: function.address.to_string(), ..Endpoint::default() });
        let routing = Routing {
            generation: self.generation,
            endpoints: endpoints.collect(),
            remote: remote.to_vec(),
            ..Routing::default()
        };
        let ack = self.client.set_routing(routing).await.doing(|| "placing experts")?.into_inner();
        if let Some(problem) = ack.problems.first() {
            return Err(BenchError::new(format!("connecting to {}", problem.address), &problem.message));
        }
        loop {
            let described = self.client.describe(DescribeMainRequest::default()).await;
            if described.doing(|| "describing a main function")?.into_inner().arriving == 0 {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Computes a prompt and returns its logits and routing.
    pub(super) async fn inspect(&self, ids: &[u32]) -> Result<InspectReply> {
        let prompt = inspect_request::Prompt::Ids(TokenIds { ids: ids.to_vec() });
        let request = InspectRequest { prompt: Some(prompt), hidden: false, scores: false };
        Ok(self.client.clone().inspect(request).await.doing(|| "inspecting a prompt")?.into_inner())
    }

    /// Begins a greedy answer of `tokens` tokens.
    pub(super) async fn begin(&self, ids: &[u32], tokens: u32) -> Result<AnswerStream> {
        let request = GenerateRequest {
            prompt: Some(generate_request::Prompt::Ids(TokenIds { ids: ids.to_vec() })),
            max_tokens: tokens,
            temperature: Some(0.0),
            ignore_eos: true,
            ..GenerateRequest::default()
        };
        Ok(AnswerStream(self.client.clone().generate(request).await.doing(|| "generating")?.into_inner()))
    }

    /// Generates a greedy answer of `tokens` tokens.
    pub(super) async fn generate(&self, ids: &[u32], tokens: u32) -> Result<Finished> {
        self.begin(ids, tokens).await?.finish().await
    }

    /// Returns the value of a metric without labels, or 0 if there is none.
    pub(super) fn metric(&self, name: &str) -> Result<f64> {
        let (_, text) = send_http(self.http, "GET", "/metrics", "")?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(Ok(0.0), |value| value.trim().parse().doing(|| format!("reading {name}")))
    }

    /// Returns the recorded requests to the device, if the program records them.
    pub(super) async fn recording(&self) -> Result<Option<DeviceRecording>> {
        let Some(path) = &self.recording else { return Ok(None) };
        // The program writes it every 20 ms.
        tokio::time::sleep(Duration::from_millis(100)).await;
        DeviceRecording::read(path).map(Some)
    }
}

impl RemoteProcess {
    /// Starts a remote function with `experts`.
    pub(super) fn start(
        args: &DeviceArgs,
        model: &Path,
        experts: &[LayerExperts],
        settings: &FunctionSettings,
    ) -> Result<Self> {
        let mut command = function_command(&args.remote, model, settings.dtype, settings.threads);
        command.args(["--experts", &format_listing(experts)]);
        let (process, announcement) = start_announced("remote function", command)?;
        Ok(Self { address: announcement.grpc, process })
    }
}

/// Stream of an answer.
pub(super) struct AnswerStream(Streaming<GenerateEvent>);

impl AnswerStream {
    /// Waits for the next tokens or the end.
    pub(super) async fn next_event(&mut self) -> Result<Event> {
        loop {
            let message = self.0.message().await.doing(|| "reading an answer")?;
            match message.doing(|| "reading an answer")?.event {
                None | Some(Event::Started(_)) => {}
                Some(event) => return Ok(event),
            }
        }
    }

    /// Waits for the end.
    pub(super) async fn finish(mut self) -> Result<Finished> {
        loop {
            if let Event::Finished(finished) = self.next_event().await? {
                return Ok(finished);
            }
        }
    }
}

/// Returns the last half of the experts of each layer.
pub(super) fn last_half_of_experts(model: &Path) -> Result<Vec<LayerExperts>> {
    let checkpoint = Checkpoint::open(model).doing(|| format!("opening {}", model.display()))?;
    let config = checkpoint.config();
    let layers = config.moe_layers().into_iter();
    let sets = layers.filter_map(|layer| {
        let experts = config.moe(layer)?.experts as u32;
        Some(LayerExperts { layer: layer as u32, experts: (experts - experts / 2..experts).collect() })
    });
    Ok(sets.collect())
}

/// Sends a request with a JSON body and returns status and body of the response.
pub(super) fn send_http(address: SocketAddr, method: &str, path: &str, body: &str) -> Result<(u16, String)> {
    let sending = || format!("requesting {address}{path}");
    let mut stream = TcpStream::connect(address).doing(sending)?;
    stream.set_read_timeout(Some(READ_TIMEOUT)).doing(sending)?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .doing(sending)?;
    let mut response = Vec::new();
    stream.read_to_end(&mut response).doing(sending)?;
    let response = String::from_utf8_lossy(&response);
    let (head, body) = response.split_once("\r\n\r\n").doing(sending)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).doing(sending)?;
    Ok((status, body.to_owned()))
}

/// Parses the JSON object of a response body, which may have chunk sizes around it.
pub(super) fn json_object(body: &str) -> Option<Value> {
    serde_json::from_str(body.get(body.find('{')?..=body.rfind('}')?)?).ok()
}

/// Returns `error.code`, or else `error.type`, of a response body.
pub(super) fn error_code(body: &str) -> Option<String> {
    let body = json_object(body)?;
    let error = body.get("error")?;
    ["code", "type"].iter().find_map(|field| error.get(field)?.as_str().map(str::to_owned))
}

/// Returns the command of a main or remote function.
fn function_command(program: &Path, model: &Path, dtype: &str, threads: Option<usize>) -> Command {
    let mut command = Command::new(program);
    command.arg("--model").arg(model).args(["--dtype", dtype]);
    command.arg("--launcher-pid").arg(std::process::id().to_string());
    if let Some(threads) = threads {
        command.args(["--threads", &threads.to_string()]);
    }
    command.env("REMOE_LOG", "warn").env_remove("REMOE_API_KEY");
    command
}

/// Starts a function and reads its announcement.
fn start_announced(name: &str, command: Command) -> Result<(ChildProcess, Announcement)> {
    // The process ends with this thread, which outlives the check.
    let mut process = ChildProcess::start(name, command)?;
    let line = process.line()?;
    let announcement = serde_json::from_str(&line).doing(|| format!("reading the announcement {line:?}"))?;
    Ok((process, announcement))
}

/// Prefixes a failure with the name of its model.
pub(super) fn failure_of(model: &str, failure: impl Display) -> String {
    format!("{model}: {failure}")
}
