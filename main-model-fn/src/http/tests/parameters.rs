//! Tests of all parameters: effect on the engine's request, and refusals by name.

use super::{TestServer, body_with, chat_body_with};
use crate::engine::request::{Priority, Request, Sampling};
use remoe_model::GenerationDefaults;
use serde_json::{Value, json};
use std::time::Duration;

async fn request_of(server: &TestServer, body: Value) -> Request {
    let (reply, mut requests) = server.complete(body).await;
    reply.ok();
    assert_eq!(requests.len(), 1);
    requests.remove(0)
}

#[tokio::test]
async fn all_parameters_reach_the_engine() {
    let server = TestServer::new();
    let request = request_of(
        &server,
        body_with(json!({
            "max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "n": 2,
            "seed": 11, "stop": ["x", "yz"], "stop_token_ids": [4, 5], "min_tokens": 2,
            "ignore_eos": true, "presence_penalty": -0.5, "frequency_penalty": 1.5,
            "repetition_penalty": 1.25, "logit_bias": {"7": -100, "200": 2.5}, "logprobs": 3,
            "best_of": 2, "priority": "batch", "queue_deadline": "1.5s", "user": "someone", "unheard_of": {"deep": [1, 2]},
        })),
    )
    .await;
    assert_eq!(request.max_tokens, 7);
    assert_eq!(request.choices, 2);
    assert_eq!(request.logprobs, Some(3));
    assert_eq!(request.priority, Priority::Batch);
    assert_eq!(request.queue_deadline, Some(Duration::from_millis(1500)));
    assert_eq!(request.prompt_logprobs, None);
    assert_eq!(request.inspect, None);
    assert_eq!(
        request.sampling,
        Sampling {
            repetition_penalty: 1.25,
            presence_penalty: -0.5,
            frequency_penalty: 1.5,
            logit_bias: [(7, -100.0), (200, 2.5)].into(),
            temperature: 0.5,
            top_k: 3,
            top_p: 0.25,
            min_p: 0.125,
            seed: 11,
        }
    );
    assert_eq!(request.stop.strings, ["x", "yz"]);
    assert_eq!(request.stop.token_ids, [4, 5]);
    assert_eq!(request.stop.min_tokens, 2);
    assert!(request.stop.ignore_eos);
}

#[tokio::test]
async fn chats_accept_the_same_parameters() {
    let server = TestServer::new();
    let (reply, requests) = server
        .chat(chat_body_with(
            json!({"max_completion_tokens": 9, "max_tokens": 5, "top_k": 2, "seed": -1, "stop": "x"}),
        ))
        .await;
    reply.ok();
    assert_eq!(requests[0].max_tokens, 9, "the newer name wins");
    assert_eq!(requests[0].sampling.top_k, 2);
    assert_eq!(requests[0].sampling.seed, u64::MAX);
    assert_eq!(requests[0].stop.strings, ["x"]);
    let (_, requests) = server.chat(chat_body_with(json!({"max_tokens": 5}))).await;
    assert_eq!(requests[0].max_tokens, 5);
}

#[tokio::test]
async fn null_equals_absent() {
    let server = TestServer::new();
    let mut nulls = json!({});
    for name in [
        "max_tokens",
        "max_completion_tokens",
        "n",
        "best_of",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "stop",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "echo",
        "logprobs",
        "stream",
        "stream_options",
        "tools",
        "tool_choice",
        "response_format",
        "suffix",
        "model",
        "include_figures",
        "modalities",
    ] {
        nulls[name] = Value::Null;
    }
    let request = request_of(&server, body_with(nulls)).await;
    assert_eq!(request.max_tokens, 16);
    let seed = request.sampling.seed;
    assert_eq!(request.sampling, Sampling { seed, ..Sampling::default() });
}

#[tokio::test]
async fn defaults_come_from_the_checkpoint() {
    let server = TestServer::with(|options| {
        options.defaults = GenerationDefaults {
            temperature: 0.75,
            top_p: Some(0.5),
            top_k: Some(20),
            min_p: Some(0.25),
            repetition_penalty: Some(1.5),
            max_new_tokens: Some(12),
            ..GenerationDefaults::default()
        };
    });
    let request = request_of(&server, body_with(json!({}))).await;
    assert_eq!(request.max_tokens, 12);
    assert_eq!(request.sampling.temperature, 0.75);
    assert_eq!(request.sampling.top_p, 0.5);
    assert_eq!(request.sampling.top_k, 20);
    assert_eq!(request.sampling.min_p, 0.25);
    assert_eq!(request.sampling.repetition_penalty, 1.5);
    let said = json!({"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 20});
    let request = request_of(&server, body_with(said)).await;
    assert_eq!(request.max_tokens, 20);
    let seed = request.sampling.seed;
    assert_eq!(request.sampling, Sampling { seed, ..Sampling::default() });
    let (_, requests) = server.chat(chat_body_with(json!({}))).await;
    assert_eq!(requests[0].max_tokens, 12);
}

#[tokio::test]
async fn default_length_fits_the_cache() {
    let server = TestServer::new();
    let (_, requests) = server.chat(chat_body_with(json!({}))).await;
    assert_eq!(requests[0].max_tokens, 100 - requests[0].prompt.len());
    // 10 cache pages for 4 choices: 64 positions each.
    let (_, requests) = server.chat(chat_body_with(json!({"n": 4}))).await;
    assert_eq!(requests[0].max_tokens, 64 - requests[0].prompt.len());
    let long = request_of(&server, body_with(json!({"prompt": "a".repeat(90)}))).await;
    assert_eq!(long.max_tokens, 9);
}

#[tokio::test]
async fn seeds_have_64_bits() {
    let server = TestServer::new();
    let first = request_of(&server, body_with(json!({}))).await.sampling.seed;
    let second = request_of(&server, body_with(json!({}))).await.sampling.seed;
    assert_ne!(first, second);
    for (seed, expected) in [(json!(u64::MAX), u64::MAX), (json!(i64::MIN), 1 << 63), (json!(0), 0)] {
        assert_eq!(request_of(&server, body_with(json!({"seed": seed}))).await.sampling.seed, expected);
    }
    // A seed applies to each prompt; without one, equal prompts differ.
    let two = |extra: Value| body_with(super::merged(json!({"prompt": ["a", "a"]}), extra));
    let (_, requests) = server.complete(two(json!({"seed": 5}))).await;
    assert_eq!((requests[0].sampling.seed, requests[1].sampling.seed), (5, 5));
    let (_, requests) = server.complete(two(json!({}))).await;
    assert_ne!(requests[0].sampling.seed, requests[1].sampling.seed);
    server
        .post_raw("/v1/completions", r#"{"prompt": "a", "seed": 18446744073709551616}"#)
        .await
        .refuses("seed");
}

#[tokio::test]
async fn values_out_of_range_are_refused_by_name() {
    let server = TestServer::new();
    for (name, values) in [
        ("temperature", json!([-0.1, 2.1, 1e300, "hot", true, [1], {}])),
        ("top_p", json!([-0.1, 1.1, "x"])),
        ("min_p", json!([-0.1, 1.1, "x"])),
        ("top_k", json!([-2, 1.5, "x"])),
        ("repetition_penalty", json!([-1, 0, 101, "x"])),
        ("presence_penalty", json!([-2.1, 2.1, "x"])),
        ("frequency_penalty", json!([-2.1, 2.1, "x"])),
        ("n", json!([0, -1, 5, 1.5, "x", true])),
        ("seed", json!([1.5, "x", true])),
        ("max_tokens", json!([-1, 1.5, "x"])),
        ("max_completion_tokens", json!([-1, "x"])),
        ("min_tokens", json!([-1, 17, "x"])),
        ("ignore_eos", json!([1, "x"])),
        ("stop", json!([1, "", [""], vec!["x"; 33], "x".repeat(1025)])),
        ("stop_token_ids", json!([1, "x", vec![1; 1025]])),
        ("logit_bias", json!([1, [1], {"x": 1}, {"-1": 1}, {"1.5": 1}])),
        ("priority", json!([1, "urgent", "Interactive", ""])),
        ("queue_deadline", json!([1, "soon", "0s", "-1s", "5"])),
        ("stream", json!([1, "x"])),
        ("stream_options", json!([1, true, [true]])),
        ("echo", json!([1, "x"])),
        ("model", json!([1, ["org/tiny"]])),
        ("include_figures", json!([1, "x"])),
        ("return_token_ids", json!([1, "x"])),
        ("skip_special_tokens", json!([1, "x"])),
        ("add_special_tokens", json!([1])),
    ] {
        for value in values.as_array().unwrap() {
            server.post("/v1/completions", body_with(json!({ name: value }))).await.refuses(name);
            if name != "echo" && !(name == "min_tokens" && *value == 17) {
                server
                    .post("/v1/chat/completions", chat_body_with(json!({ name: value })))
                    .await
                    .refuses(name);
            }
        }
    }
    for (value, param) in [
        (json!({"logit_bias": {"7": 101}}), "logit_bias.7"),
        (json!({"logit_bias": {"7": -101}}), "logit_bias.7"),
        (json!({"logit_bias": {"257": 1}}), "logit_bias.257"),
        (json!({"logit_bias": {"7": "x"}}), "logit_bias.7"),
        (json!({"stop_token_ids": [1, 257]}), "stop_token_ids"),
        (json!({"stop_token_ids": [1, -1]}), "stop_token_ids[1]"),
        (json!({"stop": ["x", 1]}), "stop[1]"),
        (json!({"stream": true, "stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
        (
            json!({"stream": true, "stream_options": {"continuous_usage_stats": true}}),
            "stream_options.continuous_usage_stats",
        ),
        (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (json!({"stream": false, "stream_options": {}}), "stream_options"),
    ] {
        server.post("/v1/completions", body_with(value)).await.refuses(param);
    }
}

#[tokio::test]
async fn special_tokens_are_text_on_request() {
    let server = TestServer::new();
    for (extra, special) in [
        (json!({}), false),
        (json!({"skip_special_tokens": true}), false),
        (json!({"skip_special_tokens": null}), false),
        (json!({"skip_special_tokens": false}), true),
    ] {
        assert_eq!(request_of(&server, body_with(extra.clone())).await.special_text, special, "{extra}");
        let (_, requests) = server.chat(chat_body_with(extra)).await;
        assert_eq!(requests[0].special_text, special);
    }
    let body = body_with(json!({"prompt": [super::BOS, 104], "echo": true, "skip_special_tokens": false}));
    assert_eq!(server.complete(body).await.0.ok()["choices"][0]["text"], "<s>hok");
}

#[tokio::test]
async fn infinite_numbers_are_refused_by_name() {
    let server = TestServer::new();
    for number in ["NaN", "Infinity", "-Infinity", "1e999", "-", "01"] {
        for name in ["temperature", "top_p", "repetition_penalty", "n", "seed"] {
            let body = format!(r#"{{"model": "org/tiny", "prompt": "hi", "{name}": {number}}}"#);
            server.post_raw("/v1/completions", body).await.refuses(name);
        }
    }
}

#[tokio::test]
async fn bounds_of_ranges_are_accepted() {
    let server = TestServer::new();
    for value in [
        json!({"temperature": 2}),
        json!({"temperature": 0}),
        json!({"top_p": 0}),
        json!({"top_p": 1}),
        json!({"top_k": -1}),
        json!({"min_p": 1}),
        json!({"presence_penalty": -2}),
        json!({"n": 4}),
        json!({"frequency_penalty": 2}),
        json!({"repetition_penalty": 0.01}),
        json!({"min_tokens": 16}),
        json!({"logit_bias": {}}),
        json!({"stop": []}),
        json!({"stop_token_ids": []}),
        json!({"n": 1, "best_of": 1}),
    ] {
        server.complete(body_with(value)).await.0.ok();
    }
    assert_eq!(request_of(&server, body_with(json!({"top_k": -1}))).await.sampling.top_k, 0);
}

#[tokio::test]
async fn unsupported_fields_are_refused_by_name() {
    let server = TestServer::new();
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    for (name, value) in [("tools", tool), ("tool_choice", json!("auto")), ("tool_choice", json!("required"))]
    {
        server.post("/v1/completions", body_with(json!({ name: value }))).await.refuses(name);
    }
    for (name, value) in [
        ("functions", json!([{"name": "f"}])),
        ("function_call", json!("auto")),
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({"voice": "x", "format": "wav"})),
        ("best_of", json!(2)),
        ("best_of", json!(0)),
        ("web_search_options", json!({"x": 1})),
        ("use_beam_search", json!(true)),
        ("include_stop_str_in_output", json!(true)),
        ("truncate_prompt_tokens", json!(5)),
        ("allowed_token_ids", json!([1])),
        ("bad_words", json!(["x"])),
        ("prompt_embeds", json!("AAAA")),
        ("prompt_logprobs", json!(1)),
        ("chat_template", json!("x")),
        ("continue_final_message", json!(true)),
        ("documents", json!([{"text": "x"}])),
        ("reasoning_effort", json!("low")),
        ("reasoning_effort", json!("high")),
    ] {
        server.post("/v1/chat/completions", chat_body_with(json!({ name: value }))).await.refuses(name);
        server.post("/v1/completions", body_with(json!({ name: value }))).await.refuses(name);
    }
}

#[tokio::test]
async fn unsupported_fields_without_effect_are_accepted() {
    let server = TestServer::new();
    let harmless = json!({
        "tools": [], "functions": [], "tool_choice": "none", "function_call": "none",
        "response_format": {"type": "text"}, "modalities": ["text"], "audio": null, "suffix": "",
        "use_beam_search": false, "parallel_tool_calls": true, "reasoning_effort": "none",
        "metadata": {"a": "b"}, "store": false, "service_tier": "auto", "user": "u",
    });
    server.complete(body_with(harmless.clone())).await.0.ok();
    server.chat(chat_body_with(harmless)).await.0.ok();
}
