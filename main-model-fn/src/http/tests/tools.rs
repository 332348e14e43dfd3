//! Tests of tools: from the request to the calls in its answer.

use super::families::{FAMILIES, Templated, ToolFamily, family, tokens};
use super::{BOS, TestServer, chat_body_with, text_events};
use crate::engine::request::FinishReason;
use crate::grammar::tests::{accepts, accepts_tokens};
use serde_json::{Value, json};
use std::sync::Arc;

const CHAT: &str = "/v1/chat/completions";

/// Creates a server of `family` whose markers are no special tokens.
pub(super) fn server(family: &ToolFamily) -> TestServer {
    server_with(Templated::of(family, false), 0)
}

/// Creates a server of `text`, which has `special` additional tokens.
pub(super) fn server_with(text: Templated, special: usize) -> TestServer {
    let limits = crate::engine::RequestLimits {
        context_length: 8000,
        cache_pages: 800,
        vocab_size: BOS as usize + 1 + special,
        ..super::Engine::limits()
    };
    TestServer::build(Some(Arc::new(text)), limits, |options| options.end_ids = vec![BOS])
}

fn tool(name: &str, extra: Value) -> Value {
    let parameters = json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]});
    let mut function = json!({"name": name, "description": "d", "parameters": parameters});
    function.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    json!({"type": "function", "function": function})
}

fn body(extra: Value) -> Value {
    let mut body =
        chat_body_with(json!({"max_tokens": 400, "tools": [tool("f", json!({})), tool("g", json!({}))]}));
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Returns the calls of an answer: name and arguments.
fn calls(message: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    calls.iter().map(|call| (text(&call["function"]["name"]), text(&call["function"]["arguments"]))).collect()
}

#[tokio::test]
async fn required_calls_have_the_familys_format() {
    for family in &FAMILIES {
        let server = server(family);
        let (one, two) = (family.one(), family.two());
        let ask = async |extra: Value| {
            server.post_with_script(CHAT, body(extra), |_| text_events(0, &two, FinishReason::Stop)).await
        };
        let (reply, requests) = ask(json!({"tool_choice": "required"})).await;
        let grammar = requests[0].grammar.clone().unwrap();
        assert!(accepts(&grammar, &two), "{two}");
        for wrong in ["", "Hello", &one.replace('7', "true"), &one.replace('f', "h"), &format!("Hello {one}")]
        {
            assert!(!accepts(&grammar, wrong), "{wrong}");
        }
        let choice = reply.ok()["choices"][0].clone();
        assert_eq!(choice["finish_reason"], "tool_calls", "{}", family.name);
        assert_eq!(choice["message"]["content"], Value::Null, "{}", family.name);
        let mut expected = vec![("f".to_owned(), "{\"x\": 7}".to_owned())];
        if !family.second.is_empty() {
            expected.push(("g".to_owned(), "{\"x\": 8}".to_owned()));
        }
        assert_eq!(calls(&choice["message"]), expected, "{}", family.name);

        let named = json!({"type": "function", "function": {"name": "g"}});
        let (_, requests) = ask(json!({ "tool_choice": named })).await;
        assert!(!accepts(requests[0].grammar.as_ref().unwrap(), &one), "{}", family.name);
        if !family.second.is_empty() {
            let (_, requests) = ask(json!({"tool_choice": "required", "parallel_tool_calls": false})).await;
            let grammar = requests[0].grammar.as_ref().unwrap();
            assert!(accepts(grammar, &one) && !accepts(grammar, &two), "{}", family.name);
        }
    }
}

#[tokio::test]
async fn calls_are_constrained_only_for_strict_functions() {
    for family in &FAMILIES {
        let server = server(family);
        let (_, requests) = server
            .post_with_script(CHAT, body(json!({})), |_| text_events(0, "Hello", FinishReason::Stop))
            .await;
        assert!(requests[0].grammar.is_none(), "{}", family.name);
        let strict = json!({"tools": [tool("f", json!({"strict": true})), tool("g", json!({}))]});
        let (reply, requests) = server
            .post_with_script(CHAT, body(strict), |_| text_events(0, "Hello", FinishReason::Stop))
            .await;
        assert_eq!(reply.ok()["choices"][0]["message"]["content"], "Hello");
        let grammar = requests[0].grammar.as_ref().unwrap();
        let two = family.two();
        let answer = if family.name == "harmony" { "<|channel|>final<|message|>Hello" } else { "Hello" };
        assert!(accepts(grammar, answer) && accepts(grammar, &two), "{two}");
        assert!(!accepts(grammar, &two.replace('7', "true")), "{two}");
        assert!(accepts(grammar, &two.replace('8', "true")), "{two}");
    }
    let hermes = family("hermes");
    let strict = json!({"tools": [tool("f", json!({"strict": true}))]});
    let (_, requests) = server(hermes)
        .post_with_script(CHAT, body(strict), |_| text_events(0, "x", FinishReason::Stop))
        .await;
    let grammar = requests[0].grammar.clone().unwrap();
    assert!(accepts(&grammar, &format!("Well, 1 < 2:\n{}", hermes.first)));
    assert!(!accepts(&grammar, "Well <tool_call>\nno"));
}

#[tokio::test]
async fn stream_has_openais_deltas() {
    let hermes = family("hermes");
    let server = server(hermes);
    let text = format!("I call.\n{}", hermes.two());
    let (reply, _) = server
        .post_with_script(CHAT, body(json!({"stream": true})), |_| text_events(0, &text, FinishReason::Stop))
        .await;
    let chunks = reply.chunks();
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    assert_eq!(deltas[0], &json!({"role": "assistant"}));
    let content: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    assert_eq!(content, "I call.");
    let parts: Vec<&Value> =
        deltas.iter().filter_map(|delta| delta["tool_calls"].as_array()).flatten().collect();
    let begun: Vec<&&Value> = parts.iter().filter(|part| part.get("id").is_some()).collect();
    assert_eq!(begun.len(), 2);
    for (index, (part, name)) in begun.iter().zip(["f", "g"]).enumerate() {
        assert!(part["id"].as_str().unwrap().starts_with("call_"));
        assert_eq!((&part["index"], &part["type"]), (&json!(index), &json!("function")));
        assert_eq!(part["function"]["name"], name);
        let arguments: String = parts
            .iter()
            .filter(|part| part["index"] == index)
            .map(|part| part["function"]["arguments"].as_str().unwrap())
            .collect();
        assert_eq!(arguments, format!("{{\"x\": {}}}", index + 7));
    }
    assert!(parts.len() > 10, "arguments come as they are written");
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(deltas.last().unwrap(), &&json!({}));
}

/// Calls of strict functions are valid, and there is at most one without parallel calls, whether markers are special
/// tokens or not.
#[tokio::test]
async fn optional_calls_are_constrained_on_request() {
    for family in &FAMILIES {
        for has_special in [false, true] {
            let special = if has_special { family.special } else { &[] };
            let server = server_with(Templated::of(family, has_special), special.len());
            let grammar = async |extra: Value| {
                let requests = server
                    .post_with_script(CHAT, body(extra), |_| text_events(0, "x", FinishReason::Stop))
                    .await
                    .1;
                requests[0].grammar.clone().unwrap()
            };
            let is_harmony = family.name == "harmony";
            // Llama's calls end an answer; all others have a marker.
            let text = match family.name {
                "harmony" => "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
                "llama" => "",
                _ => "Well, 1 < 2 [sic]: ",
            };
            let one = format!("{text}{}", family.one());
            let two = format!("{text}{}", family.two());
            let wrong = one.replace('7', "true");
            let answer = if is_harmony { "<|channel|>final<|message|>Hello" } else { "Hello" };

            let strict =
                grammar(json!({"tools": [tool("f", json!({"strict": true})), tool("g", json!({}))]})).await;
            let single = grammar(json!({"parallel_tool_calls": false})).await;
            for (name, grammar) in [("strict", &strict), ("single", &single)] {
                for text in [answer, &one] {
                    assert!(accepts_tokens(grammar, &tokens(text, special)), "{name} {special:?}: {text}");
                }
            }
            assert!(!accepts_tokens(&strict, &tokens(&wrong, special)), "{special:?}: {wrong}");
            assert!(accepts_tokens(&single, &tokens(&wrong, special)), "{special:?}: {wrong}");
            if !family.second.is_empty() {
                assert!(accepts_tokens(&strict, &tokens(&two, special)), "{special:?}: {two}");
                assert!(!accepts_tokens(&single, &tokens(&two, special)), "{special:?}: {two}");
            }
        }
    }
}

/// A cut-off answer has the arguments so far, or no call, but never a marker, with and without streaming.
#[tokio::test]
async fn cut_off_calls_end_with_length() {
    for family in &FAMILIES {
        let server = server(family);
        for choice in ["auto", "required"] {
            for (at, _) in family.first.char_indices() {
                let text = &family.first[..at];
                let ask = json!({"tool_choice": choice});
                let cut = |_: &_| text_events(0, text, FinishReason::Length);
                let (reply, _) = server.post_with_script(CHAT, body(ask.clone()), cut).await;
                let whole = reply.ok()["choices"][0].clone();
                assert_eq!(whole["finish_reason"], "length");
                let called = calls(&whole["message"]);
                assert!(
                    called.iter().all(|(name, text)| name == "f" && "{\"x\": 7}".starts_with(text)),
                    "{text}"
                );
                let content = whole["message"]["content"].as_str().unwrap_or_default();
                // An object without a marker may also be content.
                let is_open = family.name == "llama" && choice == "auto";
                assert!(content.is_empty() || is_open, "{choice}, {text}: {content}");

                let mut ask = ask;
                ask["stream"] = true.into();
                let (reply, _) = server.post_with_script(CHAT, body(ask), cut).await;
                let chunks = reply.chunks();
                let said = |field: &str| -> String {
                    let deltas = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
                    deltas.filter_map(|delta| delta[field].as_str()).collect()
                };
                assert_eq!(said("content"), content, "{text}");
                let parts =
                    chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array());
                let arguments: String =
                    parts.flatten().filter_map(|part| part["function"]["arguments"].as_str()).collect();
                assert_eq!(arguments, called.iter().map(|(_, text)| text.as_str()).collect::<String>());
                assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
            }
        }
    }
    // A stop text in arguments ends the answer, but does not complete the call.
    let hermes = family("hermes");
    let server = server(hermes);
    let text = hermes.first.split("7}").next().unwrap();
    let (reply, _) =
        server.post_with_script(CHAT, body(json!({})), |_| text_events(0, text, FinishReason::Stop)).await;
    let choice = reply.ok()["choices"][0].clone();
    assert_eq!((&choice["finish_reason"], calls(&choice["message"]).len()), (&json!("stop"), 1));
}

/// gpt-oss's analysis is separate from its answer, with and without tools, and only the answer has the requested
/// structure.
#[tokio::test]
async fn reasoning_is_separate_from_content() {
    let harmony = family("harmony");
    let server = server_with(Templated::of(harmony, true), harmony.special.len());
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello";
    for extra in [json!({}), json!({"tools": [tool("f", json!({}))]})] {
        let (reply, requests) = server
            .post_with_script(CHAT, chat_body_with(extra.clone()), |_| {
                text_events(0, text, FinishReason::Stop)
            })
            .await;
        assert_eq!(requests[0].shown.len(), harmony.special.len());
        assert!(requests[0].grammar.is_none());
        let message = reply.ok()["choices"][0]["message"].clone();
        assert_eq!((&message["content"], &message["reasoning_content"]), (&json!("Hello"), &json!("Hm.")));
        let mut extra = extra;
        extra["stream"] = true.into();
        let (reply, _) = server
            .post_with_script(CHAT, chat_body_with(extra), |_| text_events(0, text, FinishReason::Stop))
            .await;
        let said = |field: &str| -> String {
            let chunks = reply.chunks();
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][field].as_str()).collect()
        };
        assert_eq!((said("content"), said("reasoning_content")), ("Hello".to_owned(), "Hm.".to_owned()));
    }
    let form = json!({"response_format": {"type": "json_object"}});
    let (_, requests) = server
        .post_with_script(CHAT, chat_body_with(form), |_| text_events(0, text, FinishReason::Stop))
        .await;
    let grammar = requests[0].grammar.clone().unwrap();
    assert!(!accepts_tokens(&grammar, &tokens(text, harmony.special)));
    assert!(accepts_tokens(&grammar, &tokens(&text.replace("Hello", "{\"a\": 1}"), harmony.special)));
    for (form, right) in [
        (json!({"guided_regex": "a+/b"}), "aa/b"),
        (json!({"guided_choice": ["yes", "no"]}), "no"),
        (json!({"guided_grammar": "start: A B\nA: \"{\"\nB: /b+/"}), "{bb"),
    ] {
        let text = text.replace("Hello", right);
        let (reply, requests) = server
            .post_with_script(CHAT, chat_body_with(form), |_| text_events(0, &text, FinishReason::Stop))
            .await;
        let grammar = requests[0].grammar.as_ref().unwrap();
        assert!(accepts_tokens(grammar, &tokens(&text, harmony.special)), "{text}");
        assert!(!accepts_tokens(grammar, &tokens(&text.replace(right, "x"), harmony.special)), "{text}");
        assert_eq!(reply.ok()["choices"][0]["message"]["content"], right);
    }
}

#[tokio::test]
async fn answer_has_a_structure_or_calls() {
    let hermes = family("hermes");
    let server = server(hermes);
    let schema = json!({"type": "object", "properties": {"y": {"type": "boolean"}}, "required": ["y"]});
    let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
    let requests = async |extra: Value| {
        server
            .post_with_script(CHAT, body(extra), |_| text_events(0, "x", FinishReason::Stop))
            .await
            .1
            .remove(0)
    };
    let request = requests(json!({"response_format": format})).await;
    let grammar = request.grammar.unwrap();
    assert!(accepts(&grammar, "{\"y\": true}") && accepts(&grammar, hermes.first));
    assert!(!accepts(&grammar, "Hello") && !accepts(&grammar, "{\"y\": 1}"));
    let none = requests(json!({"response_format": format, "tool_choice": "none"})).await.grammar.unwrap();
    assert!(accepts(&none, "{\"y\": true}") && !accepts(&none, hermes.first));
    let required = body(json!({"response_format": format, "tool_choice": "required"}));
    server.post(CHAT, required).await.refuses("response_format.json_schema.schema");
    let either = requests(json!({"guided_regex": "a+"})).await.grammar.unwrap();
    assert!(accepts(&either, "aa") && accepts(&either, hermes.first) && !accepts(&either, "b"));
}

/// Creates a server whose template does not write tools.
fn plain() -> TestServer {
    const TEMPLATE: &str = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    server_with(Templated::new(TEMPLATE, &[]), 0)
}

async fn prompt(server: &TestServer, body: Value) -> String {
    let (reply, requests) =
        server.post_with_script(CHAT, body, |_| text_events(0, "x", FinishReason::Stop)).await;
    reply.ok();
    let bytes: Vec<u8> = requests[0].prompt.iter().map(|&id| u8::try_from(id).unwrap()).collect();
    String::from_utf8(bytes).unwrap()
}

#[tokio::test]
async fn template_or_first_message_contains_tools() {
    let called = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}},
        ]},
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": "two", "tool_call_id": "2"},
    ]);
    let hermes = server(family("hermes"));
    let shown = prompt(&hermes, body(json!({"messages": called}))).await;
    assert!(shown.starts_with("<|tools|>[{\"type\": \"function\""), "{shown}");
    assert!(shown.contains("<|observation|>one\n<|observation|>two\n"), "{shown}");

    let described = prompt(&plain(), body(json!({"messages": called}))).await;
    assert!(described.starts_with("[system]s\n\nYou may call functions"), "{described}");
    assert!(described.contains("\"name\":\"g\""), "{described}");
    assert!(
        described.ends_with(
            "[user]u[assistant]<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\":1}}\n</tool_call>[user]<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>[assistant]"
        ),
        "{described}"
    );
    for extra in [json!({"tool_choice": "none"}), json!({"tools": null})] {
        let mut extra = extra;
        extra["messages"] = called.clone();
        let without = prompt(&plain(), body(extra)).await;
        let described = described.split_once("[user]").unwrap().1;
        assert_eq!(without, format!("[system]s[user]{described}"));
    }
    let first = prompt(&plain(), body(json!({}))).await;
    assert!(first.starts_with("[system]You may call functions") && first.ends_with("[user]hi[assistant]"));
    let none = prompt(&hermes, body(json!({"tool_choice": "none"}))).await;
    assert_eq!(none, "<|user|>hi\n<|assistant|>");
}

#[tokio::test]
async fn invalid_tools_are_refused_by_name() {
    let server = server(family("hermes"));
    let body_with = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    for (extra, param) in [
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0].type"),
        (json!({"tools": [1]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (body_with(json!({})), "tools[0].function.name"),
        (body_with(json!({"name": "a b"})), "tools[0].function.name"),
        (body_with(json!({"name": "f", "parameters": 1})), "tools[0].function.parameters"),
        (body_with(json!({"name": "f", "parameters": {"type": "array"}})), "tools[0].function.parameters"),
        (
            json!({"tools": [tool("f", json!({})), tool("g", json!({})), tool("f", json!({}))]}),
            "tools[2].function.name",
        ),
        (body_with(json!({"name": "f", "strict": 1})), "tools[0].function.strict"),
        (body_with(json!({"name": "f", "description": 1})), "tools[0].function.description"),
        (
            body_with(json!({"name": "f", "strict": true, "parameters": {"not": {}}})),
            "tools[0].function.parameters",
        ),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "function": {"name": "h"}}}), "tool_choice"),
        (json!({"tool_choice": {"type": "custom"}}), "tool_choice"),
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
        (json!({"tools": vec![tool("f", json!({})); 129]}), "tools"),
    ] {
        server.post(CHAT, body(extra)).await.refuses(param);
    }
    // Faults that the library finds are reported for the function.
    let never = json!({"type": "object", "properties": {"x": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}});
    let tools = json!([tool("f", json!({})), tool("g", json!({"parameters": never}))]);
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "g"}})] {
        let extra = json!({"tools": tools, "tool_choice": choice});
        let reply = server.post(CHAT, body(extra)).await;
        reply.refuses("tools[1].function.parameters");
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with("`tools[1].function.parameters`: unsupported `oneOf`"), "{message}");
    }
    let flat = server.post(CHAT, body(json!({"tool_choice": {"type": "function", "name": "f"}}))).await;
    assert!(flat.error(400)["message"].as_str().unwrap().contains("missing `function.name`"));
    let free = body_with(json!({"name": "f", "parameters": {"not": {}}}));
    let (reply, _) =
        server.post_with_script(CHAT, body(free), |_| text_events(0, "x", FinishReason::Stop)).await;
    reply.ok();
}
