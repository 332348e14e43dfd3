//! Tests of server-sent events.

use super::{TestServer, body_with, chat_body_with, failure, text_events};
use crate::engine::request::{Delta, Event, FinishReason, Request};
use axum::body::Body;
use serde_json::{Value, json};
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn chat_stream_has_openais_format() {
    let server = TestServer::new();
    let (reply, _) = server.chat(chat_body_with(json!({"stream": true}))).await;
    assert_eq!(reply.header("cache-control"), "no-cache");
    let chunks = reply.chunks();
    let common = |choice: Value| {
        json!({
            "id": chunks[0]["id"], "object": "chat.completion.chunk", "created": chunks[0]["created"],
            "model": "org/tiny", "choices": [choice],
        })
    };
    let choice = |delta: Value, finish: Value| {
        common(json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}))
    };
    assert_eq!(
        chunks,
        [
            choice(json!({"role": "assistant", "content": ""}), Value::Null),
            choice(json!({"content": "o"}), Value::Null),
            choice(json!({"content": "k"}), Value::Null),
            choice(json!({}), json!("stop")),
        ]
    );
}

#[tokio::test]
async fn completion_stream_has_openais_format() {
    let server = TestServer::new();
    let (reply, _) = server.complete(body_with(json!({"stream": true, "echo": true}))).await;
    let chunks = reply.chunks();
    let choices: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]).collect();
    let choice = |text: &str, finish: Value| json!({"index": 0, "text": text, "logprobs": null, "finish_reason": finish});
    assert_eq!(choices[0], &choice("hi", Value::Null));
    assert_eq!(choices[1], &choice("o", Value::Null));
    assert_eq!(choices[2], &choice("k", Value::Null));
    assert_eq!(choices[3], &choice("", json!("stop")));
    assert_eq!(chunks.len(), 4);
    for chunk in &chunks {
        assert_eq!(chunk["object"], "text_completion");
        assert_eq!(chunk["id"], chunks[0]["id"]);
        assert_eq!(chunk.get("usage"), None);
    }
}

#[tokio::test]
async fn every_choice_has_one_role_and_one_end() {
    let server = TestServer::new();
    let (reply, _) = server
        .post_with_script(CHAT, chat_body_with(json!({"stream": true, "n": 2})), |_| {
            let mut events = text_events(1, "b", FinishReason::Length);
            events.extend(text_events(0, "a", FinishReason::Stop));
            events
        })
        .await;
    let chunks = reply.chunks();
    let of = |index: u64| -> Vec<&Value> {
        chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index).collect()
    };
    for (index, reason) in [(0, "stop"), (1, "length")] {
        let choices = of(index);
        assert_eq!(choices[0]["delta"]["role"], "assistant");
        assert_eq!(choices.iter().filter(|choice| choice["delta"].get("role").is_some()).count(), 1);
        assert_eq!(choices.iter().filter(|choice| !choice["finish_reason"].is_null()).count(), 1);
        assert_eq!(choices.last().unwrap()["finish_reason"], reason);
    }
}

#[tokio::test]
async fn usage_is_last_and_only_on_request() {
    let server = TestServer::new();
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}});
    let asking = json!({"stream": true, "stream_options": {"include_usage": true}});
    let (reply, _) = server.complete(body_with(asking)).await;
    let mut chunks = reply.chunks();
    let last = chunks.pop().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"], usage);
    assert!(chunks.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)));
    for options in [json!({}), json!({"include_usage": false}), json!(null)] {
        let (reply, _) = server.complete(body_with(json!({"stream": true, "stream_options": options}))).await;
        assert!(reply.chunks().iter().all(|chunk| chunk.get("usage").is_none()));
    }
    // Figures are part of the usage chunk, so a request for them includes it.
    let (reply, _) = server.complete(body_with(json!({"stream": true, "include_figures": true}))).await;
    let last = reply.chunks().pop().unwrap();
    assert_eq!(last["usage"]["total_tokens"], 5);
    assert_eq!(last["usage"]["remoe"]["experts"]["local"], 40);
}

#[tokio::test]
async fn steps_without_text_send_nothing() {
    let server = TestServer::new();
    let quiet = |_: &Request| {
        let mut events = vec![Event::Delta(Delta { choice: 0, token: Some(1), ..Delta::default() })];
        events.extend(text_events(0, "x", FinishReason::Stop));
        events
    };
    let (reply, _) = server.post_with_script(COMPLETIONS, body_with(json!({"stream": true})), quiet).await;
    assert_eq!(reply.chunks().len(), 2);
    let ids = body_with(json!({"stream": true, "return_token_ids": true}));
    let (reply, _) = server.post_with_script(COMPLETIONS, ids, quiet).await;
    let chunks = reply.chunks();
    assert_eq!(chunks[0]["choices"][0]["token_ids"], json!([1]));
    assert_eq!(chunks[1]["choices"][0]["token_ids"], json!([120]));
}

#[tokio::test]
async fn several_prompts_are_streamed_concurrently() {
    let server = TestServer::new();
    let body =
        body_with(json!({"prompt": [[1], [2]], "stream": true, "stream_options": {"include_usage": true}}));
    let (reply, _) = server.complete(body).await;
    let chunks = reply.chunks();
    for index in 0..2 {
        let text: String = chunks
            .iter()
            .filter(|chunk| chunk["choices"][0]["index"] == index)
            .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap())
            .collect();
        assert_eq!(text, "ok");
    }
    assert_eq!(chunks.last().unwrap()["usage"]["total_tokens"], 6);
}

#[tokio::test]
async fn failure_ends_the_stream_with_an_error_event() {
    let server = TestServer::new();
    for last in [Some(failure()), None] {
        let reply = tokio::select! {
            reply = server.post(CHAT, chat_body_with(json!({"stream": true}))) => reply,
            () = async {
                let requests = server.engine.next().await;
                for event in text_events(0, "x", FinishReason::Stop).into_iter().take(1).chain(last) {
                    requests.events.try_send(event).unwrap();
                }
                drop(requests);
                std::future::pending().await
            } => unreachable!("pends"),
        };
        assert_eq!(reply.status, 200);
        assert!(!reply.text.contains("[DONE]"), "{}", reply.text);
        let event = reply.text.trim_end().rsplit("\n\n").next().unwrap();
        let error: Value = serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(error["error"]["code"], "service_unavailable");
        assert_eq!(error["error"].as_object().unwrap().len(), 4);
        assert!(reply.text.contains(r#""content":"x""#), "what came before stays");
    }
}

#[tokio::test]
async fn refusals_are_no_streams() {
    let server = TestServer::new();
    server
        .post(CHAT, chat_body_with(json!({"stream": true, "temperature": -1})))
        .await
        .refuses("temperature");
    let error =
        server.post(CHAT, chat_body_with(json!({"stream": true, "max_tokens": 1000}))).await.error(400);
    assert_eq!(error["code"], "context_length_exceeded");
}

#[tokio::test]
async fn disconnect_ends_the_request() {
    let server = TestServer::new();
    for stream in [true, false] {
        let body = body_with(json!({ "stream": stream })).to_string();
        let request = axum::http::Request::post(COMPLETIONS);
        let request = request.header("host", "x").body(Body::from(body)).unwrap();
        let mut router = server.router.clone();
        let mut call = Box::pin(tower_service::Service::call(&mut router, request));
        let mut response = None;
        let requests = loop {
            tokio::select! {
                answer = &mut call, if response.is_none() => response = Some(answer),
                requests = server.engine.next() => break requests,
            }
        };
        assert!(!requests.events.is_closed());
        drop(response);
        drop(call);
        tokio::time::timeout(Duration::from_secs(10), requests.events.closed())
            .await
            .expect("the events are dropped");
    }
}
