//! Tests of `/v1/messages`: requests to the engine, blocks, order of events, and errors in Anthropic's format.

use super::families::{Templated, family};
use super::responses::events;
use super::tools::{server, server_with};
use super::{Reply, TestServer, failure, text_events};
use crate::engine::request::{FinishReason, Request};
use crate::grammar::tests::accepts;
use axum::body::Body;
use axum::http;
use serde_json::{Value, json};

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

fn body_with(extra: Value) -> Value {
    let body =
        json!({"model": "org/tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]});
    super::merged(body, extra)
}

fn tool(name: &str) -> Value {
    let schema = json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]});
    json!({"name": name, "description": "d", "input_schema": schema, "cache_control": {"type": "ephemeral"}})
}

async fn post_with_text(
    server: &TestServer,
    body: Value,
    text: &str,
    reason: FinishReason,
) -> (Reply, Vec<Request>) {
    server.post_with_script(MESSAGES, body, |_| text_events(0, text, reason)).await
}

async fn prompt(server: &TestServer, body: Value) -> String {
    let (reply, requests) = post_with_text(server, body, "ok", FinishReason::Stop).await;
    reply.ok();
    let bytes: Vec<u8> = requests[0].prompt.iter().map(|&id| u8::try_from(id).unwrap()).collect();
    String::from_utf8(bytes).unwrap()
}

/// Asserts an error in Anthropic's format and returns its message.
fn refused(reply: &Reply, status: u16, kind: &str) -> String {
    assert_eq!(reply.status, status, "{}", reply.text);
    let error = reply.json();
    let message = error["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(error, json!({"type": "error", "error": {"type": kind, "message": message}}));
    assert_eq!(reply.header("content-type"), "application/json");
    message
}

#[tokio::test]
async fn text_is_answered_with_one_block() {
    let server = TestServer::new();
    let body = body_with(json!({"top_k": 3, "metadata": {"user_id": "u"}, "anthropic-beta": "x"}));
    let (reply, requests) = post_with_text(&server, body, "ok", FinishReason::Stop).await;
    assert_eq!((requests[0].max_tokens, requests[0].sampling.top_k), (20, 3));
    let message = reply.ok();
    let prompt = requests[0].prompt.len();
    let id = message["id"].clone();
    assert!(id.as_str().unwrap().starts_with("msg_"));
    assert_eq!(
        message,
        json!({
            "id": id, "type": "message", "role": "assistant", "model": "org/tiny",
            "content": [{"type": "text", "text": "ok"}], "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {
                "input_tokens": prompt - prompt / 2, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": prompt / 2, "output_tokens": 2,
            },
        })
    );
}

#[tokio::test]
async fn stop_reason_says_why_the_answer_ended() {
    let server = TestServer::new();
    let body = body_with(json!({"stop_sequences": ["A", "B"]}));
    for (reason, stop, sequence) in [
        (FinishReason::Length, "max_tokens", Value::Null),
        (FinishReason::StopString(1), "stop_sequence", json!("B")),
        (FinishReason::Stop, "end_turn", Value::Null),
    ] {
        let (reply, requests) = post_with_text(&server, body.clone(), "ok", reason).await;
        assert_eq!(requests[0].stop.strings, ["A", "B"]);
        let message = reply.ok();
        assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!(stop), &sequence));
        let mut body = body.clone();
        body["stream"] = true.into();
        let (reply, _) = post_with_text(&server, body, "ok", reason).await;
        let events = events(&reply);
        let delta = &events[events.len() - 2]["delta"];
        assert_eq!(delta, &json!({"stop_reason": stop, "stop_sequence": sequence}));
    }
}

#[tokio::test]
async fn stream_of_text_has_events_in_order() {
    let server = TestServer::new();
    let (reply, requests) =
        post_with_text(&server, body_with(json!({"stream": true})), "ok", FinishReason::Stop).await;
    let events = events(&reply);
    let prompt = requests[0].prompt.len();
    let message = &events[0]["message"];
    assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &Value::Null));
    assert_eq!(message["usage"]["input_tokens"], prompt);
    assert_eq!(
        events[1..],
        [
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "o"}}),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "k"}}),
            json!({"type": "content_block_stop", "index": 0}),
            json!({
                "type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": null},
                "usage": {
                    "input_tokens": prompt - prompt / 2, "cache_creation_input_tokens": 0,
                    "cache_read_input_tokens": prompt / 2, "output_tokens": 2,
                },
            }),
            json!({"type": "message_stop"}),
        ]
    );
}

#[tokio::test]
async fn thinking_and_tool_use_are_separate_blocks() {
    let harmony = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary \
                   to=functions.f <|constrain|>json<|message|>{\"x\": 1}<|call|>";
    let server = server_with(Templated::of(family("harmony"), true), family("harmony").special.len());
    let body = body_with(
        json!({"tools": [tool("f")], "max_tokens": 400, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    );
    let (reply, _) = post_with_text(&server, body.clone(), harmony, FinishReason::Stop).await;
    let message = reply.ok();
    assert_eq!(message["stop_reason"], "tool_use");
    let id = message["content"][1]["id"].clone();
    assert_eq!(
        message["content"],
        json!([
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "tool_use", "id": id, "name": "f", "input": {"x": 1}},
        ])
    );
    let mut body = body;
    body["stream"] = true.into();
    let (reply, _) = post_with_text(&server, body, harmony, FinishReason::Stop).await;
    let events = events(&reply);
    let starts: Vec<&Value> = events.iter().filter(|event| event["type"] == "content_block_start").collect();
    assert_eq!(starts[0]["content_block"], json!({"type": "thinking", "thinking": "", "signature": ""}));
    assert_eq!((&starts[1]["index"], &starts[1]["content_block"]["input"]), (&json!(1), &json!({})));
    let said = |kind: &str, field: &str| -> String {
        let deltas = events.iter().map(|event| &event["delta"]).filter(|delta| delta["type"] == kind);
        deltas.map(|delta| delta[field].as_str().unwrap()).collect()
    };
    assert_eq!(said("thinking_delta", "thinking"), "Hm.");
    assert_eq!(said("input_json_delta", "partial_json"), "{\"x\": 1}");
    let stops = events.iter().filter(|event| event["type"] == "content_block_stop").count();
    assert_eq!(stops, 2);
}

#[tokio::test]
async fn cut_off_arguments_are_no_empty_object() {
    let server = server(family("hermes"));
    let text = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": ";
    let (reply, _) = post_with_text(
        &server,
        body_with(json!({"tools": [tool("f")], "max_tokens": 400})),
        text,
        FinishReason::Length,
    )
    .await;
    let message = reply.ok();
    assert_eq!(
        (&message["stop_reason"], &message["content"][0]["input"]),
        (&json!("max_tokens"), &json!({"arguments": "{\"x\": "}))
    );
}

#[tokio::test]
async fn blocks_become_messages_of_a_chat() {
    let server = server(family("hermes"));
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "r", "signature": "s"},
            {"type": "redacted_thinking", "data": "xx"},
            {"type": "text", "text": "t"},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "one"}]},
            {"type": "tool_result", "tool_use_id": "c2", "content": "two", "is_error": true},
            {"type": "tool_result", "tool_use_id": "c3"},
            {"type": "text", "text": "u"},
        ]},
    ]);
    let system = json!([{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}]);
    let shown = prompt(&server, body_with(json!({"messages": messages, "system": system}))).await;
    let call = "\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
    assert_eq!(
        shown,
        format!(
            "<|system|>s1\ns2\n<|user|>a\nb\n<|assistant|>t{call}<|stop|>\n<|observation|>one\n<|observation|>two\n<|observation|>\n<|user|>u\n<|assistant|>"
        )
    );
    assert_eq!(
        prompt(&server, body_with(json!({"system": "s"}))).await,
        "<|system|>s\n<|user|>hi\n<|assistant|>"
    );
}

#[tokio::test]
async fn tool_choice_and_format_constrain_the_answer() {
    let server = server(family("hermes"));
    let requests = async |extra: Value| {
        post_with_text(&server, body_with(extra), "x", FinishReason::Stop).await.1.remove(0).grammar
    };
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
    for choice in [json!({"type": "any"}), json!({"type": "tool", "name": "f"})] {
        let grammar = requests(json!({"tools": [tool("f")], "tool_choice": choice})).await.unwrap();
        assert!(accepts(&grammar, call) && !accepts(&grammar, "Hello"));
    }
    let single = json!({"type": "auto", "disable_parallel_tool_use": true});
    let grammar = requests(json!({"tools": [tool("f")], "tool_choice": single})).await.unwrap();
    assert!(
        accepts(&grammar, call)
            && accepts(&grammar, "Hello")
            && !accepts(&grammar, &format!("{call}\n{call}"))
    );
    assert!(requests(json!({"tools": [tool("f")], "tool_choice": {"type": "none"}})).await.is_none());
    let schema = json!({"type": "object", "properties": {"y": {"type": "boolean"}}, "required": ["y"]});
    let format = json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}});
    let grammar = requests(format).await.unwrap();
    assert!(accepts(&grammar, "{\"y\": true}") && !accepts(&grammar, "{\"y\": 1}"));
}

#[tokio::test]
async fn count_is_the_length_of_the_prompt() {
    let server = server(family("hermes"));
    let shown = prompt(&server, body_with(json!({"tools": [tool("f")], "system": "s"}))).await;
    let mut body = body_with(json!({"tools": [tool("f")], "system": "s"}));
    body.as_object_mut().unwrap().remove("max_tokens");
    assert_eq!(server.post(COUNT, body).await.ok(), json!({"input_tokens": shown.len()}));
    refused(&server.post(COUNT, json!({})).await, 400, "invalid_request_error");
}

#[tokio::test]
async fn unsupported_and_wrong_fields_are_named() {
    let server = TestServer::new();
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    for (extra, field) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"messages": null}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "assistant", "content": "x"}]}), "messages[0].role"),
        (user(json!([{"type": "image", "source": {}}])), "messages[0].content[0].type"),
        (user(json!([{"type": "document", "source": {}}])), "messages[0].content[0].type"),
        (
            user(json!([{"type": "tool_use", "id": "a", "name": "f", "input": {}}])),
            "messages[0].content[0].type",
        ),
        (user(json!([{"type": "text"}])), "messages[0].content[0].text"),
        (user(json!([{"type": "tool_result", "content": "x"}])), "messages[0].content[0].tool_use_id"),
        (
            user(json!([{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}])),
            "messages[0].content[0].content[0].type",
        ),
        (json!({"system": [{"type": "image"}]}), "system[0].type"),
        (json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}), "tools[0].type"),
        (json!({"tools": [{"name": "f", "input_schema": 1}]}), "tools[0].input_schema"),
        (json!({"tools": [{"name": "a b", "input_schema": {}}]}), "tools[0].name"),
        (json!({"tools": [tool("f")], "tool_choice": {"type": "tool"}}), "tool_choice.name"),
        (json!({"tools": [tool("f")], "tool_choice": {"type": "some"}}), "tool_choice.type"),
        (json!({"thinking": {"type": "maybe"}}), "thinking.type"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 0}}), "thinking.budget_tokens"),
        (json!({"thinking": {"type": "enabled", "display": "omitted"}}), "thinking.display"),
        (json!({"container": "c"}), "container"),
        (json!({"mcp_servers": [{}]}), "mcp_servers"),
        (
            json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
            "context_management",
        ),
        (json!({"output_config": {"effort": "high"}}), "output_config.effort"),
        (json!({"output_config": {"format": {"type": "json_object"}}}), "output_config.format.type"),
        (json!({"stop_sequences": [""]}), "stop_sequences"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"messages": [{"role": "user", "content": "x".repeat(200)}]}), "context length"),
    ] {
        let reply = server.post(MESSAGES, body_with(extra.clone())).await;
        let message = refused(&reply, 400, "invalid_request_error");
        assert!(message.contains(field), "{extra}: {message}");
    }
    let keeps =
        json!({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}});
    post_with_text(&server, body_with(keeps), "ok", FinishReason::Stop).await.0.ok();
    let many = format!("{{\"messages\": [{}]}}", vec!["{}"; 16385].join(","));
    refused(&server.post_raw(MESSAGES, many).await, 400, "invalid_request_error");
}

#[tokio::test]
async fn errors_have_anthropics_format() {
    let server = TestServer::with(|options| options.api_key = Some("secret".to_owned()));
    let ask = async |path: &str, key: Option<(&'static str, &'static str)>| {
        let mut request = http::Request::post(path)
            .body(Body::from(body_with(json!({"model": "other"})).to_string()))
            .unwrap();
        if let Some((name, value)) = key {
            request.headers_mut().insert(name, http::HeaderValue::from_static(value));
        }
        server.send(request).await
    };
    refused(&ask(MESSAGES, None).await, 401, "authentication_error");
    refused(&ask(MESSAGES, Some(("x-api-key", "wrong"))).await, 401, "authentication_error");
    for key in [("x-api-key", "secret"), ("authorization", "Bearer secret")] {
        let message = refused(&ask(MESSAGES, Some(key)).await, 404, "not_found_error");
        assert!(message.contains("`other`"), "{message}");
        refused(&ask("/v1/messages/batches", Some(key)).await, 404, "not_found_error");
    }
    server.ready.send(false).unwrap();
    let busy = ask(MESSAGES, Some(("x-api-key", "secret"))).await;
    refused(&busy, 503, "overloaded_error");
    assert!(!busy.header("retry-after").is_empty());
    // Other routes use OpenAI's format.
    ask("/v1/chat/completions", None).await.error(401);
}

#[tokio::test]
async fn failed_stream_ends_with_error_event() {
    let server = TestServer::new();
    let (reply, _) =
        server.post_with_script(MESSAGES, body_with(json!({"stream": true})), |_| vec![failure()]).await;
    let events = events(&reply);
    assert_eq!(
        events[1],
        json!({"type": "error", "error": {"type": "overloaded_error", "message": "no replica answered"}})
    );
    assert_eq!(events.len(), 2);
}

#[tokio::test]
async fn field_of_any_type_is_answered_or_refused() {
    // A model with thoughts.
    let server = server_with(Templated::new(super::reasoning::SWITCHED, &[]), 0);
    let body = json!({
        "model": "org/tiny", "max_tokens": 5, "stream": false, "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "r"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "o"}]}]},
        ],
        "tools": [tool("f")], "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true},
        "thinking": {"type": "enabled", "budget_tokens": 5, "display": "summarized"}, "output_config": {"effort": "none"},
        "stop_sequences": ["a"], "temperature": 0, "top_p": 1, "top_k": 1, "seed": 1, "container": null,
        "context_management": {"edits": [{"keep": "all"}]}, "priority": "batch", "queue_deadline": "1s",
    });
    post_with_text(&server, body.clone(), "x", FinishReason::Stop).await.0.ok();
    super::check_all_types(&server, MESSAGES, &body).await;
}
