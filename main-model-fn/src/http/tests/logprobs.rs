//! Tests of log-probabilities in both formats.

use super::{BOS, Engine, TestServer, body_with, chat_body_with};
use crate::engine::request::{Delta, Event, FinishReason, Request, TokenLogprobs};
use serde_json::{Value, json};

fn scored(token: u32, top: usize) -> TokenLogprobs {
    let rivals = [(u32::from(b'a'), -0.5), (0xe2, -1.5), (u32::from(b'c'), f32::NEG_INFINITY)];
    TokenLogprobs { token, logprob: -0.25, top: rivals.into_iter().take(top).collect() }
}

/// Returns the events of "a€" and its end, with as many alternatives as requested.
fn script(request: &Request) -> Vec<Event> {
    let mut events = Vec::new();
    if let Some(top) = request.prompt_logprobs {
        let rest = request.prompt.iter().skip(1).map(|&token| Some(scored(token, top)));
        events.push(Event::Prompt([None].into_iter().chain(rest).collect()));
    }
    for (byte, text) in "a€".bytes().zip(["a", "", "", "€"]) {
        events.push(Event::Delta(Delta {
            choice: 0,
            token: Some(u32::from(byte)),
            text: text.to_owned(),
            logprobs: request.logprobs.map(|top| scored(u32::from(byte), top)),
        }));
    }
    events.push(Event::Finished { choice: 0, reason: FinishReason::Stop });
    events
}

async fn completion(extra: Value) -> Value {
    let server = TestServer::new();
    let (reply, _) = server.post_with_script("/v1/completions", body_with(extra), script).await;
    reply.ok()["choices"][0].clone()
}

#[tokio::test]
async fn completions_have_logprobs() {
    let choice = completion(json!({"logprobs": 2})).await;
    assert_eq!(choice["text"], "a€");
    assert_eq!(
        choice["logprobs"],
        json!({
            "tokens": ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac"],
            "token_logprobs": [-0.25, -0.25, -0.25, -0.25],
            "top_logprobs": [
                {"a": -0.5, r"bytes:\xe2": -1.5},
                {"a": -0.5, r"bytes:\xe2": -1.5},
                {"a": -0.5, r"bytes:\xe2": -1.5, r"bytes:\x82": -0.25},
                {"a": -0.5, r"bytes:\xe2": -1.5, r"bytes:\xac": -0.25},
            ],
            "text_offset": [0, 1, 2, 2],
        })
    );
    let choice = completion(json!({"logprobs": 0})).await;
    assert_eq!(
        choice["logprobs"]["top_logprobs"][0],
        json!({"a": -0.25}),
        "the token itself is always there"
    );
    let choice = completion(json!({"logprobs": 3})).await;
    assert_eq!(choice["logprobs"]["top_logprobs"][0]["c"], -9999.0);
    assert_eq!(completion(json!({})).await["logprobs"], Value::Null);
}

#[tokio::test]
async fn echoed_prompts_have_logprobs() {
    let choice = completion(json!({"logprobs": 1, "echo": true})).await;
    assert_eq!(choice["text"], "hia€");
    let logprobs = &choice["logprobs"];
    assert_eq!(
        logprobs["tokens"],
        json!(["<s>", "h", "i", "a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac"])
    );
    assert_eq!(logprobs["token_logprobs"], json!([null, -0.25, -0.25, -0.25, -0.25, -0.25, -0.25]));
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    assert_eq!(logprobs["top_logprobs"][1], json!({"a": -0.5, "h": -0.25}));
    // The text does not contain special tokens.
    assert_eq!(logprobs["text_offset"], json!([0, 0, 1, 2, 3, 4, 4]));
}

#[tokio::test]
async fn every_choice_has_logprobs_of_echoed_prompts() {
    let server = TestServer::new();
    let body = body_with(json!({"prompt": [1, 2], "logprobs": 0, "echo": true, "n": 2, "max_tokens": 0}));
    let (reply, requests) = server
        .post_with_script("/v1/completions", body, |request| {
            let mut events: Vec<Event> = script(request).drain(..1).collect();
            events.extend([0, 1].map(|choice| Event::Finished { choice, reason: FinishReason::Length }));
            events
        })
        .await;
    assert_eq!((requests[0].prompt_logprobs, requests[0].max_tokens), (Some(0), 0));
    let choices = reply.ok()["choices"].clone();
    for choice in [&choices[0], &choices[1]] {
        assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -0.25]));
        assert_eq!(choice["text"], "\u{1}\u{2}");
    }
}

#[tokio::test]
async fn chats_have_logprobs() {
    let server = TestServer::new();
    let body = chat_body_with(json!({"logprobs": true, "top_logprobs": 1}));
    let (reply, requests) = server.post_with_script("/v1/chat/completions", body, script).await;
    assert_eq!(requests[0].logprobs, Some(1));
    let logprobs = reply.ok()["choices"][0]["logprobs"].clone();
    assert_eq!(logprobs["refusal"], Value::Null);
    assert_eq!(logprobs["content"].as_array().unwrap().len(), 4);
    assert_eq!(
        logprobs["content"][1],
        json!({
            "token": r"bytes:\xe2", "logprob": -0.25, "bytes": [0xe2],
            "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
        })
    );
    let (reply, requests) = server
        .post_with_script("/v1/chat/completions", chat_body_with(json!({"logprobs": true})), script)
        .await;
    assert_eq!(requests[0].logprobs, Some(0));
    assert_eq!(reply.ok()["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
    let (reply, requests) = server
        .post_with_script("/v1/chat/completions", chat_body_with(json!({"logprobs": false})), script)
        .await;
    assert_eq!(requests[0].logprobs, None);
    assert_eq!(reply.ok()["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn stream_chunks_have_logprobs_of_their_tokens() {
    let server = TestServer::new();
    let body = chat_body_with(json!({"logprobs": true, "stream": true}));
    let (reply, _) = server.post_with_script("/v1/chat/completions", body, script).await;
    let chunks = reply.chunks();
    let tokens: Vec<&Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"][0].get("token"))
        .collect();
    assert_eq!(tokens, ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac"]);
    let body = body_with(json!({"logprobs": 0, "stream": true, "echo": true}));
    let (reply, _) = server.post_with_script("/v1/completions", body, script).await;
    let chunks = reply.chunks();
    assert_eq!(chunks[0]["choices"][0]["text"], "hi");
    assert_eq!(chunks[0]["choices"][0]["logprobs"]["tokens"], json!(["<s>", "h", "i"]));
    assert_eq!(chunks[1]["choices"][0]["logprobs"]["text_offset"], json!([2]));
    assert_eq!(chunks[2]["choices"][0]["logprobs"]["tokens"], json!([r"bytes:\xe2"]));
    assert_eq!(chunks[2]["choices"][0]["text"], "");
}

#[tokio::test]
async fn without_a_tokenizer_tokens_are_numbers() {
    let server = TestServer::build(None, Engine::limits(), |_| ());
    let body = body_with(json!({"prompt": [BOS, 7], "logprobs": 1, "echo": true}));
    let (reply, _) = server.post_with_script("/v1/completions", body, script).await;
    let logprobs = reply.ok()["choices"][0]["logprobs"].clone();
    assert_eq!(logprobs["tokens"][0], "token_id:256");
    assert_eq!(logprobs["top_logprobs"][1], json!({"token_id:97": -0.5, "token_id:7": -0.25}));
    assert_eq!(logprobs["text_offset"], Value::Null);
}

#[tokio::test]
async fn each_route_has_its_own_field_type() {
    let server = TestServer::new();
    for value in [json!(true), json!(-1), json!(21), json!("1"), json!(1.5)] {
        server.post("/v1/completions", body_with(json!({ "logprobs": value }))).await.refuses("logprobs");
    }
    for value in [json!(1), json!("true")] {
        server
            .post("/v1/chat/completions", chat_body_with(json!({ "logprobs": value })))
            .await
            .refuses("logprobs");
    }
    for extra in [
        json!({"top_logprobs": 2}),
        json!({"logprobs": false, "top_logprobs": 2}),
        json!({"logprobs": true, "top_logprobs": 21}),
        json!({"logprobs": true, "top_logprobs": -1}),
        json!({"logprobs": true, "top_logprobs": true}),
    ] {
        server.post("/v1/chat/completions", chat_body_with(extra)).await.refuses("top_logprobs");
    }
}
