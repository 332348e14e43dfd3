//! Traces of requests as a collector gets them: one tree over gateway, main function and remote functions.

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

/// The number of the `n`th trace.
fn trace(n: u8) -> String {
    format!("4bf92f3577b34da6a3ce929d0e0e47{n:02x}")
}

/// A completion of `tokens` tokens as part of a trace, by a client with a key.
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

/// How many of `spans` are of each service and kind and have this name.
fn counted(spans: &[ExportedSpan]) -> BTreeMap<(&str, i32, &str), usize> {
    let mut counts = BTreeMap::new();
    for span in spans {
        *counts.entry((span.service(), span.kind, span.name.as_str())).or_default() += 1;
    }
    counts
}

const FORWARD: &str = "remoe.v1.ExpertFunction/Forward";

/// All that a request to two remote functions went through.
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

/// Whole answers and streams are one tree each, in which everything lies within what it is a part of.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_one_tree() {
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
            // Processes read the time of day apart from each other, in nanoseconds.
            let apart = if parent.service() == span.service() { 0 } else { 5_000_000 };
            assert!(
                parent.start <= span.start + apart
                    && span.start <= span.end
                    && span.end <= parent.end + apart,
                "{span:?}\nis not within\n{parent:?}"
            );
            // Only from client to server, and from where that is to what it does there.
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
        // What the main function counted is what the remote functions did.
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
    // A caller that records nothing is not recorded; nor is what is not below /v1.
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

/// A client that leaves ends the work for it, and the spans of that say so.
#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_is_told_apart() {
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

/// A request that never gets on because no function has experts that it needs, and whose client leaves: what remote
/// functions did for it meanwhile is a part of its tree.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_given_up_is_one_tree() {
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

/// Requests are answered and everything ends whatever the collector does; what it did not take is counted.
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

/// Without the environment there is nothing: no exporter, no metrics of one.
#[tokio::test(flavor = "multi_thread")]
async fn without_an_environment_there_are_none() {
    let model = ModelFixture::fixture("olmoe-basic");
    let collector = Collector::start(CollectorBehaviour::Takes).await;
    for variables in [
        vec![("OTEL_SERVICE_NAME", "x".to_owned())],
        [collector.environment(), vec![("OTEL_SDK_DISABLED", "true".to_owned())]].concat(),
    ] {
        let mut up = up(&model, &["--remote-ratio", "0.5"], &variables).await;
        let request = post(&model.name, 2, false, &format!("00-{}-{PARENT}-01", trace(1)));
        assert_eq!(raw::ask(up.ready.http(), request).await.head.status, 200);
        // The gateway's page has that of the main function as well.
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

/// An unsupported protocol is refused by name, before anything starts.
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
