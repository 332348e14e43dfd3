//! Tools: from a request to the calls in its answer.

use super::families::{FAMILIES, Templated, ToolFamily, family, tokens};
use super::{BOS, Front, chat_with, say};
use crate::engine::request::FinishReason;
use crate::grammar::tests::{takes, takes_tokens};
use serde_json::{Value, json};
use std::sync::Arc;

const CHAT: &str = "/v1/chat/completions";

/// A front of `family`, its markers texts like any other.
pub(super) fn front(family: &ToolFamily) -> Front {
    front_with(Templated::of(family, false), 0)
}

/// A front of `text`, which has `special` tokens beside the usual ones.
pub(super) fn front_with(text: Templated, special: usize) -> Front {
    let limits = crate::engine::RequestLimits {
        context_length: 8000,
        cache_pages: 800,
        vocab_size: BOS as usize + 1 + special,
        ..super::Engine::limits()
    };
    Front::build(Some(Arc::new(text)), limits, |options| options.end_ids = vec![BOS])
}

fn tool(name: &str, extra: Value) -> Value {
    let parameters = json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]});
    let mut function = json!({"name": name, "description": "d", "parameters": parameters});
    function.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    json!({"type": "function", "function": function})
}

fn body(extra: Value) -> Value {
    let mut body =
        chat_with(json!({"max_tokens": 400, "tools": [tool("f", json!({})), tool("g", json!({}))]}));
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// The calls of an answer: name and arguments.
fn calls(message: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    calls.iter().map(|call| (text(&call["function"]["name"]), text(&call["function"]["arguments"]))).collect()
}

#[tokio::test]
async fn required_calls_are_bound_to_the_familys_format_and_read_back() {
    for family in &FAMILIES {
        let front = front(family);
        let (one, two) = (family.one(), family.two());
        let ask = async |extra: Value| {
            front.answered(CHAT, body(extra), |_| say(0, &two, FinishReason::Stop)).await
        };
        let (reply, asked) = ask(json!({"tool_choice": "required"})).await;
        let grammar = asked[0].grammar.clone().unwrap();
        assert!(takes(&grammar, &two), "{two}");
        for wrong in ["", "Hello", &one.replace('7', "true"), &one.replace('f', "h"), &format!("Hello {one}")]
        {
            assert!(!takes(&grammar, wrong), "{wrong}");
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
        let (_, asked) = ask(json!({ "tool_choice": named })).await;
        assert!(!takes(asked[0].grammar.as_ref().unwrap(), &one), "{}", family.name);
        if !family.second.is_empty() {
            let (_, asked) = ask(json!({"tool_choice": "required", "parallel_tool_calls": false})).await;
            let grammar = asked[0].grammar.as_ref().unwrap();
            assert!(takes(grammar, &one) && !takes(grammar, &two), "{}", family.name);
        }
    }
}

#[tokio::test]
async fn a_model_is_free_unless_a_function_is_strict() {
    for family in &FAMILIES {
        let front = front(family);
        let (_, asked) = front.answered(CHAT, body(json!({})), |_| say(0, "Hello", FinishReason::Stop)).await;
        assert!(asked[0].grammar.is_none(), "{}", family.name);
        let strict = json!({"tools": [tool("f", json!({"strict": true})), tool("g", json!({}))]});
        let (reply, asked) =
            front.answered(CHAT, body(strict), |_| say(0, "Hello", FinishReason::Stop)).await;
        assert_eq!(reply.ok()["choices"][0]["message"]["content"], "Hello");
        let grammar = asked[0].grammar.as_ref().unwrap();
        let two = family.two();
        let answer = if family.name == "harmony" { "<|channel|>final<|message|>Hello" } else { "Hello" };
        assert!(takes(grammar, answer) && takes(grammar, &two), "{two}");
        assert!(!takes(grammar, &two.replace('7', "true")), "{two}");
        assert!(takes(grammar, &two.replace('8', "true")), "{two}");
    }
    let hermes = family("hermes");
    let strict = json!({"tools": [tool("f", json!({"strict": true}))]});
    let (_, asked) = front(hermes).answered(CHAT, body(strict), |_| say(0, "x", FinishReason::Stop)).await;
    let grammar = asked[0].grammar.clone().unwrap();
    assert!(takes(&grammar, &format!("Well, 1 < 2:\n{}", hermes.first)));
    assert!(!takes(&grammar, "Well <tool_call>\nno"));
}

#[tokio::test]
async fn a_stream_has_openais_deltas() {
    let hermes = family("hermes");
    let front = front(hermes);
    let text = format!("I call.\n{}", hermes.two());
    let (reply, _) =
        front.answered(CHAT, body(json!({"stream": true})), |_| say(0, &text, FinishReason::Stop)).await;
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

/// Strict functions are called rightly, and without parallel calls there is at most one, be markers special tokens or
/// texts like any other.
#[tokio::test]
async fn calls_beside_text_are_constrained_on_request() {
    for family in &FAMILIES {
        for has_special in [false, true] {
            let special = if has_special { family.special } else { &[] };
            let front = front_with(Templated::of(family, has_special), special.len());
            let grammar = async |extra: Value| {
                let asked = front.answered(CHAT, body(extra), |_| say(0, "x", FinishReason::Stop)).await.1;
                asked[0].grammar.clone().unwrap()
            };
            let is_harmony = family.name == "harmony";
            // Llama's calls end an answer, all others have a beginning of their own.
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
                    assert!(takes_tokens(grammar, &tokens(text, special)), "{name} {special:?}: {text}");
                }
            }
            assert!(!takes_tokens(&strict, &tokens(&wrong, special)), "{special:?}: {wrong}");
            assert!(takes_tokens(&single, &tokens(&wrong, special)), "{special:?}: {wrong}");
            if !family.second.is_empty() {
                assert!(takes_tokens(&strict, &tokens(&two, special)), "{special:?}: {two}");
                assert!(!takes_tokens(&single, &tokens(&two, special)), "{special:?}: {two}");
            }
        }
    }
}

/// Arguments as far as they were written, or nothing: never a marker, in one piece or in a stream.
#[tokio::test]
async fn what_is_cut_off_says_so() {
    for family in &FAMILIES {
        let front = front(family);
        for choice in ["auto", "required"] {
            for (at, _) in family.first.char_indices() {
                let text = &family.first[..at];
                let ask = json!({"tool_choice": choice});
                let cut = |_: &_| say(0, text, FinishReason::Length);
                let (reply, _) = front.answered(CHAT, body(ask.clone()), cut).await;
                let whole = reply.ok()["choices"][0].clone();
                assert_eq!(whole["finish_reason"], "length");
                let called = calls(&whole["message"]);
                assert!(
                    called.iter().all(|(name, text)| name == "f" && "{\"x\": 7}".starts_with(text)),
                    "{text}"
                );
                let content = whole["message"]["content"].as_str().unwrap_or_default();
                // An object alone may be anything.
                let is_open = family.name == "llama" && choice == "auto";
                assert!(content.is_empty() || is_open, "{choice}, {text}: {content}");

                let mut ask = ask;
                ask["stream"] = true.into();
                let (reply, _) = front.answered(CHAT, body(ask), cut).await;
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
    // A stop text within arguments ends an answer, and no call.
    let hermes = family("hermes");
    let front = front(hermes);
    let text = hermes.first.split("7}").next().unwrap();
    let (reply, _) = front.answered(CHAT, body(json!({})), |_| say(0, text, FinishReason::Stop)).await;
    let choice = reply.ok()["choices"][0].clone();
    assert_eq!((&choice["finish_reason"], calls(&choice["message"]).len()), (&json!("stop"), 1));
}

/// gpt-oss's analysis is told apart from its answer, whether there are tools or not, and its answer alone has the form
/// that is asked for.
#[tokio::test]
async fn reasoning_is_no_content() {
    let harmony = family("harmony");
    let front = front_with(Templated::of(harmony, true), harmony.special.len());
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello";
    for extra in [json!({}), json!({"tools": [tool("f", json!({}))]})] {
        let (reply, asked) =
            front.answered(CHAT, chat_with(extra.clone()), |_| say(0, text, FinishReason::Stop)).await;
        assert_eq!(asked[0].shown.len(), harmony.special.len());
        assert!(asked[0].grammar.is_none());
        let message = reply.ok()["choices"][0]["message"].clone();
        assert_eq!((&message["content"], &message["reasoning_content"]), (&json!("Hello"), &json!("Hm.")));
        let mut extra = extra;
        extra["stream"] = true.into();
        let (reply, _) = front.answered(CHAT, chat_with(extra), |_| say(0, text, FinishReason::Stop)).await;
        let said = |field: &str| -> String {
            let chunks = reply.chunks();
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][field].as_str()).collect()
        };
        assert_eq!((said("content"), said("reasoning_content")), ("Hello".to_owned(), "Hm.".to_owned()));
    }
    let form = json!({"response_format": {"type": "json_object"}});
    let (_, asked) = front.answered(CHAT, chat_with(form), |_| say(0, text, FinishReason::Stop)).await;
    let grammar = asked[0].grammar.clone().unwrap();
    assert!(!takes_tokens(&grammar, &tokens(text, harmony.special)));
    assert!(takes_tokens(&grammar, &tokens(&text.replace("Hello", "{\"a\": 1}"), harmony.special)));
    for (form, right) in [
        (json!({"guided_regex": "a+/b"}), "aa/b"),
        (json!({"guided_choice": ["yes", "no"]}), "no"),
        (json!({"guided_grammar": "start: A B\nA: \"{\"\nB: /b+/"}), "{bb"),
    ] {
        let text = text.replace("Hello", right);
        let (reply, asked) =
            front.answered(CHAT, chat_with(form), |_| say(0, &text, FinishReason::Stop)).await;
        let grammar = asked[0].grammar.as_ref().unwrap();
        assert!(takes_tokens(grammar, &tokens(&text, harmony.special)), "{text}");
        assert!(!takes_tokens(grammar, &tokens(&text.replace(right, "x"), harmony.special)), "{text}");
        assert_eq!(reply.ok()["choices"][0]["message"]["content"], right);
    }
}

#[tokio::test]
async fn an_answer_of_a_form_or_calls() {
    let hermes = family("hermes");
    let front = front(hermes);
    let schema = json!({"type": "object", "properties": {"y": {"type": "boolean"}}, "required": ["y"]});
    let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
    let asked = async |extra: Value| {
        front.answered(CHAT, body(extra), |_| say(0, "x", FinishReason::Stop)).await.1.remove(0)
    };
    let request = asked(json!({"response_format": format})).await;
    let grammar = request.grammar.unwrap();
    assert!(takes(&grammar, "{\"y\": true}") && takes(&grammar, hermes.first));
    assert!(!takes(&grammar, "Hello") && !takes(&grammar, "{\"y\": 1}"));
    let none = asked(json!({"response_format": format, "tool_choice": "none"})).await.grammar.unwrap();
    assert!(takes(&none, "{\"y\": true}") && !takes(&none, hermes.first));
    let required = body(json!({"response_format": format, "tool_choice": "required"}));
    front.post(CHAT, required).await.refuses("response_format.json_schema.schema");
    let either = asked(json!({"guided_regex": "a+"})).await.grammar.unwrap();
    assert!(takes(&either, "aa") && takes(&either, hermes.first) && !takes(&either, "b"));
}

/// A front whose template knows no tools.
fn plain() -> Front {
    const TEMPLATE: &str = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    front_with(Templated::new(TEMPLATE, &[]), 0)
}

async fn prompt(front: &Front, body: Value) -> String {
    let (reply, asked) = front.answered(CHAT, body, |_| say(0, "x", FinishReason::Stop)).await;
    reply.ok();
    let bytes: Vec<u8> = asked[0].prompt.iter().map(|&id| u8::try_from(id).unwrap()).collect();
    String::from_utf8(bytes).unwrap()
}

#[tokio::test]
async fn the_template_shows_tools_or_the_first_message_does() {
    let called = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}},
        ]},
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": "two", "tool_call_id": "2"},
    ]);
    let hermes = front(family("hermes"));
    let shown = prompt(&hermes, body(json!({"messages": called}))).await;
    assert!(shown.starts_with("<|tools|>[{\"type\": \"function\""), "{shown}");
    assert!(shown.contains("<|observation|>one\n<|observation|>two\n"), "{shown}");

    let told = prompt(&plain(), body(json!({"messages": called}))).await;
    assert!(told.starts_with("[system]s\n\nYou may call functions"), "{told}");
    assert!(told.contains("\"name\":\"g\""), "{told}");
    assert!(
        told.ends_with(
            "[user]u[assistant]<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\":1}}\n</tool_call>[user]<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>[assistant]"
        ),
        "{told}"
    );
    for extra in [json!({"tool_choice": "none"}), json!({"tools": null})] {
        let mut extra = extra;
        extra["messages"] = called.clone();
        let without = prompt(&plain(), body(extra)).await;
        let told = told.split_once("[user]").unwrap().1;
        assert_eq!(without, format!("[system]s[user]{told}"));
    }
    let first = prompt(&plain(), body(json!({}))).await;
    assert!(first.starts_with("[system]You may call functions") && first.ends_with("[user]hi[assistant]"));
    let none = prompt(&hermes, body(json!({"tool_choice": "none"}))).await;
    assert_eq!(none, "<|user|>hi\n<|assistant|>");
}

#[tokio::test]
async fn what_is_wrong_with_tools_is_named() {
    let front = front(family("hermes"));
    let with = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    for (extra, param) in [
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0].type"),
        (json!({"tools": [1]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (with(json!({})), "tools[0].function.name"),
        (with(json!({"name": "a b"})), "tools[0].function.name"),
        (with(json!({"name": "f", "parameters": 1})), "tools[0].function.parameters"),
        (with(json!({"name": "f", "parameters": {"type": "array"}})), "tools[0].function.parameters"),
        (
            json!({"tools": [tool("f", json!({})), tool("g", json!({})), tool("f", json!({}))]}),
            "tools[2].function.name",
        ),
        (with(json!({"name": "f", "strict": 1})), "tools[0].function.strict"),
        (with(json!({"name": "f", "description": 1})), "tools[0].function.description"),
        (
            with(json!({"name": "f", "strict": true, "parameters": {"not": {}}})),
            "tools[0].function.parameters",
        ),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "function": {"name": "h"}}}), "tool_choice"),
        (json!({"tool_choice": {"type": "custom"}}), "tool_choice"),
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
        (json!({"tools": vec![tool("f", json!({})); 129]}), "tools"),
    ] {
        front.post(CHAT, body(extra)).await.refuses(param);
    }
    // What only the library finds, of the function that says it.
    let never = json!({"type": "object", "properties": {"x": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}});
    let tools = json!([tool("f", json!({})), tool("g", json!({"parameters": never}))]);
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "g"}})] {
        let extra = json!({"tools": tools, "tool_choice": choice});
        let reply = front.post(CHAT, body(extra)).await;
        reply.refuses("tools[1].function.parameters");
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with("`tools[1].function.parameters`: unsupported `oneOf`"), "{message}");
    }
    let flat = front.post(CHAT, body(json!({"tool_choice": {"type": "function", "name": "f"}}))).await;
    assert!(flat.error(400)["message"].as_str().unwrap().contains("missing `function.name`"));
    let free = with(json!({"name": "f", "parameters": {"not": {}}}));
    let (reply, _) = front.answered(CHAT, body(free), |_| say(0, "x", FinishReason::Stop)).await;
    reply.ok();
}
