//! Tests of chats: messages, prompts and answers.

use super::{Engine, TestServer, TextOverride, chat_body_with, text_events};
use crate::engine::request::FinishReason;
use serde_json::{Value, json};
use std::sync::Arc;

async fn prompt_of(messages: Value) -> String {
    let server = super::tools::server(super::families::family("hermes"));
    let (reply, requests) = server.chat(json!({ "messages": messages })).await;
    reply.ok();
    let bytes: Vec<u8> = requests[0].prompt.iter().map(|&id| u8::try_from(id).unwrap()).collect();
    String::from_utf8(bytes).unwrap()
}

#[tokio::test]
async fn roles_and_parts_reach_the_template() {
    let prompt = prompt_of(json!([
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
        {"role": "assistant", "content": null},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "r"}]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
        {"role": "user", "content": ""},
    ]))
    .await;
    assert_eq!(
        prompt,
        "<|system|>s\n<|system|>d\n<|user|>a\nb\n<|assistant|><|stop|>\n<|assistant|>r<|stop|>\n<|observation|>t\n<|user|>\n<|assistant|>"
    );
}

#[tokio::test]
async fn earlier_tool_call_arguments_reach_template_as_objects() {
    let call = |arguments: &str| json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]);
    let prompt = prompt_of(json!([{"role": "assistant", "tool_calls": call("{\"x\": 1}")}])).await;
    assert!(prompt.contains(r#""arguments": {"x": 1}"#), "{prompt}");
    let prompt = prompt_of(json!([{"role": "assistant", "tool_calls": call("{\"x\"")}])).await;
    assert!(prompt.contains(r#""arguments": "{\"x\"""#), "{prompt}");
}

/// Byte tokenizer with a template that reads the reasoning effort.
struct ThinkingTemplate;

impl TextOverride for ThinkingTemplate {
    fn template(&self) -> Option<&str> {
        Some("{{ reasoning_effort }}")
    }
}

#[tokio::test]
async fn effort_reaches_templates_that_read_it() {
    let server = TestServer::build(Some(Arc::new(ThinkingTemplate)), Engine::limits(), |_| ());
    let length = async |effort: Value| {
        let body = chat_body_with(json!({ "reasoning_effort": effort }));
        let (reply, requests) = server.chat(body.clone()).await;
        reply.ok();
        let tokenized = server.post("/tokenize", body).await.ok();
        assert_eq!(tokenized["tokens"], json!(requests[0].prompt), "{effort}");
        requests[0].prompt.len()
    };
    let unsaid = length(json!(null)).await;
    for effort in ["none", "minimal", "low", "medium", "high"] {
        assert_eq!(length(json!(effort)).await, unsaid + effort.len() + 2, "{effort}");
    }
    for wrong in [json!("extreme"), json!("LOW"), json!(3), json!({"effort": "low"})] {
        let body = chat_body_with(json!({ "reasoning_effort": wrong }));
        server.post("/v1/chat/completions", body.clone()).await.refuses("reasoning_effort");
        server.post("/tokenize", body).await.refuses("reasoning_effort");
    }
}

#[tokio::test]
async fn generation_prompt_can_be_omitted() {
    let server = TestServer::new();
    let (_, requests) = server.chat(chat_body_with(json!({"add_generation_prompt": false}))).await;
    assert_eq!(requests[0].prompt.len(), "[user]hi".len(), "and no special token is added");
}

#[tokio::test]
async fn invalid_messages_are_refused_by_name() {
    let server = TestServer::new();
    let user =
        |content: Value| json!([{"role": "user", "content": "x"}, {"role": "user", "content": content}]);
    let called =
        |call: Value| json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, call]}]);
    for (messages, param) in [
        (json!([]), "messages"),
        (json!(null), "messages"),
        (json!("hi"), "messages"),
        (json!({}), "messages"),
        (json!(["hi"]), "messages[0]"),
        (json!([["user", "hi"]]), "messages[0]"),
        (json!([{"content": "x"}]), "messages[0].role"),
        (json!([{"role": "robot", "content": "x"}]), "messages[0].role"),
        (json!([{"role": "function", "content": "x"}]), "messages[0].role"),
        (json!([{"role": 1, "content": "x"}]), "messages[0].role"),
        (json!([{"role": "user"}]), "messages[0].content"),
        (json!([{"role": "user", "content": "REFUSE"}]), "messages"),
        (user(json!(null)), "messages[1].content"),
        (user(json!(1)), "messages[1].content"),
        (user(json!([{"type": "image_url", "image_url": {"url": "data:"}}])), "messages[1].content[0]"),
        (user(json!([{"type": "text", "text": "x"}, {"type": "input_audio"}])), "messages[1].content[1]"),
        (user(json!([{"type": "file"}])), "messages[1].content[0]"),
        (user(json!([{"type": "text"}])), "messages[1].content[0].text"),
        (user(json!([{"type": "text", "text": 1}])), "messages[1].content[0].text"),
        (json!([{"role": "user", "content": "x", "tool_calls": [{}]}]), "messages[0].tool_calls"),
        (called(json!({})), "messages[0].tool_calls[1].function.name"),
        (called(json!({"function": {"arguments": "{}"}})), "messages[0].tool_calls[1].function.name"),
        (called(json!({"type": "custom", "function": {"name": "f"}})), "messages[0].tool_calls[1].type"),
        (
            json!([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]),
            "messages[0].function_call",
        ),
        (json!([{"role": "assistant", "content": "x", "audio": {"id": "f"}}]), "messages[0].audio"),
    ] {
        server.post("/v1/chat/completions", json!({ "messages": messages })).await.refuses(param);
    }
    server.post("/v1/chat/completions", chat_body_with(json!({"echo": true}))).await.refuses("echo");
}

#[tokio::test]
async fn images_are_refused_by_name() {
    let server = TestServer::new();
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]);
    let reply = server.post("/v1/chat/completions", json!({ "messages": image })).await;
    assert!(reply.error(400)["message"].as_str().unwrap().contains("image_url"));
}

#[tokio::test]
async fn answer_has_openais_format() {
    let server = TestServer::new();
    let (reply, _) = server.chat(chat_body_with(json!({}))).await;
    let answer = reply.ok();
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert!(answer["created"].as_u64().unwrap() > 1_600_000_000);
    let mut expected = json!({
        "object": "chat.completion",
        "model": "org/tiny",
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": "ok", "refusal": null},
            "logprobs": null,
            "finish_reason": "stop",
        }],
        "usage": {"prompt_tokens": 19, "completion_tokens": 2, "total_tokens": 21, "prompt_tokens_details": {"cached_tokens": 9}, "completion_tokens_details": {"reasoning_tokens": 0}},
    });
    expected["id"] = answer["id"].clone();
    expected["created"] = answer["created"].clone();
    assert_eq!(answer, expected);
}

#[tokio::test]
async fn choices_are_in_order() {
    let server = TestServer::new();
    let (reply, _) = server
        .post_with_script("/v1/chat/completions", chat_body_with(json!({"n": 2})), |_| {
            let mut events = text_events(1, "second", FinishReason::Length);
            events.extend(text_events(0, "first", FinishReason::Stop));
            events
        })
        .await;
    let choices = reply.ok()["choices"].clone();
    assert_eq!(choices[0]["message"]["content"], "first");
    assert_eq!(choices[1]["message"]["content"], "second");
    assert_eq!(choices[1]["index"], 1);
    assert_eq!(choices[1]["finish_reason"], "length");
}

#[tokio::test]
async fn chats_need_a_tokenizer() {
    let server = TestServer::build(None, super::Engine::limits(), |_| ());
    server.post("/v1/chat/completions", chat_body_with(json!({}))).await.refuses("messages");
}

#[tokio::test]
async fn unknown_role_is_quoted_as_sent() {
    let server = TestServer::new();
    let refused = async |message: Value| {
        let body = json!({"model": "org/tiny", "messages": [message]});
        let error = server.post("/v1/chat/completions", body).await.error(400);
        assert_eq!(error["param"], "messages[0].role");
        error["message"].as_str().unwrap().to_owned()
    };
    let message = refused(json!({"role": "bot", "content": "x"})).await;
    assert!(message.ends_with("or tool, got \"bot\""), "{message}");
    assert_eq!(refused(json!({"content": "x"})).await, "missing `messages[0].role`");
}
