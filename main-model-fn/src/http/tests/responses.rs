//! Tests of `/v1/responses`: requests to the engine, items, order of events, and refusals.

use super::families::{Templated, family};
use super::tools::{server, server_with};
use super::{Reply, TestServer, failure, text_events};
use crate::engine::request::{Event, FinishReason, Request};
use crate::grammar::tests::accepts;
use axum::body::Body;
use axum::http;
use serde_json::{Value, json};

const RESPONSES: &str = "/v1/responses";

fn body_with(extra: Value) -> Value {
    super::merged(json!({"model": "org/tiny", "input": "hi"}), extra)
}

fn function(name: &str) -> Value {
    let parameters = json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]});
    json!({"type": "function", "name": name, "description": "d", "parameters": parameters})
}

async fn post_with_text(
    server: &TestServer,
    body: Value,
    text: &str,
    reason: FinishReason,
) -> (Reply, Vec<Request>) {
    server.post_with_script(RESPONSES, body, |_| text_events(0, text, reason)).await
}

async fn prompt(server: &TestServer, body: Value) -> String {
    let (reply, requests) = post_with_text(server, body, "ok", FinishReason::Stop).await;
    reply.ok();
    let bytes: Vec<u8> = requests[0].prompt.iter().map(|&id| u8::try_from(id).unwrap()).collect();
    String::from_utf8(bytes).unwrap()
}

/// Returns the events of a stream; asserts that the data of each repeats its name.
pub(super) fn events(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(reply.header("content-type"), "text/event-stream");
    let mut events: Vec<&str> = reply.text.split("\n\n").collect();
    assert_eq!(events.pop(), Some(""), "{}", reply.text);
    let read = |event: &&str| {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name, "{event}");
        data
    };
    events.iter().map(read).collect()
}

fn names(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn text_input_answers_one_message() {
    let server = TestServer::new();
    let (reply, requests) = post_with_text(
        &server,
        body_with(json!({"max_output_tokens": 7, "metadata": {"a": "b"}})),
        "ok",
        FinishReason::Stop,
    )
    .await;
    assert_eq!(requests[0].max_tokens, 7);
    let response = reply.ok();
    assert!(response["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!((&response["object"], &response["status"]), (&json!("response"), &json!("completed")));
    assert_eq!((&response["error"], &response["incomplete_details"]), (&Value::Null, &Value::Null));
    assert_eq!((&response["metadata"], &response["max_output_tokens"]), (&json!({"a": "b"}), &json!(7)));
    let item = &response["output"][0];
    assert!(item["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(
        (&item["type"], &item["role"], &item["status"]),
        (&json!("message"), &json!("assistant"), &json!("completed"))
    );
    assert_eq!(
        item["content"],
        json!([{"type": "output_text", "text": "ok", "annotations": [], "logprobs": []}])
    );
    let prompt = requests[0].prompt.len();
    assert_eq!(
        response["usage"],
        json!({
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": prompt / 2},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + 2,
        })
    );
}

#[tokio::test]
async fn length_limit_makes_response_incomplete() {
    let server = TestServer::new();
    let (reply, _) = post_with_text(&server, body_with(json!({})), "ok", FinishReason::Length).await;
    let response = reply.ok();
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(response["output"][0]["status"], "incomplete");
    let (reply, _) =
        post_with_text(&server, body_with(json!({"stream": true})), "ok", FinishReason::Length).await;
    let events = events(&reply);
    let last = events.last().unwrap();
    assert_eq!(
        (&last["type"], &last["response"]["status"]),
        (&json!("response.incomplete"), &json!("incomplete"))
    );
}

#[tokio::test]
async fn stream_of_text_has_events_in_order() {
    let server = TestServer::new();
    let (reply, _) =
        post_with_text(&server, body_with(json!({"stream": true})), "ok", FinishReason::Stop).await;
    let events = events(&reply);
    assert_eq!(
        names(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    for (sequence, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], sequence);
    }
    let id = &events[2]["item"]["id"];
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(events[2]["item"]["content"], json!([]));
    for event in &events[3..8] {
        let places = (&event["item_id"], &event["output_index"], &event["content_index"]);
        assert_eq!(places, (id, &json!(0), &json!(0)), "{event}");
    }
    assert_eq!((&events[4]["delta"], &events[4]["logprobs"]), (&json!("o"), &json!([])));
    assert_eq!(events[6]["text"], "ok");
    assert_eq!(events[7]["part"]["text"], "ok");
    assert_eq!(events[8]["item"]["content"][0]["text"], "ok");
    let response = &events[9]["response"];
    assert_eq!(response["output"], json!([events[8]["item"]]));
    assert_eq!(
        (&response["id"], &response["usage"]["output_tokens"]),
        (&events[0]["response"]["id"], &json!(2))
    );
}

#[tokio::test]
async fn stream_of_reasoning_and_calls_has_an_item_each() {
    let harmony = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary \
                   to=functions.f <|constrain|>json<|message|>{\"x\": 1}<|call|>";
    let server = server_with(Templated::of(family("harmony"), true), family("harmony").special.len());
    let body = body_with(json!({"tools": [function("f")], "stream": true, "max_output_tokens": 400}));
    let (reply, _) = post_with_text(&server, body.clone(), harmony, FinishReason::Stop).await;
    let events = events(&reply);
    let mut names = names(&events);
    names.dedup();
    assert_eq!(
        names,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let of = |name: &str| events.iter().filter(|event| event["type"] == name).collect::<Vec<_>>();
    let [reasoning, call] = of("response.output_item.done")[..] else { panic!("{events:?}") };
    assert_eq!((&reasoning["output_index"], &call["output_index"]), (&json!(0), &json!(1)));
    assert_eq!(reasoning["item"]["content"], json!([{"type": "reasoning_text", "text": "Hm."}]));
    assert_eq!(reasoning["item"]["summary"], json!([]));
    let item = &call["item"];
    assert_eq!(
        (&item["type"], &item["name"], &item["arguments"]),
        (&json!("function_call"), &json!("f"), &json!("{\"x\": 1}"))
    );
    assert!(item["call_id"].as_str().unwrap().starts_with("call_"));
    assert_eq!(of("response.output_item.added")[1]["item"]["arguments"], "");
    let deltas = of("response.function_call_arguments.delta");
    let arguments: String = deltas.iter().map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(arguments, "{\"x\": 1}");
    assert!(
        deltas.iter().all(|event| event["item_id"] == item["id"] && event.get("content_index").is_none())
    );
    let done = of("response.function_call_arguments.done")[0];
    assert_eq!((&done["arguments"], &done["name"]), (&json!("{\"x\": 1}"), &json!("f")));
    let completed = &events.last().unwrap()["response"];
    assert_eq!(completed["output"], json!([reasoning["item"], item]));

    let mut body = body;
    body["stream"] = false.into();
    let (reply, _) = post_with_text(&server, body, harmony, FinishReason::Stop).await;
    let kinds: Vec<Value> =
        reply.ok()["output"].as_array().unwrap().iter().map(|item| item["type"].clone()).collect();
    assert_eq!(kinds, ["reasoning", "function_call"]);
}

#[tokio::test]
async fn empty_answer_has_an_empty_message() {
    let server = TestServer::new();
    let (reply, _) = post_with_text(&server, body_with(json!({})), "", FinishReason::Stop).await;
    assert_eq!(reply.ok()["output"][0]["content"][0]["text"], "");
}

#[tokio::test]
async fn failed_stream_ends_with_failed_response() {
    let server = TestServer::new();
    let broken = |_: &Request| {
        let mut events = text_events(0, "o", FinishReason::Stop);
        events.pop();
        events.push(failure());
        events
    };
    let (reply, _) = server.post_with_script(RESPONSES, body_with(json!({"stream": true})), broken).await;
    let events = events(&reply);
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(last["response"]["error"], json!({"code": "server_error", "message": "no replica answered"}));
    let (reply, _) = server.post_with_script(RESPONSES, body_with(json!({})), |_| vec![failure()]).await;
    reply.error(503);
}

#[tokio::test]
async fn items_become_messages_of_a_chat() {
    let server = server(family("hermes"));
    let input = json!([
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [{"type": "output_text", "text": "t", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"x\": 1}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "u"},
    ]);
    let shown = prompt(&server, body_with(json!({"input": input, "instructions": "i"}))).await;
    let call = "\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
    assert_eq!(
        shown,
        format!(
            "<|system|>i\n\nd\n<|user|>a\nb\n<|assistant|>t{call}<|stop|>\n<|observation|>one\n<|observation|>two\n<|assistant|>no<|stop|>\n<|user|>u\n<|assistant|>"
        )
    );
}

#[tokio::test]
async fn tools_and_formats_constrain_the_answer() {
    let server = server(family("hermes"));
    let requests = async |extra: Value| {
        post_with_text(&server, body_with(extra), "x", FinishReason::Stop).await.1.remove(0).grammar
    };
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
    for choice in [json!("required"), json!({"type": "function", "name": "f"})] {
        let grammar = requests(json!({"tools": [function("f")], "tool_choice": choice})).await.unwrap();
        assert!(accepts(&grammar, call) && !accepts(&grammar, "Hello"));
    }
    assert!(requests(json!({"tools": [function("f")]})).await.is_none());
    let schema = json!({"type": "object", "properties": {"y": {"type": "boolean"}}, "required": ["y"]});
    let format = json!({"type": "json_schema", "name": "n", "strict": true, "schema": schema});
    let grammar = requests(json!({"text": {"format": format}})).await.unwrap();
    assert!(accepts(&grammar, "{\"y\": true}") && !accepts(&grammar, "{\"y\": 1}"));
    assert!(accepts(
        &requests(json!({"text": {"format": {"type": "json_object"}}})).await.unwrap(),
        "{\"a\": 1}"
    ));
    assert!(requests(json!({"text": {"format": {"type": "text"}}})).await.is_none());
}

#[tokio::test]
async fn answer_repeats_request_fields() {
    let server = server(family("hermes"));
    let extra = json!({
        "instructions": "i", "temperature": 0.5, "top_p": 0.9, "parallel_tool_calls": false, "store": false,
        "tools": [function("f")], "tool_choice": "auto", "user": "u", "truncation": "disabled",
        "reasoning": {"effort": "none", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
        "service_tier": "auto", "text": {"verbosity": "medium"}, "unknown": 1, "prompt_cache_key": "k",
    });
    let (reply, requests) = post_with_text(&server, body_with(extra.clone()), "x", FinishReason::Stop).await;
    let response = reply.ok();
    for name in [
        "instructions",
        "temperature",
        "top_p",
        "parallel_tool_calls",
        "store",
        "tools",
        "tool_choice",
        "user",
        "reasoning",
        "truncation",
    ] {
        assert_eq!(response[name], extra[name], "{name}");
    }
    assert_eq!(response["text"], json!({"format": {"type": "text"}}));
    assert_eq!((requests[0].sampling.temperature, requests[0].sampling.top_p), (0.5, 0.9));
}

#[tokio::test]
async fn unsupported_and_wrong_fields_are_named() {
    let server = TestServer::new();
    let item = |item: Value| json!({"input": [item]});
    for (extra, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": 1}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": ["a"]}), "input[0]"),
        (item(json!({"type": "web_search_call"})), "input[0].type"),
        (item(json!({"role": "user"})), "input[0].content"),
        (item(json!({"content": "x"})), "input[0].role"),
        (item(json!({"role": "tool", "content": "x"})), "input[0].role"),
        (
            item(json!({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]})),
            "input[0].content[0].type",
        ),
        (item(json!({"role": "user", "content": [{"type": "input_text"}]})), "input[0].content[0].text"),
        (item(json!({"type": "function_call", "name": "f", "arguments": "{}"})), "input[0].call_id"),
        (item(json!({"type": "function_call", "call_id": "c", "arguments": "{}"})), "input[0].name"),
        (item(json!({"type": "function_call_output", "call_id": "c"})), "input[0].output"),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"background": true}), "background"),
        (json!({"conversation": "c"}), "conversation"),
        (json!({"prompt": {"id": "p"}}), "prompt"),
        (json!({"context_management": [{"type": "compaction"}]}), "context_management"),
        (json!({"max_tool_calls": 1}), "max_tool_calls"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"service_tier": "flex"}), "service_tier"),
        (json!({"include": ["message.output_text.logprobs"]}), "include[0]"),
        (json!({"text": {"verbosity": "low"}}), "text.verbosity"),
        (json!({"text": {"format": {"type": "grammar"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema", "name": "n"}}}), "text.format.schema"),
        (json!({"reasoning": {"effort": "high"}}), "reasoning.effort"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"metadata": {"a": 1}}), "metadata"),
        (json!({"metadata": []}), "metadata"),
        (json!({"priority": "urgent"}), "priority"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].name"),
        (json!({"tools": [{"type": "function", "name": "f", "parameters": 1}]}), "tools[0].parameters"),
        (json!({"tools": [function("f")], "tool_choice": {"type": "function"}}), "tool_choice.name"),
        (json!({"tools": [function("f")], "tool_choice": {"type": "custom", "name": "f"}}), "tool_choice"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"input": "x".repeat(200)}), "input"),
    ] {
        let reply = server.post(RESPONSES, body_with(extra.clone())).await;
        assert_eq!(reply.error(400)["param"], param, "{extra}: {}", reply.text);
        assert!(!reply.text.contains("function.") && !reply.text.contains("messages"), "{}", reply.text);
    }
    assert_eq!(
        server.post(RESPONSES, body_with(json!({"model": "other"}))).await.error(404)["code"],
        "model_not_found"
    );
}

#[tokio::test]
async fn hostile_bodies_are_refused() {
    let server = TestServer::new();
    let many = format!("[{}]", vec!["{}"; 16385].join(","));
    for (body, param) in [
        (format!("{{\"input\": {many}}}"), json!("input")),
        (format!("{{\"input\": [{{\"role\": \"user\", \"content\": {many}}}]}}"), json!("input[0].content")),
        ("{\"input\": \"a\", \"input\": \"b\"}".to_owned(), json!("input")),
        ("[]".to_owned(), Value::Null),
        ("{\"input\"".to_owned(), Value::Null),
        (format!("{{\"input\": {}", "[".repeat(100)), Value::Null),
    ] {
        let reply = server.post_raw(RESPONSES, body).await;
        assert_eq!(reply.error(400)["param"], param, "{}", reply.text);
    }
}

/// A gateway marks requests in which it has put the items of an earlier response before the input.
#[tokio::test]
async fn resolved_previous_response_is_repeated() {
    let server = TestServer::new();
    let request = http::Request::post(RESPONSES)
        .header("x-remoe-resolved", "1")
        .body(Body::from(body_with(json!({"previous_response_id": "resp_1"})).to_string()))
        .unwrap();
    let serve = server.engine.serve(|request| {
        let mut events = text_events(0, "x", FinishReason::Stop);
        events.push(Event::Done(super::figures(request)));
        events
    });
    let reply = tokio::select! {
        reply = server.send(request) => reply,
        () = serve => unreachable!("the engine serves for ever"),
    };
    assert_eq!(reply.ok()["previous_response_id"], "resp_1");
}

#[tokio::test]
async fn field_of_any_type_is_answered_or_refused() {
    // A model with thoughts.
    let server = server_with(Templated::new(super::reasoning::SWITCHED, &[]), 0);
    let body = json!({
        "model": "org/tiny",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
        ],
        "instructions": "i", "max_output_tokens": 5, "temperature": 0, "top_p": 1, "top_k": 1, "min_p": 0, "seed": 1,
        "enable_thinking": false, "thinking_token_budget": 4,
        "tools": [function("f")], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": true,
        "text": {"format": {"type": "text", "name": "n", "schema": {}, "strict": true}, "verbosity": "medium"},
        "reasoning": {"effort": "none", "summary": "auto"}, "stream": false, "store": true, "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"], "truncation": "disabled", "service_tier": "auto", "user": "u",
        "background": false, "top_logprobs": 0, "priority": "batch", "queue_deadline": "1s",
    });
    post_with_text(&server, body.clone(), "x", FinishReason::Stop).await.0.ok();
    super::check_all_types(&server, RESPONSES, &body).await;
}
