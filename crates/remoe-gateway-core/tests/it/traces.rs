//! Spans of requests, and the trace context that functions get.

use crate::stage;

use http_body_util::BodyExt;
use remoe_gateway_core::{AccessLog, GatewayOptions};
use remoe_otel::Traces;
use remoe_test_support::collector::{Collector, CollectorBehaviour, ExportedSpan};
use serde_json::json;
use stage::Stage;
use std::sync::atomic::Ordering;
use std::time::Duration;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// Starts a test bed whose gateway exports to `collector`.
async fn traced(collector: &Collector, idle: Option<Duration>) -> Stage {
    let options = GatewayOptions { traces: exporting(collector), ..GatewayOptions::default() };
    Stage::new(options, |_| {}, 8, idle).await
}

fn exporting(collector: &Collector) -> Traces {
    let environment = collector.environment();
    let variable =
        |name: &str| environment.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
    Traces::from_variables("gateway", variable).unwrap()
}

/// Waits for the gateway's server span, and returns the spans of `trace`.
async fn spans(collector: &Collector, trace: &str) -> Vec<ExportedSpan> {
    collector.trace(trace, "a server span", |spans| spans.iter().any(|span| span.kind == 2)).await
}

/// Returns the trace context that functions got.
fn forwarded_context(stage: &Stage) -> [Vec<String>; 2] {
    let headers = stage.functions.headers.lock().unwrap();
    ["traceparent", "tracestate"].map(|name| {
        headers
            .get_all(name)
            .iter()
            .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
            .collect()
    })
}

const HOSTILE: [&str; 7] = [
    "",
    "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
    "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
    "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
    "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "<script>alert(1)</script>",
];

#[tokio::test(flavor = "multi_thread")]
async fn no_trace_is_invented_and_hostile_ones_are_dropped() {
    let stage = Stage::new(GatewayOptions::default(), |_| {}, 8, None).await;
    stage.ask(&json!({"x": 1}), &[("tracestate", "a=1")]).await;
    assert_eq!(forwarded_context(&stage), [vec![], Vec::<String>::new()]);
    let valid = format!("00-{TRACE}-{PARENT}-01");
    stage.ask(&json!({"x": 1}), &[("traceparent", &valid), ("tracestate", "a=1")]).await;
    assert_eq!(
        forwarded_context(&stage),
        [vec![valid.clone()], vec!["a=1".to_owned()]],
        "the client's context is forwarded"
    );
    for hostile in HOSTILE {
        stage.ask(&json!({"x": 1}), &[("traceparent", hostile), ("tracestate", "a=1")]).await;
        assert_eq!(forwarded_context(&stage), [vec![], Vec::<String>::new()], "{hostile:?}");
    }
    stage.ask(&json!({"x": 1}), &[("traceparent", &valid), ("traceparent", &valid)]).await;
    assert_eq!(forwarded_context(&stage), [vec![], Vec::<String>::new()], "two parents");
}

#[tokio::test(flavor = "multi_thread")]
async fn request_is_part_of_its_callers_trace() {
    let collector = Collector::start(CollectorBehaviour::Takes).await;
    let stage = traced(&collector, None).await;
    let valid = format!("00-{TRACE}-{PARENT}-01");
    stage.ask(&json!({"model": "m", "x": 1}), &[("traceparent", &valid), ("tracestate", "a=1")]).await;
    let spans = spans(&collector, TRACE).await;
    let [server, client] = [2, 3].map(|kind| spans.iter().find(|span| span.kind == kind).unwrap());
    assert_eq!((server.parent.as_str(), server.name.as_str()), (PARENT, "POST /v1/completions"));
    assert_eq!((&client.parent, client.name.as_str()), (&server.id, "text_completion m"));
    assert_eq!(
        forwarded_context(&stage),
        [vec![format!("00-{TRACE}-{}-01", client.id)], vec!["a=1".to_owned()]]
    );
    assert_eq!(server.attributes["http.response.status_code"], 200);
    assert_eq!(server.attributes["gen_ai.usage.input_tokens"], 3);
    assert_eq!(server.attributes["gen_ai.usage.output_tokens"], 4);
    assert!(spans.iter().all(|span| !span.failed), "{spans:?}");

    // An invalid context is replaced by a new trace.
    for hostile in HOSTILE {
        stage.ask(&json!({"x": 1}), &[("traceparent", hostile), ("tracestate", "a=1")]).await;
        let [parent, state] = forwarded_context(&stage);
        assert!(parent.len() == 1 && state.is_empty(), "{hostile:?}: {parent:?} {state:?}");
        let trace = parent[0].split('-').nth(1).unwrap().to_owned();
        assert!(trace != TRACE && parent[0].len() == 55 && parent[0] != hostile, "{parent:?}");
        let spans = self::spans(&collector, &trace).await;
        assert!(spans.iter().any(|span| span.parent.is_empty()), "{spans:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unsampled_trace_is_not_recorded() {
    let collector = Collector::start(CollectorBehaviour::Takes).await;
    let stage = traced(&collector, None).await;
    let unsampled = format!("00-{TRACE}-{PARENT}-00");
    stage.ask(&json!({"x": 1}), &[("traceparent", &unsampled)]).await;
    let [parent, _] = forwarded_context(&stage);
    assert!(parent[0].starts_with(&format!("00-{TRACE}-")) && parent[0].ends_with("-00"), "{parent:?}");
    assert_ne!(parent[0], unsampled, "the parent of the function's span is the gateway's");
    stage.ask(&json!({"x": 1}), &[]).await;
    let other = forwarded_context(&stage)[0][0].split('-').nth(1).unwrap().to_owned();
    spans(&collector, &other).await;
    assert!(collector.spans().iter().all(|span| span.trace == other));
}

#[tokio::test(flavor = "multi_thread")]
async fn cold_start_parts_and_attempts_have_spans() {
    let collector = Collector::start(CollectorBehaviour::Takes).await;
    let stage = traced(&collector, Some(Duration::from_millis(20))).await;
    stage.wait_for_sleep().await;
    *stage.functions.start.lock().unwrap() = Duration::from_millis(30);
    stage.functions.breaks.store(1, Ordering::SeqCst);
    let (head, _) = stage.ask(&json!({"x": 1}), &[]).await;
    assert_eq!(head.status(), 200);
    let trace = forwarded_context(&stage)[0][0].split('-').nth(1).unwrap().to_owned();
    let spans = spans(&collector, &trace).await;
    let server = spans.iter().find(|span| span.kind == 2).unwrap();
    let of_server = |name: &str| {
        let mut found: Vec<_> =
            spans.iter().filter(|span| span.parent == server.id && span.name == name).collect();
        found.sort_by_key(|span| span.start);
        found
    };
    let (waits, sent) = (of_server("wait"), of_server("text_completion m"));
    assert_eq!((waits.len(), sent.len()), (2, 2), "{spans:?}");
    assert_eq!(waits[0].attributes["remoe.cold_start"], true);
    assert_eq!(waits[1].attributes["remoe.cold_start"], false);
    let parts: Vec<_> = spans.iter().filter(|span| span.parent == waits[0].id).collect();
    let start = parts.iter().find(|span| span.name == "start").expect("the functions started");
    assert!(start.end - start.start >= 30_000_000, "{start:?}");
    for part in &parts {
        assert!(["decide", "schedule", "start", "load", "ready"].contains(&part.name.as_str()), "{part:?}");
        assert!(waits[0].start <= part.start && part.end <= waits[0].end, "{part:?} of {:?}", waits[0]);
    }
    assert!(sent[0].failed && sent[0].attributes["error.type"] == "broken_off", "{:?}", sent[0]);
    assert!(!sent[1].failed && sent[1].attributes["http.request.resend_count"] == 1, "{:?}", sent[1]);
    assert!(sent[0].end <= waits[1].start && waits[1].end <= sent[1].start);
    assert!(!server.failed);
}

#[tokio::test(flavor = "multi_thread")]
async fn span_of_an_early_end_states_the_reason() {
    let collector = Collector::start(CollectorBehaviour::Takes).await;
    let stage = traced(&collector, None).await;
    // A client that disconnects in the middle of its answer.
    let answer = stage.send(&json!({"x": 1, "stream": true, "forever": true}), &[]).await;
    let trace = forwarded_context(&stage)[0][0].split('-').nth(1).unwrap().to_owned();
    let mut body = answer.into_body();
    body.frame().await.unwrap().unwrap();
    drop(body);
    drop(stage.client.clone());
    let remaining = spans(&collector, &trace).await;
    let [server, client] = [2, 3].map(|kind| remaining.iter().find(|span| span.kind == kind).unwrap());
    assert!(server.failed && server.attributes["error.type"] == "client_disconnected", "{server:?}");
    assert!(client.failed && client.attributes["error.type"] == "cancelled", "{client:?}");
    // A function that breaks off in the middle of its answer.
    let (_, text) = stage.ask(&json!({"x": 1, "stream": true, "breaks": true}), &[]).await;
    assert!(text.contains("service_unavailable"), "{text}");
    let trace = forwarded_context(&stage)[0][0].split('-').nth(1).unwrap().to_owned();
    for span in spans(&collector, &trace).await.iter().filter(|span| span.kind != 1) {
        assert!(span.failed && span.attributes["error.type"] == "broken_off", "{span:?}");
    }
    // A function that refuses the request: neither the gateway nor the function failed.
    let (head, _) = stage.ask(&json!({"x": 1, "refuse": true}), &[]).await;
    assert_eq!(head.status(), 400);
    let trace = forwarded_context(&stage)[0][0].split('-').nth(1).unwrap().to_owned();
    let refused = spans(&collector, &trace).await;
    let [server, client] = [2, 3].map(|kind| refused.iter().find(|span| span.kind == kind).unwrap());
    assert!(!server.failed && server.attributes["http.response.status_code"] == 400, "{server:?}");
    assert!(client.failed && client.attributes["error.type"] == "400", "{client:?}");
}

/// The answer is larger than answers that the gateway holds completely.
#[tokio::test(flavor = "multi_thread")]
async fn long_answer_is_complete_with_its_last_byte() {
    const BYTES: usize = 2 << 20;
    let collector = Collector::start(CollectorBehaviour::Takes).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let options = GatewayOptions {
        traces: exporting(&collector),
        access_log: Some(AccessLog::open(&path).unwrap()),
        ..GatewayOptions::default()
    };
    let stage = Stage::new(options, |_| {}, 8, None).await;
    let (head, text) = stage.ask(&json!({"x": 1, "bytes": BYTES}), &[]).await;
    assert_eq!((head.status().as_u16(), text.len()), (200, BYTES));
    assert_eq!(head.headers()["content-length"], BYTES.to_string(), "the length is forwarded");
    let trace = forwarded_context(&stage)[0][0].split('-').nth(1).unwrap().to_owned();
    let spans = spans(&collector, &trace).await;
    let [server, client] = [2, 3].map(|kind| spans.iter().find(|span| span.kind == kind).unwrap());
    assert!(!server.failed && !client.failed, "{server:?} {client:?}");
    stage.until(|_| std::fs::read_to_string(&path).unwrap().ends_with('\n')).await;
    let line: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!((&line["complete"], &line["bytes"]), (&json!(true), &json!(BYTES)), "{line}");
}
