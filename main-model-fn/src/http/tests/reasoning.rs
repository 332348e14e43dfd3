//! Tests of thoughts: separated from answers, switched off, limited, and sent back in messages.

use super::families::{Templated, family, tokens};
use super::tools::server_with;
use super::{TestServer, chat_body_with, text_events};
use crate::engine::request::FinishReason;
use crate::grammar::tests::accepts_tokens;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// Like Qwen3: the model begins thoughts unless they are switched off.
pub(super) const SWITCHED: &str = "{% for message in messages %}<|{{ message.role }}|>{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}";
/// Like DeepSeek-R1: the prompt begins a thought.
const OPENED: &str = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}";

fn server(template: &str) -> TestServer {
    server_with(Templated::new(template, &[]), 0)
}

async fn prompt(server: &TestServer, extra: Value) -> String {
    let (reply, requests) = server
        .post_with_script(CHAT, chat_body_with(extra), |_| text_events(0, "x", FinishReason::Stop))
        .await;
    reply.ok();
    let bytes: Vec<u8> = requests[0].prompt.iter().map(|&id| u8::try_from(id).unwrap()).collect();
    String::from_utf8(bytes).unwrap()
}

#[tokio::test]
async fn thoughts_are_in_both_reasoning_fields() {
    for (template, text) in
        [(SWITCHED, "<think>\nHm.\n</think>\n\nHello"), (OPENED, "Hm.\n</think>\n\nHello")]
    {
        let server = server(template);
        let whole = |_: &_| text_events(0, text, FinishReason::Stop);
        let (reply, requests) = server.post_with_script(CHAT, chat_body_with(json!({})), whole).await;
        assert!(requests[0].grammar.is_none());
        let answer = reply.ok();
        let message = &answer["choices"][0]["message"];
        assert_eq!(
            [&message["content"], &message["reasoning_content"], &message["reasoning"]],
            [&json!("Hello"), &json!("Hm."), &json!("Hm.")]
        );
        let thought = text.split("\n\n").next().unwrap().len();
        assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], thought);

        let stream = chat_body_with(json!({"stream": true, "stream_options": {"include_usage": true}}));
        let (reply, _) = server.post_with_script(CHAT, stream, whole).await;
        let chunks = reply.chunks();
        for (field, expected) in [("content", "Hello"), ("reasoning_content", "Hm."), ("reasoning", "Hm.")] {
            let deltas = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
            let said: String = deltas.filter_map(|delta| delta[field].as_str()).collect();
            assert_eq!(said, expected, "{field}");
        }
        let usage = &chunks.last().unwrap()["usage"];
        assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], thought);
    }
}

#[tokio::test]
async fn template_variable_switches_reasoning() {
    let server = server(SWITCHED);
    let off = "<|user|>hi<|assistant|><think>\n\n</think>\n\n";
    let on = "<|user|>hi<|assistant|>";
    for (extra, expected) in [
        (json!({}), on),
        (json!({"reasoning_effort": "none"}), off),
        (json!({"reasoning_effort": "high"}), on),
        (json!({"reasoning": {"effort": "none"}}), off),
        (json!({"reasoning": {"enabled": false}}), off),
        (json!({"enable_thinking": false}), off),
        (json!({"enable_thinking": true}), on),
        (json!({"chat_template_kwargs": {"enable_thinking": false}}), off),
        (json!({"chat_template_kwargs": {}}), on),
    ] {
        assert_eq!(prompt(&server, extra.clone()).await, expected, "{extra}");
        let mut body = chat_body_with(extra);
        body.as_object_mut().unwrap().remove("max_tokens");
        let tokenized = server.post("/tokenize", body).await.ok();
        assert_eq!(tokenized["count"], expected.len());
    }
    // With thoughts switched off, an answer that begins like a thought is content.
    let text = "<think>a</think>b";
    let body = chat_body_with(json!({"enable_thinking": false}));
    let (reply, _) = server.post_with_script(CHAT, body, |_| text_events(0, text, FinishReason::Stop)).await;
    assert_eq!(reply.ok()["choices"][0]["message"]["content"], text);
}

#[tokio::test]
async fn options_without_template_support_are_refused_by_name() {
    for (template, extra, field) in [
        (SWITCHED, json!({"chat_template_kwargs": {"depth": 1}}), "chat_template_kwargs.depth"),
        (SWITCHED, json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs"),
        (SWITCHED, json!({"chat_template_kwargs": 1}), "chat_template_kwargs"),
        (
            SWITCHED,
            json!({"chat_template_kwargs": {"enable_thinking": "a".repeat(70_000)}}),
            "chat_template_kwargs",
        ),
        (SWITCHED, json!({"thinking_token_budget": 0}), "thinking_token_budget"),
        (SWITCHED, json!({"reasoning": {"effort": "much"}}), "reasoning.effort"),
        (OPENED, json!({"reasoning_effort": "none"}), "reasoning_effort"),
        (OPENED, json!({"enable_thinking": false}), "enable_thinking"),
        ("{{ messages[0].content }}", json!({"reasoning": {"max_tokens": 5}}), "reasoning.max_tokens"),
        ("{{ messages[0].content }}", json!({"reasoning_effort": "low"}), "reasoning_effort"),
    ] {
        server(template).post(CHAT, chat_body_with(extra)).await.refuses(field);
    }
    // A model without thoughts already has none.
    prompt(&server("{{ messages[0].content }}"), json!({"reasoning_effort": "none"})).await;
}

#[tokio::test]
async fn earlier_thoughts_are_read_from_both_fields() {
    let server = server(SWITCHED);
    for name in ["reasoning_content", "reasoning"] {
        let messages =
            json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "c"}]);
        let prompt = prompt(&server, json!({ "messages": messages })).await;
        assert_eq!(prompt, "<|user|>a<|assistant|><think>c</think>b<|assistant|>", "{name}");
    }
}

#[tokio::test]
async fn template_variables_default_to_the_deployments() {
    let server = TestServer::build(
        Some(std::sync::Arc::new(Templated::new(SWITCHED, &[]))),
        super::Engine::limits(),
        |options| {
            options.template_variables.insert("enable_thinking".to_owned(), false.into());
        },
    );
    assert!(prompt(&server, json!({})).await.ends_with("</think>\n\n"));
    assert!(prompt(&server, json!({"enable_thinking": true})).await.ends_with("<|assistant|>"));
}

#[tokio::test]
async fn structure_and_required_calls_apply_after_thoughts() {
    let json_object = json!({"response_format": {"type": "json_object"}});
    let call = family("hermes").first;
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let required = json!({"tools": [tool], "tool_choice": "required"});
    for special in [&[] as &'static [&str], &["<think>", "</think>"]] {
        for (extra, right) in [(&json_object, "{\"a\": 1}"), (&required, call)] {
            for (template, before, allowed) in [
                (SWITCHED, "", true),
                (SWITCHED, "<think>\nWell {1} <tool_call>.\n</think>\n\n", true),
                (OPENED, "Well {1} <tool_call>.\n</think>\n\n", true),
                (OPENED, "Well.</think>", true),
                (OPENED, "", false),
            ] {
                let server = server_with(Templated::new(template, special), special.len());
                let requests = server
                    .post_with_script(CHAT, chat_body_with(extra.clone()), |_| {
                        text_events(0, "x", FinishReason::Stop)
                    })
                    .await
                    .1;
                assert_eq!(requests[0].shown.len(), special.len());
                let grammar = requests[0].grammar.as_ref().unwrap();
                let accepts = |text: &str| accepts_tokens(grammar, &tokens(text, special));
                assert_eq!(accepts(&format!("{before}{right}")), allowed, "{special:?}: {before}{right}");
                assert!(!accepts(&format!("{before}Hello")), "{special:?}: {before}");
            }
        }
        let off = json!({"enable_thinking": false, "response_format": {"type": "json_object"}});
        let server = server_with(Templated::new(SWITCHED, special), special.len());
        let requests = server
            .post_with_script(CHAT, chat_body_with(off), |_| text_events(0, "x", FinishReason::Stop))
            .await
            .1;
        let grammar = requests[0].grammar.as_ref().unwrap();
        assert!(accepts_tokens(grammar, &tokens("{}", special)));
        assert!(!accepts_tokens(grammar, &tokens("<think>a</think>{}", special)));
    }
}

#[tokio::test]
async fn thought_budget_reaches_the_engine() {
    let harmony = family("harmony");
    let harmony = || Templated::of(harmony, true);
    let special: &'static [&str] = &["<think>", "</think>"];
    for (text, tokens, open, close, ids) in [
        (Templated::new(SWITCHED, special), 2, Some("<think>"), "</think>", Some(vec![258])),
        (Templated::new(SWITCHED, &[]), 0, Some("<think>"), "</think>", None),
        (Templated::new(OPENED, special), 2, None, "</think>", Some(vec![258])),
        (harmony(), 7, Some("<|channel|>analysis<|message|>"), "<|end|>", Some(vec![261])),
    ] {
        let server = server_with(text, tokens);
        for extra in [json!({"thinking_token_budget": 20}), json!({"reasoning": {"max_tokens": 20}})] {
            let requests = server
                .post_with_script(CHAT, chat_body_with(extra), |_| text_events(0, "x", FinishReason::Stop))
                .await
                .1;
            let budget = requests[0].thought_budget.clone().unwrap();
            let close_ids = ids.clone().unwrap_or_else(|| close.bytes().map(u32::from).collect());
            assert_eq!((budget.tokens, budget.open, budget.close), (20, open, close));
            assert_eq!(*budget.close_ids, close_ids);
        }
    }
    // With thoughts switched off, no budget is needed.
    let off = json!({"thinking_token_budget": 20, "enable_thinking": false});
    let server = server_with(Templated::new(SWITCHED, &[]), 0);
    let requests = server
        .post_with_script(CHAT, chat_body_with(off), |_| text_events(0, "x", FinishReason::Stop))
        .await
        .1;
    assert_eq!(requests[0].thought_budget, None);
}
