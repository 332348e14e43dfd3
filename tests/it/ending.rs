//! Termination of functions: while they load, while a client watches their health, on a second signal, and with
//! requests that take too long.

use remoe_process::{Announcement, Role};
use remoe_test_support::control::{Control, greedy};
use remoe_test_support::deadline::{LONG, SOON, until, within};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use remoe_test_support::placement::{all_experts, remote_sets};
use remoe_test_support::process::Process;
use remoe_test_support::recorder::{MessageFault, Recorder};
use remoe_test_support::{binaries, http};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

/// Shorter than the drain timeout of a remote function, so that an earlier end did not wait for it.
const WELL_BEFORE_THE_LIMIT: Duration = Duration::from_secs(20);

/// Returns the address of a model server that accepts connections and never answers.
fn silent_server() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let model = format!("http://{}/model", listener.local_addr().unwrap());
    (listener, model)
}

fn start(program: &str, model: &str, arguments: &[&str]) -> Process {
    let mut command = Command::new(binaries::program(program));
    command.arg("--model").arg(model).args(arguments).env("REMOE_LOG", "debug");
    Process::start(program, command, |line| panic!("announced: {line}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn loading_function_ends_on_a_signal() {
    let (_server, model) = silent_server();
    let cache = tempfile::tempdir().unwrap();
    let cache = ["--model-cache", cache.path().to_str().unwrap()];
    for signal in [Signal::TERM, Signal::INT] {
        for (program, arguments) in
            [("main-model-fn", ["--http-listen", "127.0.0.1:0"]), ("remote-expert-fn", ["--experts", "0:1"])]
        {
            let mut process = start(program, &model, &[arguments, cache].concat());
            let loads = async || process.log().iter().any(|line| line.contains("loading")).then_some(());
            until(SOON, "the beginning of the load", loads).await;
            process.signal(signal);
            assert_eq!(process.end(SOON).await.code(), Some(0), "{program} {signal:?}");
        }
    }
}

async fn watch(address: SocketAddr) -> tonic::Streaming<tonic_health::pb::HealthCheckResponse> {
    let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect_lazy();
    let request = HealthCheckRequest { service: String::new() };
    let mut stream = HealthClient::new(channel).watch(request).await.unwrap().into_inner();
    assert_eq!(stream.next().await.unwrap().unwrap().status, 1, "serving");
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn watched_function_ends_as_soon_as_others() {
    let model = ModelFixture::fixture("mixtral-basic");
    let experts = all_experts(&model.checkpoint());
    let mut remote = RemoteFunction::start(&model.folder, &experts, StartOptions::default()).await;
    let options = StartOptions::default().with("--drain-seconds", 3600);
    let mut main = MainFunction::start(&model.folder, options).await;
    let watching = [watch(remote.address()).await, watch(main.announcement.grpc).await];
    remote.process.signal(Signal::TERM);
    main.process.signal(Signal::TERM);
    assert_eq!(remote.process.end(WELL_BEFORE_THE_LIMIT).await.code(), Some(0));
    assert_eq!(main.process.end(WELL_BEFORE_THE_LIMIT).await.code(), Some(0));
    for mut stream in watching {
        let mut last = None;
        while let Some(Ok(answer)) = stream.next().await {
            last = Some(answer.status);
        }
        assert_eq!(last, Some(2), "watchers are told that the function does not serve");
    }
}

/// Functions start, answer and drain as usual if their logs cannot be written.
#[tokio::test(flavor = "multi_thread")]
async fn functions_live_on_when_their_logs_cannot_be_written() {
    let model = ModelFixture::fixture("mixtral-basic");
    for (program, arguments) in
        [("remote-expert-fn", ["--experts", "0:1"]), ("main-model-fn", ["--http-listen", "127.0.0.1:0"])]
    {
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$0\" \"$@\" 2>/dev/full"]).arg(binaries::program(program));
        command.args(["--threads", "1", "--model"]).arg(&model.folder).args(arguments);
        command.env("REMOE_LOG", "debug");
        let (sender, mut lines) = mpsc::unbounded_channel();
        let mut process = Process::start(program, command, move |line| drop(sender.send(line)));
        let line = within(SOON, "the announcement", lines.recv()).await;
        let Some(line) = line else { panic!("{program} ended: {:?}", process.end(SOON).await) };
        let announcement: Announcement = serde_json::from_str(&line).unwrap();
        if announcement.role == Role::Main {
            let control = Control::new(announcement.grpc);
            control.route(&[], &[]).await;
            assert_eq!(control.generate(greedy(&model.prompts()[0], 4)).await.finished.tokens.len(), 4);
        }
        process.signal(Signal::TERM);
        assert_eq!(process.end(SOON).await.code(), Some(0), "{program}");
    }
}

/// Deployment in which every layer of every token takes at least a tenth of a second.
struct Slow {
    main: MainFunction,
    _recorder: Recorder,
    _function: RemoteFunction,
    stream: http::HttpExchange,
}

/// Starts a deployment with a running stream.
async fn slow(options: StartOptions) -> Slow {
    let model = ModelFixture::demo();
    let checkpoint = model.checkpoint();
    let function =
        RemoteFunction::start(&model.folder, &all_experts(&checkpoint), StartOptions::default()).await;
    let main = MainFunction::start(&model.folder, options).await;
    let behaviour = Arc::new(|_, _: &_| MessageFault::Delay(Duration::from_millis(100)));
    let recorder = Recorder::start(function.address(), behaviour, Arc::new(|_| ())).await;
    main.control.route(&[recorder.address()], &remote_sets(&checkpoint, 1.0)).await;
    let body = json!({
        "prompt": model.prompts()[2], "max_tokens": 900, "temperature": 0, "ignore_eos": true, "stream": true,
    });
    let mut stream = http::post(main.http(), "/v1/completions", &body).await.unwrap();
    assert_eq!(stream.status, 200);
    for _ in 0..2 {
        assert!(stream.chunk().await.unwrap().is_some(), "the stream ended early");
    }
    Slow { main, _recorder: recorder, _function: function, stream }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_outlast_the_drain_end_with_an_error() {
    let mut slow = slow(StartOptions::default().with("--drain-seconds", 1)).await;
    slow.main.process.signal(Signal::TERM);
    let mut last = String::new();
    while let Some(chunk) = slow.stream.chunk().await.unwrap() {
        assert!(!chunk.contains("[DONE]"), "the generation seems complete");
        last = chunk;
    }
    let error: Value = serde_json::from_str(last.trim().strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "service_unavailable", "{last}");
    assert!(error["error"]["message"].as_str().unwrap().contains("shutting down"), "{last}");
    assert_eq!(slow.main.process.end(SOON).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn second_signal_ends_a_function_at_once() {
    let mut slow = slow(StartOptions::default().with("--drain-seconds", 3600)).await;
    slow.main.process.signal(Signal::TERM);
    let drains = async || slow.main.process.log().iter().any(|line| line.contains("draining")).then_some(());
    until(SOON, "the beginning of the drain", drains).await;
    slow.main.process.signal(Signal::INT);
    let status = slow.main.process.end(SOON).await;
    assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_function_that_drains_is_no_warning() {
    let model = ModelFixture::demo();
    let checkpoint = model.checkpoint();
    let mut function =
        RemoteFunction::start(&model.folder, &all_experts(&checkpoint), StartOptions::default()).await;
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    main.control.route(&[function.address()], &remote_sets(&checkpoint, 1.0)).await;
    main.control.generate(greedy(&model.prompts()[0], 4)).await;
    function.process.signal(Signal::TERM);
    assert_eq!(function.process.end(SOON).await.code(), Some(0));
    let ended = || main.process.log().into_iter().find(|line| line.contains("remote function ended"));
    let line = until(SOON, "the end of the function in the log", async || ended()).await;
    assert!(line.contains("INFO"), "{line}");
    assert!(!main.process.log().iter().any(|line| line.contains("closed the stream")));
    // A missing answer counts as one.
    let missed = || main.process.log().into_iter().find(|line| line.contains("circuit open"));
    let line = until(LONG, "a warning", async || missed()).await;
    assert!(line.contains("WARN"), "{line}");
}
