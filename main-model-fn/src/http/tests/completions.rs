//! Tests of completions: prompts of all forms, echo, usage, figures.

use super::{
    BOS, Engine, TestServer, TextOverride, body_with, chat_body_with, failure, figures, text_events,
};
use crate::engine::request::{Event, Figures, FinishReason, Request};
use axum::body::Body;
use axum::http;
use remoe_plan::{PlanAccount, PlanDraft, Problem};
use remoe_planner::{Options, solve};
use serde_json::{Value, json};
use std::sync::Arc;

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn answer_has_openais_format() {
    let server = TestServer::new();
    let (reply, requests) = server.complete(body_with(json!({}))).await;
    assert_eq!(requests[0].prompt, [BOS, 104, 105]);
    let answer = reply.ok();
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    let mut expected = json!({
        "object": "text_completion",
        "model": "org/tiny",
        "choices": [{"index": 0, "text": "ok", "logprobs": null, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}},
    });
    expected["id"] = answer["id"].clone();
    expected["created"] = answer["created"].clone();
    assert_eq!(answer, expected);
}

#[tokio::test]
async fn prompts_of_every_form_are_accepted() {
    let server = TestServer::new();
    for (prompt, expected) in [
        (json!("ab"), vec![vec![BOS, 97, 98]]),
        (json!(["ab", "c"]), vec![vec![BOS, 97, 98], vec![BOS, 99]]),
        (json!([1, 2, 3]), vec![vec![1, 2, 3]]),
        (json!([[1, 2], [3]]), vec![vec![1, 2], vec![3]]),
        (json!(["a", [3]]), vec![vec![BOS, 97], vec![3]]),
        (json!(""), vec![vec![BOS]]),
    ] {
        let (reply, requests) = server.complete(body_with(json!({ "prompt": prompt }))).await;
        reply.ok();
        let prompts: Vec<Vec<u32>> = requests.into_iter().map(|request| request.prompt).collect();
        assert_eq!(prompts, expected);
    }
    let (_, requests) = server.complete(body_with(json!({"add_special_tokens": false}))).await;
    assert_eq!(requests[0].prompt, [104, 105]);
}

#[tokio::test]
async fn invalid_prompts_are_refused_by_name() {
    let server = TestServer::new();
    for (prompt, param) in [
        (json!(null), "prompt"),
        (json!(7), "prompt"),
        (json!({}), "prompt"),
        (json!([]), "prompt"),
        (json!([[]]), "prompt"),
        (json!([[1], []]), "prompt[1]"),
        (json!([1, "a"]), "prompt"),
        (json!([1, [2]]), "prompt"),
        (json!([1, -2]), "prompt[1]"),
        (json!([1.5]), "prompt[0]"),
        (json!([[1, -2]]), "prompt[0][1]"),
        (json!([4_294_967_296_u64]), "prompt[0]"),
        (json!([257]), "prompt"),
        (json!([[1], [257]]), "prompt[1]"),
        (json!([["a"]]), "prompt[0][0]"),
        (json!(["a", "b", "c", "d", "e", "f"]), "prompt"),
    ] {
        server.post(PATH, body_with(json!({ "prompt": prompt }))).await.refuses(param);
    }
    server.post(PATH, json!({"prompt": "", "add_special_tokens": false})).await.refuses("prompt");
}

#[tokio::test]
async fn choices_of_several_prompts_are_in_openais_order() {
    let server = TestServer::new();
    let body = body_with(json!({"prompt": [[1], [2]], "n": 2}));
    let (reply, _) = server
        .post_with_script(PATH, body, |request: &Request| {
            let name = |choice| format!("p{}c{choice}", request.prompt[0]);
            let mut events = text_events(1, &name(1), FinishReason::Stop);
            events.extend(text_events(0, &name(0), FinishReason::Stop));
            events
        })
        .await;
    let answer = reply.ok();
    let choices = answer["choices"].as_array().unwrap();
    let texts: Vec<&str> = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["p1c0", "p1c1", "p2c0", "p2c1"]);
    assert!((0..).zip(choices).all(|(index, choice)| choice["index"] == index));
    assert_eq!(
        answer["usage"],
        json!({"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}})
    );
}

#[tokio::test]
async fn echo_repeats_the_prompt() {
    let server = TestServer::new();
    for (prompt, text) in [(json!("hi"), "hiok"), (json!([104, 105]), "hiok"), (json!([BOS, 105]), "iok")] {
        let (reply, requests) = server.complete(body_with(json!({"prompt": prompt, "echo": true}))).await;
        assert_eq!(reply.ok()["choices"][0]["text"], text);
        assert_eq!(requests[0].prompt_logprobs, None);
    }
    let (reply, _) = server.complete(body_with(json!({"prompt": ["a", "b"], "echo": true}))).await;
    let answer = reply.ok();
    assert_eq!(answer["choices"][0]["text"], "aok");
    assert_eq!(answer["choices"][1]["text"], "bok");
}

#[tokio::test]
async fn zero_tokens_are_allowed_in_completions_only() {
    let server = TestServer::new();
    let nothing = |_: &Request| vec![Event::Finished { choice: 0, reason: FinishReason::Length }];
    let (reply, requests) =
        server.post_with_script(PATH, body_with(json!({"max_tokens": 0, "echo": true})), nothing).await;
    assert_eq!(requests[0].max_tokens, 0);
    assert_eq!(reply.ok()["choices"][0]["text"], "hi");
    assert_eq!(reply.json()["choices"][0]["finish_reason"], "length");
    let none = |request: &Request| {
        let mut events = nothing(request);
        events.push(Event::Done(Figures { completion_tokens: 0, ..super::figures(request) }));
        events
    };
    let (reply, _) = server.post_with_script(PATH, body_with(json!({"max_tokens": 0})), none).await;
    let answer = reply.ok();
    assert_eq!(answer["choices"][0]["text"], "");
    assert_eq!(
        answer["usage"],
        json!({"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}})
    );
    for name in ["max_tokens", "max_completion_tokens"] {
        let body = super::chat_body_with(json!({ name: 0 }));
        server.post("/v1/chat/completions", body).await.refuses(name);
    }
}

#[tokio::test]
async fn figures_are_compared_with_the_plan() {
    let server = TestServer::new();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/planning/");
    let problem = std::fs::read_to_string(format!("{fixtures}example-problem.json")).unwrap();
    let problem = Problem::from_json(&problem).unwrap();
    let answer = solve(&problem, None, &Options::default()).unwrap();
    let account = PlanAccount::new(problem, &PlanDraft::from(&answer.plan)).unwrap();
    server.account.send_replace(Some(Arc::new(account.clone())));
    let (reply, requests) = server.complete(body_with(json!({"include_figures": true}))).await;
    let plan = reply.ok()["usage"]["remoe"]["plan"].clone();
    // The test engine reports two tokens, so one decode step.
    let expected = account.expect(requests[0].prompt.len(), 1);
    assert_eq!(
        plan["expected"],
        json!({"ttft_s": expected.ttft_seconds, "tpot_s": expected.tpot_seconds, "cost": expected.cost})
    );
    assert_eq!((&plan["measured"]["ttft_s"], &plan["measured"]["tpot_s"]), (&json!(0.5), &json!(0.25)));
    assert!(plan["measured"]["cost"].as_f64().unwrap() > 0.0);
}

#[tokio::test]
async fn figures_are_included_on_request() {
    let server = TestServer::new();
    let (reply, _) = server.complete(body_with(json!({"include_figures": true}))).await;
    assert_eq!(
        reply.ok()["usage"]["remoe"],
        json!({
            "experts": {"local": 40, "remote": 30, "fallback": 2, "retries": 1},
            "ttft_s": 0.5, "prefill_s": 0.375, "decode_s": 0.25, "queued_s": 0.125,
            "expert_seconds": {
                "prefill": {"local": 0.05, "waited": 0.06, "remote": 0.12},
                "decode": {"local": 0.07, "waited": 0.08, "remote": 0.16},
            },
            "forwarded_positions": 9,
        })
    );
    let (reply, _) = server.complete(body_with(json!({"include_figures": true, "prompt": ["a", "b"]}))).await;
    let figures = reply.ok()["usage"]["remoe"].clone();
    assert_eq!(figures["experts"]["remote"], 60);
    assert_eq!(figures["forwarded_positions"], 18);
    assert_eq!(figures["ttft_s"], 0.5);
    let (reply, _) = server.complete(body_with(json!({}))).await;
    assert_eq!(reply.ok()["usage"].get("remoe"), None);
}

/// Returns the usage with figures of a request with `headers`, as text.
async fn usage_for(headers: &[(&str, &str)], stream: bool) -> String {
    let server = TestServer::new();
    let mut request = http::Request::post(PATH).header("content-type", "application/json");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = body_with(json!({"include_figures": true, "stream": stream}));
    let serve = server.engine.serve(|request| {
        let mut events = text_events(0, "ok", FinishReason::Stop);
        events.push(Event::Done(figures(request)));
        events
    });
    let reply = tokio::select! {
        reply = server.send(request.body(Body::from(body.to_string())).unwrap()) => reply,
        () = serve => unreachable!("the engine serves for ever"),
    };
    let (_, usage) = reply.text.rsplit_once("\"remoe\":").unwrap();
    usage.split_once("\n\n").map_or(usage, |(usage, _)| usage).to_owned()
}

#[tokio::test]
async fn cost_is_the_placeholder_of_the_gateway() {
    let (timing, rates) = (("x-remoe-timing", "load;dur=1"), ("x-remoe-rates", "main=3600000000000"));
    let long = "0".repeat(65);
    let placeholder = |text| ("x-remoe-cost-placeholder", text);
    for stream in [false, true] {
        let usage = usage_for(&[timing, rates, placeholder("0f")], stream).await;
        // As the gateway searches for it.
        assert!(usage.ends_with(r#","cost":"0f"}}}"#), "{usage}");
        for headers in
            [&[timing, rates][..], &[timing, placeholder("0f")], &[timing, rates, placeholder(&long)], &[]]
        {
            let usage = usage_for(headers, stream).await;
            assert!(!usage.contains("\"cost\":\""), "{usage}");
        }
    }
}

#[tokio::test]
async fn without_a_tokenizer_prompts_and_answers_are_ids() {
    let server = TestServer::build(None, Engine::limits(), |_| ());
    let (reply, _) = server.complete(body_with(json!({"prompt": [1, 2], "echo": true}))).await;
    let answer = reply.ok();
    assert_eq!(answer["choices"][0]["text"], Value::Null);
    assert_eq!(answer["choices"][0]["token_ids"], json!([111, 107]));
    server.post(PATH, body_with(json!({}))).await.refuses("prompt");
    server.post(PATH, body_with(json!({"prompt": [1, 2], "stop": "x"}))).await.refuses("stop");
}

#[tokio::test]
async fn token_ids_are_included_on_request() {
    let server = TestServer::new();
    let (reply, _) = server.complete(body_with(json!({"return_token_ids": true}))).await;
    assert_eq!(reply.ok()["choices"][0]["token_ids"], json!([111, 107]));
}

#[tokio::test]
async fn too_long_prompts_have_an_error_code() {
    let server = TestServer::new();
    for (extra, param) in [
        (json!({"max_tokens": 98}), json!("prompt")),
        (json!({"max_tokens": i64::MAX}), json!("prompt")),
        (json!({"prompt": "a".repeat(100)}), json!("prompt")),
        (json!({"max_tokens": 90, "n": 4}), json!("max_tokens")),
        (json!({"prompt": [vec![1; 3], vec![1; 200]]}), json!("prompt[1]")),
    ] {
        let error = server.post(PATH, body_with(extra)).await.error(400);
        assert_eq!(error["code"], "context_length_exceeded");
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(error["param"], param);
    }
    let long = json!({"messages": [{"role": "user", "content": "a".repeat(100)}]});
    let error = server.post("/v1/chat/completions", long).await.error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    assert_eq!(error["param"], "messages");
}

#[tokio::test]
async fn full_queue_returns_retry_after() {
    let server = TestServer::new();
    // Four prompts of this request wait; the queue has room for one of the next two.
    let waiting = server.post(PATH, body_with(json!({"prompt": ["a", "b", "c", "d"]})));
    let refused = async {
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(server.engine.next().await);
        }
        let reply = server.post(PATH, body_with(json!({"prompt": ["e", "f"]}))).await;
        let error = reply.error(429);
        assert_eq!(error["type"], "rate_limit_error");
        assert_eq!(error["code"], "rate_limit_exceeded");
        assert_eq!(reply.header("retry-after"), "1");
        // The place of that one was freed.
        let given_back = server.engine.next().await;
        assert!(given_back.events.is_closed());
    };
    tokio::select! {
        _ = waiting => unreachable!("no answer came"),
        () = refused => (),
    }
}

#[tokio::test]
async fn failures_of_the_engine_are_http_errors() {
    let server = TestServer::new();
    let (reply, _) = server.post_with_script(PATH, body_with(json!({})), |_| vec![failure()]).await;
    let error = reply.error(503);
    assert_eq!(error["code"], "service_unavailable");
    assert_eq!(error["type"], "overloaded_error");
    assert_eq!(reply.header("retry-after"), "1");
    // A dead engine sends no further events.
    let reply = tokio::select! {
        reply = server.post(PATH, body_with(json!({}))) => reply,
        () = async { drop(server.engine.next().await); std::future::pending().await } => unreachable!("pends"),
    };
    reply.error(503);
}

/// Tokenizer with the tokens of Qwen's coder models.
struct Coder;

impl TextOverride for Coder {
    fn special(&self) -> &[&str] {
        &["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"]
    }
}

#[tokio::test]
async fn suffix_becomes_a_fill_in_the_middle_prompt() {
    let server = TestServer::build(Some(Arc::new(Coder)), Engine::limits(), |_| ());
    let body = json!({"prompt": ["def f(", "a"], "suffix": "return 1", "stop_token_ids": [7]});
    let (reply, requests) = server.complete(body_with(body)).await;
    let answer = reply.ok();
    assert_eq!(answer["choices"][0]["text"], "ok", "the middle alone is answered");
    let prompts = requests.iter().map(|request| {
        let bytes: Vec<u8> = request.prompt.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
        String::from_utf8(bytes).unwrap()
    });
    let expected =
        ["def f(", "a"].map(|prefix| format!("<|fim_prefix|>{prefix}<|fim_suffix|>return 1<|fim_middle|>"));
    assert_eq!(prompts.collect::<Vec<_>>(), expected);
    assert_eq!(requests[0].prompt[0], BOS);
    // The client's stop tokens, the end of the text, and the format's tokens.
    assert_eq!(requests[0].stop.token_ids, [7, BOS + 4, BOS + 1, BOS + 2, BOS + 3]);
    let (_, requests) = server.complete(body_with(json!({"suffix": "x", "ignore_eos": true}))).await;
    assert!(requests[0].stop.token_ids.is_empty());
    // Unsupported in chats, with token ids and with an echo.
    server.post("/v1/chat/completions", chat_body_with(json!({"suffix": "x"}))).await.refuses("suffix");
    server.post(PATH, body_with(json!({"suffix": "x", "echo": true}))).await.refuses("echo");
    server.post(PATH, body_with(json!({"suffix": "x", "prompt": [1, 2]}))).await.refuses("prompt");
    server.post(PATH, body_with(json!({"suffix": 7}))).await.refuses("suffix");
}

#[tokio::test]
async fn suffix_is_refused_by_models_without_tokens_for_it() {
    for server in [TestServer::new(), TestServer::build(None, Engine::limits(), |_| ())] {
        let reply = server.post(PATH, body_with(json!({"prompt": "a", "suffix": "b"}))).await;
        reply.refuses("suffix");
    }
}
