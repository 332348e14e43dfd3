//! Tests of models, health, metrics, version, tokenization, and unknown routes.

use super::{BOS, ByteTokenizer, Engine, TestServer, body_with, chat_body_with, failure, text_events};
use crate::engine::RequestLimits;
use crate::engine::request::FinishReason;
use axum::body::Body;
use axum::http::{Method, Request};
use serde_json::json;
use std::sync::Arc;

#[tokio::test]
async fn model_is_listed() {
    let server = TestServer::new();
    let list = server.get("/v1/models").await.ok();
    assert_eq!(list["object"], "list");
    let model = &list["data"][0];
    assert_eq!(model["id"], "org/tiny");
    assert_eq!(model["object"], "model");
    assert_eq!(model["max_model_len"], 100);
    assert!(model["created"].is_u64());
    assert!(model["owned_by"].is_string());
    for path in ["/v1/models/org/tiny", "/v1/models/org%2Ftiny"] {
        assert_eq!(server.get(path).await.ok(), *model);
    }
    for path in ["/v1/models/tiny", "/v1/models/org/tiny2"] {
        let error = server.get(path).await.error(404);
        assert_eq!(error["code"], "model_not_found");
        assert_eq!(error["param"], "model");
    }
}

#[tokio::test]
async fn other_models_are_not_found() {
    let server = TestServer::new();
    for (path, body) in [
        ("/v1/completions", body_with(json!({"model": "gpt-5"}))),
        ("/v1/chat/completions", super::chat_body_with(json!({"model": ""}))),
        ("/tokenize", body_with(json!({"model": "gpt-5"}))),
    ] {
        let error = server.post(path, body).await.error(404);
        assert_eq!(error["code"], "model_not_found");
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(error["param"], "model");
    }
    let (reply, _) = server.complete(json!({"prompt": "hi"})).await;
    assert_eq!(reply.ok()["model"], "org/tiny", "no model named is the one there is");
}

#[tokio::test]
async fn requests_are_refused_while_loading_or_draining() {
    let server = TestServer::new();
    assert_eq!(server.get("/health").await.status, 200);
    server.ready.send_replace(false);
    let reply = server.get("/health").await;
    assert_eq!(reply.error(503)["code"], "service_unavailable");
    assert_eq!(reply.header("retry-after"), "1");
    for path in ["/v1/completions", "/v1/chat/completions"] {
        server.post(path, body_with(json!({}))).await.error(503);
    }
    server.get("/v1/models").await.ok();
    server.get("/version").await.ok();
    server.ready.send_replace(true);
    assert_eq!(server.get("/health").await.status, 200);
    server.complete(body_with(json!({}))).await.0.ok();
}

#[tokio::test]
async fn version_is_returned() {
    assert_eq!(TestServer::new().get("/version").await.ok(), json!({"version": env!("CARGO_PKG_VERSION")}));
}

#[tokio::test]
async fn texts_and_chats_are_tokenized() {
    let server = TestServer::new();
    let tokenized = server.post("/tokenize", json!({"prompt": "ab"})).await.ok();
    assert_eq!(tokenized, json!({"tokens": [BOS, 97, 98], "count": 3, "max_model_len": 100}));
    let tokenized = server.post("/tokenize", json!({"prompt": "ab", "add_special_tokens": false})).await.ok();
    assert_eq!(tokenized["tokens"], json!([97, 98]));
    let messages = json!([{"role": "user", "content": "x"}]);
    let tokenized = server.post("/tokenize", json!({ "messages": messages })).await.ok();
    assert_eq!(tokenized["count"], "[user]x[assistant]".len());
    let open = json!({"messages": messages, "add_generation_prompt": false, "add_special_tokens": true});
    assert_eq!(server.post("/tokenize", open).await.ok()["count"], "[user]x".len() + 1);
    // Same tokens as a chat with these tools.
    let limits = RequestLimits { context_length: 4000, cache_pages: 400, ..Engine::limits() };
    let server = TestServer::build(Some(Arc::new(ByteTokenizer)), limits, |_| ());
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let tools = json!({"messages": messages, "tools": [tool]});
    let requests = server.chat(chat_body_with(tools.clone())).await.1.remove(0);
    assert_eq!(server.post("/tokenize", tools).await.ok()["tokens"], json!(requests.prompt));
    assert!(requests.prompt.len() > "[user]x[assistant]".len());
    server.post("/tokenize", json!({"messages": messages, "tools": [1]})).await.refuses("tools[0].type");
    for body in [json!({}), json!({"prompt": "a", "messages": messages}), json!({"prompt": [1]})] {
        server.post("/tokenize", body).await.refuses("prompt");
    }
    server.post("/tokenize", json!({"messages": []})).await.refuses("messages");
    let without = TestServer::build(None, Engine::limits(), |_| ());
    without.post("/tokenize", json!({"prompt": "a"})).await.refuses("prompt");
    without.post("/tokenize", json!({ "messages": messages })).await.refuses("messages");
}

#[tokio::test]
async fn tokens_are_detokenized() {
    let server = TestServer::new();
    let ids = server.post("/tokenize", json!({"prompt": "aé"})).await.ok()["tokens"].clone();
    let text = server.post("/detokenize", json!({ "tokens": ids })).await.ok();
    assert_eq!(text, json!({"prompt": "<s>aé"}));
    assert_eq!(server.post("/detokenize", json!({"tokens": []})).await.ok(), json!({"prompt": ""}));
    for (body, param) in [
        (json!({}), "tokens"),
        (json!({"tokens": "a"}), "tokens"),
        (json!({"tokens": [-1]}), "tokens[0]"),
        (json!({"tokens": [[1]]}), "tokens[0]"),
    ] {
        server.post("/detokenize", body).await.refuses(param);
    }
    let without = TestServer::build(None, Engine::limits(), |_| ());
    without.post("/detokenize", json!({"tokens": [1]})).await.refuses("tokens");
}

#[tokio::test]
async fn other_routes_and_methods_have_the_same_error_format() {
    let server = TestServer::new();
    for path in ["/", "/v1", "/v1/images/generations", "/v1/models/", "/v1/completions/", "/metrics/x"] {
        let error = server.get(path).await.error(404);
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(error["code"], "unknown_url", "{path}");
    }
    for (method, path, allowed) in [
        (Method::GET, "/v1/chat/completions", "POST"),
        (Method::PUT, "/v1/completions", "POST"),
        (Method::POST, "/v1/models", "GET,HEAD"),
        (Method::DELETE, "/v1/models/org/tiny", "GET,HEAD"),
        (Method::POST, "/health", "GET,HEAD"),
        (Method::OPTIONS, "/tokenize", "POST"),
    ] {
        let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
        let reply = server.send(request).await;
        assert_eq!(reply.error(405)["code"], "method_not_supported");
        assert_eq!(reply.header("allow"), allowed, "{path}");
    }
}

/// Returns the value of a sample in `/metrics`.
async fn sample(server: &TestServer, name: &str) -> f64 {
    let reply = server.get("/metrics").await;
    assert!(reply.header("content-type").starts_with("text/plain; version=0.0.4"));
    let line = reply.text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or("0").parse().unwrap()
}

#[tokio::test]
async fn metrics_count_requests_and_tokens() {
    let server = TestServer::new();
    server.complete(body_with(json!({"n": 1}))).await.0.ok();
    let (_, _) = server
        .post_with_script("/v1/completions", body_with(json!({"stream": true, "prompt": ["a", "b"]})), |_| {
            text_events(0, "abc", FinishReason::Length)
        })
        .await;
    server.post_with_script("/v1/completions", body_with(json!({})), |_| vec![failure()]).await.0.error(503);
    server.post("/v1/completions", body_with(json!({"n": 0}))).await.error(400);
    server.get("/nowhere/1").await.error(404);
    server.get("/nowhere/2").await.error(404);
    server.get("/v1/models/x").await.error(404);
    for (name, expected) in [
        (r#"remoe_http_requests_total{route="/v1/completions",status="200"}"#, 2.0),
        (r#"remoe_http_requests_total{route="/v1/completions",status="400"}"#, 1.0),
        (r#"remoe_http_requests_total{route="/v1/completions",status="503"}"#, 1.0),
        (r#"remoe_http_requests_total{route="other",status="404"}"#, 2.0),
        (r#"remoe_http_requests_total{route="/v1/models/{id}",status="404"}"#, 1.0),
        (r#"remoe_choices_finished_total{finished_reason="stop"}"#, 1.0),
        (r#"remoe_choices_finished_total{finished_reason="length"}"#, 2.0),
        ("remoe_prompt_tokens_total", 3.0 + 2.0 + 2.0),
        ("remoe_generation_tokens_total", 6.0),
        ("remoe_time_to_first_token_seconds_count", 3.0),
        ("remoe_time_to_first_token_seconds_sum", 1.5),
        ("remoe_inter_token_latency_seconds_count", 1.0 + 2.0 + 2.0),
        ("remoe_e2e_request_latency_seconds_count", 2.0),
        ("remoe_requests_in_flight", 0.0),
    ] {
        assert_eq!(sample(&server, name).await, expected, "{name}");
    }
}

#[tokio::test]
async fn generations_are_counted_until_their_end() {
    let server = TestServer::new();
    let body = body_with(json!({"stream": true})).to_string();
    let request = Request::post("/v1/completions").header("host", "x").body(Body::from(body)).unwrap();
    let mut router = server.router.clone();
    let call = tower_service::Service::call(&mut router, request);
    let (response, requests) = tokio::join!(call, server.engine.next());
    assert_eq!(sample(&server, "remoe_requests_in_flight").await, 1.0);
    drop(response);
    let closed = tokio::time::timeout(std::time::Duration::from_secs(10), requests.events.closed());
    closed.await.expect("the events are dropped");
    assert_eq!(sample(&server, "remoe_requests_in_flight").await, 0.0);
}
