//! Traces of requests, as a collector receives them: one tree over gateway, main function and remote functions.

use remoe_test_support::binaries;
use remoe_test_support::collector::{Collector, CollectorBehaviour, ExportedSpan};
use remoe_test_support::deadline::{LONG, SOON, until};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::placement::{all_experts, remote_sets};
use remoe_test_support::process::Process;
use remoe_test_support::raw::{self, Connection};
use remoe_test_support::up::{Up, all_gone};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::Command;
use tokio::net::TcpListener;

const PARENT: &str = "00f067aa0ba902b7";

/// Returns the id of the `n`th trace.
fn trace(n: u8) -> String {
    format!("4bf92f3577b34da6a3ce929d0e0e47{n:02x}")
}

/// Returns a completion request of `tokens` tokens with a trace context and an API key.
fn post(model: &str, tokens: u32, stream: bool, traceparent: &str) -> String {
    let body = json!({"model": model, "prompt": [1, 2, 3, 4, 5], "max_tokens": tokens, "temperature": 0,
        "ignore_eos": true, "stream": stream});
    let headers = format!("\r\ntraceparent: {traceparent}\r\nAuthorization: Bearer sk-secret\r\n");
    raw::post("/v1/completions", &body.to_string()).replacen("\r\n", &headers, 1)
}

async fn up(model: &ModelFixture, arguments: &[&str], variables: &[(&str, String)]) -> Up {
    let arguments = [&["--api-key", "sk-secret"], arguments].concat();
    Up::start_in(&[model.folder.to_str().unwrap()], &arguments, variables).await
}

/// Counts the spans of each service, kind and name.
fn counted(spans: &[ExportedSpan]) -> BTreeMap<(&str, i32, &str), usize> {
    let mut counts = BTreeMap::new();
    for span in spans {
        *counts.entry((span.service(), span.kind, span.name.as_str())).or_default() += 1;
    }
    counts
}

const FORWARD: &str = "remoe.v1.ExpertFunction/Forward";

/// Expected spans of a request with two remote functions.
fn whole(model: &str) -> BTreeMap<(&str, i32, &str), usize> {
    BTreeMap::from([
        (("remoe-gateway", 2, "POST /v1/completions"), 1),
        (("remoe-gateway", 1, "wait"), 1),
        (("remoe-gateway", 3, model), 1),
        (("remoe-main", 2, "POST /v1/completions"), 1),
        (("remoe-main", 1, "queue"), 1),
        (("remoe-main", 1, "prefill"), 1),
        (("remoe-main", 1, "decode"), 1),
        (("remoe-main", 3, FORWARD), 4),
        (("remoe-expert", 2, FORWARD), 4),
    ])
}

/// Each response or stream gives one tree, in which every span lies within its parent.
#[tokio::test(flavor = "multi_thread")]
async fn request_gives_one_span_tree() {
    let model = ModelFixture::fixture("olmoe-basic");
    let collector = Collector::start(CollectorBehaviour::Takes).await;
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("access.log");
    let mut variables = collector.environment();
    variables.push(("REMOE_LOG", "info,main_model_fn=debug".to_owned()));
    variables.push(("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test".to_owned()));
    let arguments =
        ["--remote-ratio", "0.5", "--groups", "2", "--replicas", "1", "--access-log", log.to_str().unwrap()];
    let mut up = up(&model, &arguments, &variables).await;
    let title = format!("text_completion {}", model.name);
    for (n, stream) in [(1, false), (2, true)] {
        let request = post(&model.name, 6, stream, &format!("00-{}-{PARENT}-01", trace(n)));
        let answer = raw::ask(up.ready.http(), request).await;
        assert_eq!(answer.head.status, 200, "{}", answer.text());
        let expected = whole(&title);
        let spans = collector.trace(&trace(n), "all spans", |spans| counted(spans) == expected).await;

        let root = spans.iter().find(|span| span.parent == PARENT).expect("the caller's child");
        assert_eq!((root.service(), root.kind), ("remoe-gateway", 2));
        for span in spans.iter().filter(|span| span.id != root.id) {
            let parent = spans.iter().find(|parent| parent.id == span.parent);
            let parent = parent.unwrap_or_else(|| panic!("{span:?} is a part of nothing"));
            // Processes read the clock separately, in nanoseconds.
            let apart = if parent.service() == span.service() { 0 } else { 5_000_000 };
            assert!(
                parent.start <= span.start + apart
                    && span.start <= span.end
                    && span.end <= parent.end + apart,
                "{span:?}\nis not within\n{parent:?}"
            );
            // Parents are in the same service, or the client of the server.
            assert_eq!(parent.kind == 3, span.kind == 2, "{span:?} of {parent:?}");
            assert_eq!(parent.service() == span.service(), span.kind != 2, "{span:?} of {parent:?}");
        }
        assert!(spans.iter().all(|span| !span.failed), "{spans:?}");
        for span in spans.iter().filter(|span| span.kind == 2 && span.service() != "remoe-expert") {
            let attribute =
                |name: &str| span.attributes.get(name).unwrap_or_else(|| panic!("{name} of {span:?}"));
            assert_eq!(attribute("http.request.method"), "POST");
            assert_eq!(attribute("http.route"), "/v1/completions");
            assert_eq!(attribute("http.response.status_code"), 200);
            assert_eq!(attribute("gen_ai.operation.name"), "text_completion");
            assert_eq!(attribute("gen_ai.request.model"), &model.name);
            assert_eq!(attribute("gen_ai.usage.input_tokens"), 5);
            assert_eq!(attribute("gen_ai.usage.output_tokens"), 6);
        }
        // The counts of the main function equal those of the remote functions.
        for client in spans.iter().filter(|span| span.kind == 3 && span.name == FORWARD) {
            let server = spans.iter().find(|span| span.parent == client.id).unwrap();
            for name in ["remoe.calls", "remoe.calls.failed", "remoe.pairs"] {
                assert_eq!(client.attributes[name], server.attributes[name], "{name}: {client:?} {server:?}");
            }
            assert!(client.attributes["remoe.calls"].as_i64().unwrap() > 0);
            assert!(client.attributes["remoe.bytes.sent"].as_i64().unwrap() > 0);
        }
        let pairs = |phase: &str| {
            let phase = spans.iter().find(|span| span.name == phase).unwrap();
            let parts = spans.iter().filter(|span| span.parent == phase.id);
            let told: i64 = parts.map(|span| span.attributes["remoe.pairs"].as_i64().unwrap()).sum();
            assert_eq!(phase.attributes["remoe.pairs.remote"], told, "{phase:?}");
            told
        };
        assert!(pairs("prefill") > 0 && pairs("decode") > 0);
        let instances: std::collections::BTreeSet<_> =
            spans.iter().map(|span| span.resource["service.instance.id"].to_string()).collect();
        assert_eq!(instances.len(), 4, "a gateway, a main function and two remote ones");
        assert!(spans.iter().all(|span| span.resource["deployment.environment.name"] == "test"));
        assert!(!format!("{spans:?}").contains("sk-secret"));

        let of_trace = |line: &String| line.contains(&trace(n));
        let line = until(SOON, "a line of the access log", async || {
            std::fs::read_to_string(&log).ok()?.lines().map(str::to_owned).find(of_trace)
        });
        let line: Value = serde_json::from_str(&line.await).unwrap();
        assert_eq!(line["trace_id"], trace(n));
        let answered = |line: &String| of_trace(line) && line.contains("answered");
        until(SOON, "a line of the main function's log", async || {
            up.process.log().iter().any(answered).then_some(())
        })
        .await;
    }
    // Unsampled requests and routes outside /v1 have no spans.
    let unsampled = post(&model.name, 2, false, &format!("00-{}-{PARENT}-00", trace(3)));
    assert_eq!(raw::ask(up.ready.http(), unsampled).await.head.status, 200);
    raw::ask(up.ready.http(), raw::get("/health")).await;
    let pids = up.ready.pids();
    up.process.signal(Signal::INT);
    assert_eq!(up.process.end(LONG).await.code(), Some(0));
    all_gone(&pids, SOON).await;
    let known = [trace(1), trace(2)];
    assert!(collector.spans().iter().all(|span| known.contains(&span.trace)), "{:?}", collector.spans());
}

/// A client that disconnects ends its work, and the spans show it.
#[tokio::test(flavor = "multi_thread")]
async fn disconnected_client_is_marked_in_spans() {
    let model = ModelFixture::fixture("olmoe-basic");
    let collector = Collector::start(CollectorBehaviour::Takes).await;
    let up = up(&model, &["--remote-ratio", "0"], &collector.environment()).await;
    let mut connection = Connection::open(up.ready.http()).await;
    let traceparent = format!("00-{}-{PARENT}-01", trace(1));
    // Long enough to be left.
    connection.write(post(&model.name, 100, true, &traceparent)).await.unwrap();
    connection.head().await.unwrap();
    drop(connection);
    let servers = |spans: &[ExportedSpan]| spans.iter().filter(|span| span.kind == 2).count() == 2;
    for span in collector.trace(&trace(1), "two server spans", servers).await {
        if span.kind == 2 && span.failed {
            assert_eq!(span.attributes["error.type"], "client_disconnected", "{span:?}");
        }
    }
}

/// A request that cannot proceed, because no function has its experts, and whose client disconnects: its tree
/// contains the work of remote functions until then.
#[tokio::test(flavor = "multi_thread")]
async fn abandoned_request_gives_one_span_tree() {
    let model = ModelFixture::fixture("mixtral-basic");
    let folder = model.copy();
    let collector = Collector::start(CollectorBehaviour::Takes).await;
    let options = || StartOptions { environment: collector.environment(), ..StartOptions::default() };
    let checkpoint = model.checkpoint();
    let function = RemoteFunction::start(folder.path(), &all_experts(&checkpoint), options()).await;
    let main = MainFunction::start(folder.path(), options()).await;
    let remote = remote_sets(&checkpoint, 1.0);
    // No function hosts the last layer.
    let hosted = remote[..remote.len() - 1].to_vec();
    assert!(!hosted.is_empty(), "a model of several layers");
    main.control.route_parts(&[(function.address(), hosted)], &remote).await;
    main.take_weights_away(folder.path()).await;

    let mut connection = Connection::open(main.http()).await;
    let traceparent = format!("00-{}-{PARENT}-01", trace(1));
    let name = folder.path().file_name().unwrap().to_str().unwrap();
    connection.write(post(name, 4, false, &traceparent)).await.unwrap();
    let repeated = async || MetricsPage::read(main.http()).await.value("remoe_iterations_repeated_total");
    until(LONG, "repeated iterations", async || (repeated().await > 0).then_some(())).await;
    drop(connection);
    let is_whole = |spans: &[ExportedSpan]| {
        let known =
            |span: &ExportedSpan| span.parent == PARENT || spans.iter().any(|it| it.id == span.parent);
        let of = |service| spans.iter().any(|span| span.kind == 2 && span.service() == service);
        of("remoe-main") && of("remoe-expert") && spans.iter().all(known)
    };
    let spans = collector.trace(&trace(1), "one tree over both functions", is_whole).await;
    let asked = spans.iter().find(|span| span.kind == 3).expect("what was asked of the remote function");
    assert!(asked.attributes["remoe.calls"].as_i64().unwrap() > 0 && !asked.failed, "{asked:?}");
    let phase = spans.iter().find(|span| span.id == asked.parent).unwrap();
    assert!(phase.name == "prefill" && phase.attributes["error.type"] == "cancelled", "{phase:?}");
}

/// Requests are answered and processes end for every collector behaviour; dropped spans are counted.
#[tokio::test(flavor = "multi_thread")]
async fn hung_collector_delays_no_request() {
    let model = ModelFixture::fixture("olmoe-basic");
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    for manner in [Some(CollectorBehaviour::Hangs), Some(CollectorBehaviour::Refuses), None] {
        let collector = match manner {
            Some(manner) => Some(Collector::start(manner).await),
            None => None,
        };
        let address = collector.as_ref().map_or(closed, |collector| collector.address);
        let variables = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{address}")),
            ("OTEL_BSP_SCHEDULE_DELAY", "1".to_owned()),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "8".to_owned()),
        ];
        let mut up = up(&model, &["--remote-ratio", "0.5"], &variables).await;
        for n in 0..30 {
            let request = post(&model.name, 2, n % 2 == 0, &format!("00-{}-{PARENT}-01", trace(n)));
            let answer = raw::ask(up.ready.http(), request).await;
            assert_eq!(answer.head.status, 200, "{manner:?}: {}", answer.text());
        }
        let lost = match manner {
            Some(CollectorBehaviour::Hangs) => "dropped",
            _ => "failed",
        };
        let series = format!("remoe_trace_spans_total{{outcome=\"{lost}\"}}");
        let request = raw::get("/metrics").replacen("\r\n", "\r\nAuthorization: Bearer sk-secret\r\n", 1);
        until(LONG, &series, async || {
            let page = raw::ask(up.ready.http(), &request).await.text();
            let value = page.lines().find_map(|line| line.strip_prefix(&series)?.trim().parse::<u64>().ok());
            value.filter(|value| *value > 0)
        })
        .await;
        if let Some(collector) = &collector {
            assert!(collector.requests() > 0, "{manner:?}");
        }
        let pids = up.ready.pids();
        up.process.signal(Signal::INT);
        assert_eq!(up.process.end(SOON).await.code(), Some(0), "{manner:?}");
        all_gone(&pids, SOON).await;
    }
}

/// Without the environment variables there is no exporter and no metric of one.
#[tokio::test(flavor = "multi_thread")]
async fn tracing_is_off_without_environment() {
    let model = ModelFixture::fixture("olmoe-basic");
    let collector = Collector::start(CollectorBehaviour::Takes).await;
    for variables in [
        vec![("OTEL_SERVICE_NAME", "x".to_owned())],
        [collector.environment(), vec![("OTEL_SDK_DISABLED", "true".to_owned())]].concat(),
    ] {
        let mut up = up(&model, &["--remote-ratio", "0.5"], &variables).await;
        let request = post(&model.name, 2, false, &format!("00-{}-{PARENT}-01", trace(1)));
        assert_eq!(raw::ask(up.ready.http(), request).await.head.status, 200);
        // The gateway's page includes that of the main function.
        let own = raw::get("/metrics").replacen("\r\n", "\r\nAuthorization: Bearer sk-secret\r\n", 1);
        let remote = up.ready.functions.iter().find(|function| function.role == "remote").unwrap();
        let remote = (remote.metrics.unwrap(), raw::get("/metrics"));
        for (address, request) in [(up.ready.http(), own), remote] {
            let page = raw::ask(address, request).await.text();
            assert!(page.contains("remoe_") && !page.contains("remoe_trace"), "{page}");
        }
        up.process.signal(Signal::INT);
        assert_eq!(up.process.end(LONG).await.code(), Some(0));
    }
    assert_eq!(collector.requests(), 0);
}

/// An unsupported protocol is rejected by name before the start.
#[tokio::test(flavor = "multi_thread")]
async fn another_protocol_is_refused() {
    let model = ModelFixture::fixture("olmoe-basic");
    let mut command = Command::new(binaries::program("remoe"));
    command.args(["up", "--json", "--port", "0"]).arg(&model.folder);
    command.env("REMOE_BIN_DIR", binaries::folder());
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318");
    command.env("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf");
    let (sender, lines) = std::sync::mpsc::channel();
    let mut process = Process::start("remoe up", command, move |line| drop(sender.send(line)));
    assert_eq!(process.end(SOON).await.code(), Some(2));
    let line: Value = serde_json::from_str(&lines.try_iter().next().unwrap()).unwrap();
    assert_eq!(line["error"]["field"], "OTEL_EXPORTER_OTLP_PROTOCOL", "{line}");
    assert!(line["error"]["message"].as_str().unwrap().contains("grpc"), "{line}");
}
