//! Tests of invalid bodies: each gets a 4xx answer in the error format.

use super::{ByteTokenizer, TestServer, TextOverride, body_with};
use crate::http::TextFrontend;
use axum::body::Body;
use axum::http::Request;
use remoe_proto::ServiceError;
use serde_json::json;
use std::sync::Arc;

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn only_json_objects_are_accepted() {
    let server = TestServer::new();
    let bodies: [&[u8]; 16] = [
        b"{prompt: \"hi\"}",
        b"{1: \"hi\"}",
        b"",
        b" ",
        b"null",
        b"[]",
        b"[\"org/tiny\", \"hi\"]",
        b"\"hi\"",
        b"{",
        b"{\"prompt\": \"hi\"} x",
        b"{\"prompt\": \"hi\"}{}",
        b"{\"prompt\": \"hi\",}",
        b"{\"prompt\": 'hi'}",
        b"{\"prompt\": \"\xff\"}",
        b"{\"unknown\": \"\xff\", \"prompt\": \"hi\"}",
        b"{\"prompt\": \"\\ud800\"}",
    ];
    for path in [PATH, "/v1/chat/completions", "/tokenize"] {
        for body in bodies {
            let error = server.post_raw(path, body.to_vec()).await.error(400);
            assert_eq!(error["type"], "invalid_request_error");
            assert!(error["param"].as_str().is_none_or(|param| !param.contains('?')), "{error}");
        }
    }
    server.post_raw(PATH, r#"{"prompt": "a", "prompt": "b"}"#).await.refuses("prompt");
    let twice = r#"{"messages": [{"role": "user", "content": "a", "content": "b"}]}"#;
    server.post_raw("/v1/chat/completions", twice).await.refuses("messages[0].content");
}

#[tokio::test]
async fn deeply_nested_bodies_are_refused() {
    let server = TestServer::new();
    for depth in [65, 200, 500_000] {
        let (open, close) = ("[".repeat(depth), "]".repeat(depth));
        for body in [
            format!("{open}{close}"),
            open.clone(),
            "{\"a\":".repeat(depth),
            format!(r#"{{"prompt": {open}{close}}}"#),
            format!(r#"{{"prompt": "hi", "unknown": {open}{close}}}"#),
            format!(r#"{{"prompt": "hi", "tools": {open}{close}}}"#),
            format!(r#"{{"messages": [{{"role": "user", "content": {open}{close}}}]}}"#),
        ] {
            server.post_raw(PATH, body).await.error(400);
        }
    }
    // Brackets in strings do not nest.
    let (reply, _) = server.complete(body_with(json!({"user": "[{\\\"".repeat(500)}))).await;
    reply.ok();
}

#[tokio::test]
async fn bodies_have_a_maximum_size() {
    let server = TestServer::with(|options| options.body_limit = 1000);
    let body = |length: usize| {
        let mut body = body_with(json!({"user": ""})).to_string();
        let padding = "x".repeat(length - body.len());
        body.insert_str(body.find(r#"user":""#).unwrap() + 7, &padding);
        body
    };
    let fits = body(1000);
    assert_eq!(fits.len(), 1000);
    let (reply, _) = server.complete(serde_json::from_str(&fits).unwrap()).await;
    reply.ok();
    let error = server.post_raw(PATH, body(1001)).await.error(413);
    assert_eq!(error["code"], "request_too_large");
    // The limit also applies without a content length.
    let chunks = body(5000)
        .into_bytes()
        .chunks(100)
        .map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec()))
        .collect::<Vec<_>>();
    server.post_raw(PATH, Body::from_stream(futures_util::stream::iter(chunks))).await.error(413);
    let endless = futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>(vec![b'x'; 1 << 20]));
    server.post_raw(PATH, Body::from_stream(endless)).await.error(413);
    assert_eq!(super::super::HttpOptions::new("m").body_limit, 4 * 1024 * 1024);
}

#[tokio::test]
async fn bodies_have_a_deadline() {
    let server = TestServer::with(|options| options.body_timeout = std::time::Duration::from_millis(50));
    let stuck = futures_util::stream::pending::<Result<Vec<u8>, std::io::Error>>();
    let error = server.post_raw(PATH, Body::from_stream(stuck)).await.error(408);
    assert_eq!(error["code"], "request_timeout");
}

#[tokio::test]
async fn incomplete_bodies_are_refused() {
    let server = TestServer::new();
    let broken =
        futures_util::stream::iter([Ok(b"{\"prompt\"".to_vec()), Err(std::io::Error::other("gone"))]);
    server.post_raw(PATH, Body::from_stream(broken)).await.error(400);
}

#[tokio::test]
async fn json_content_types_are_accepted() {
    let server = TestServer::new();
    let send = async |content_type: Option<&[u8]>| {
        let mut request = Request::post("/tokenize");
        if let Some(value) = content_type {
            request = request.header("content-type", value);
        }
        server.send(request.body(Body::from(r#"{"prompt": "a"}"#)).unwrap()).await
    };
    let good: [Option<&[u8]>; 5] = [
        None,
        Some(b"application/json"),
        Some(b"Application/JSON; charset=utf-8"),
        Some(b"application/vnd.api+json"),
        Some(b" application/json ;x"),
    ];
    for value in good {
        assert_eq!(send(value).await.status, 200, "{value:?}");
    }
    let bad: [&[u8]; 5] =
        [b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data", b"", b"\xff"];
    for value in bad {
        send(Some(value)).await.error(415);
    }
}

/// Elements that are short as text but not in memory.
#[tokio::test]
async fn long_lists_of_empty_elements_are_refused_by_name() {
    let server = TestServer::new();
    let many = |element: &str| vec![element; 1_000_000].join(",");
    let chat = "/v1/chat/completions";
    let one = |field: &str, element: &str| {
        format!(r#"{{"messages": [{{"role": "assistant", "{field}": [{}]}}]}}"#, many(element))
    };
    for (path, body, param) in [
        (chat, format!(r#"{{"messages": [{}]}}"#, many("{}")), "messages"),
        ("/tokenize", format!(r#"{{"messages": [{}]}}"#, many("{}")), "messages"),
        (chat, one("tool_calls", "{}"), "messages[0].tool_calls"),
        (chat, one("content", "{}"), "messages[0].content[0].text"),
        (PATH, format!(r#"{{"prompt": [{}]}}"#, many("[]")), "prompt"),
        (PATH, format!(r#"{{"prompt": [{}]}}"#, many("\"\"")), "prompt"),
    ] {
        server.post_raw(path, body).await.refuses(param);
    }
}

#[tokio::test]
async fn errors_quote_short_excerpts() {
    let server = TestServer::new();
    let long = "long é".repeat(10_000);
    let message = |role: &str, kind: &str| json!([{"role": role, "content": [{"type": kind}]}]);
    for body in [
        json!({"prompt": "a", "model": long}),
        json!({"prompt": "a", "max_tokens": long}),
        json!({"prompt": "a", "logit_bias": {long.as_str(): 1}}),
        json!({"messages": message(&long, "text")}),
        json!({"messages": message("user", &long)}),
    ] {
        let path = if body.get("prompt").is_some() { PATH } else { "/v1/chat/completions" };
        let answer = server.post_raw(path, body.to_string()).await;
        assert!(answer.text.len() < 1600, "{} bytes", answer.text.len());
        assert!(answer.status.is_client_error());
    }
}

/// Byte tokenizer that blocks on characters other than lowercase letters until the test opens the gate.
struct Slow {
    gate: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
    bound: Option<usize>,
}

impl TextOverride for Slow {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, ServiceError> {
        if text.starts_with('X') {
            // The gate opens for all when its sender is dropped.
            let _open = self.gate.lock().unwrap().recv();
        }
        ByteTokenizer.encode(text, special)
    }

    fn bytes_per_token(&self) -> Option<usize> {
        self.bound
    }
}

fn slow(bound: Option<usize>) -> (TestServer, std::sync::mpsc::Sender<()>) {
    let (open, gate) = std::sync::mpsc::channel();
    let text = Arc::new(Slow { gate: std::sync::Mutex::new(gate), bound });
    (TestServer::build(Some(text), super::Engine::limits(), |_| ()), open)
}

#[tokio::test(flavor = "multi_thread")]
async fn large_bodies_delay_small_ones_only_while_running() {
    let (server, open) = slow(None);
    let server = Arc::new(server);
    let large = json!({"prompt": "X".repeat(1 << 20)});
    let waiting: Vec<_> = (0..12)
        .map(|_| {
            let (server, large) = (server.clone(), large.clone());
            tokio::spawn(async move { server.post("/tokenize", large).await })
        })
        .collect();
    // All large ones wait before the small one is sent.
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    let small = server.post("/tokenize", json!({"prompt": "ab"})).await.ok();
    assert_eq!(small["count"], 3);
    assert!(waiting.iter().all(|task| !task.is_finished()));
    drop(open);
    for task in waiting {
        assert_eq!(task.await.unwrap().ok()["count"], (1 << 20) + 1);
    }
}

#[tokio::test]
async fn too_long_texts_are_refused_before_tokenization() {
    // The gate stays closed, so tokenizing an X would not end.
    let (server, _shut) = slow(Some(4));
    let long = "X".repeat(401);
    let message = json!([{"role": "user", "content": long}]);
    for (path, body, param) in [
        ("/tokenize", json!({ "prompt": long }), "prompt"),
        ("/tokenize", json!({ "messages": message }), "messages"),
        (PATH, body_with(json!({ "prompt": long })), "prompt"),
        (PATH, body_with(json!({ "prompt": ["a", long] })), "prompt[1]"),
        ("/v1/chat/completions", json!({ "messages": message }), "messages"),
    ] {
        let error = server.post(path, body).await.error(400);
        assert_eq!(error["code"], "context_length_exceeded", "{path}: {error}");
        assert_eq!(error["param"], param, "{path}");
    }
    // Only as many bytes as could fit are examined.
    let counted = server.post("/tokenize", json!({"prompt": "a".repeat(400)})).await.ok();
    assert_eq!(counted["count"], 401);
    let error = server.post(PATH, body_with(json!({"prompt": "a".repeat(400)}))).await.error(400);
    assert_eq!(error["code"], "context_length_exceeded");
}
