//! Forms that answers must match: read, compiled beside everything else, and given to the engine.

use super::{BOS, Bytes, Front, TextFrontend, TextOverride, chat_with, figures, say, with};
use crate::engine::RequestLimits;
use crate::engine::request::{Event, FinishReason};
use crate::grammar::tests::takes;
use remoe_proto::ServiceError;
use serde_json::{Value, json};
use std::sync::{Arc, Condvar, Mutex};

fn schema() -> Value {
    json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
}

/// A context that has room for tools.
fn front() -> Front {
    let vocab_size = BOS as usize + 1;
    let limits =
        RequestLimits { context_length: 4000, cache_pages: 400, vocab_size, ..super::Engine::limits() };
    Front::build(Some(Arc::new(Bytes)), limits, |options| options.end_ids = vec![BOS])
}

#[tokio::test]
async fn every_way_to_ask_reaches_the_engine() {
    let front = Front::new();
    let named = json!({"name": "s", "strict": true, "schema": schema()});
    for body in [
        json!({"response_format": {"type": "json_object"}}),
        json!({"response_format": {"type": "json_schema", "json_schema": named}}),
        json!({"structured_outputs": {"json": schema()}}),
        json!({"structured_outputs": {"json": schema().to_string(), "disable_any_whitespace": true}}),
        json!({"structured_outputs": {"json_object": true}}),
        json!({"structured_outputs": {"regex": "a+"}}),
        json!({"structured_outputs": {"choice": ["a", "b"]}}),
        json!({"structured_outputs": {"grammar": "start: \"a\""}}),
        json!({"guided_json": schema()}),
        json!({"guided_json": schema().to_string()}),
        json!({"guided_regex": "a+"}),
        json!({"guided_choice": ["a", "b"]}),
        json!({"guided_grammar": "start: \"a\""}),
    ] {
        for (reply, asked) in
            [front.chat(chat_with(body.clone())).await, front.complete(with(body.clone())).await]
        {
            reply.ok();
            assert!(asked[0].grammar.is_some(), "{body}");
        }
    }
    for body in [json!({}), json!({"response_format": {"type": "text"}}), json!({"guided_json": null})] {
        assert_eq!(front.chat(chat_with(body)).await.1[0].grammar, None);
    }
}

#[tokio::test]
async fn equal_schemas_are_compiled_once_and_all_prompts_share_one() {
    let front = Front::new();
    let body = json!({"prompt": ["a", "b"], "guided_json": schema()});
    let (_, first) = front.complete(with(body.clone())).await;
    let (_, second) = front.complete(with(body)).await;
    assert_eq!(first[0].grammar, first[1].grammar);
    assert_eq!(first[0].grammar, second[0].grammar);
    let (_, other) = front.complete(with(json!({"guided_regex": "x"}))).await;
    assert_ne!(first[0].grammar, other[0].grammar);
}

#[tokio::test]
async fn what_cannot_be_done_is_refused_by_name() {
    let front = Front::new();
    const SCHEMA: &str = "response_format.json_schema.schema";
    let format = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}});
    for (body, param) in [
        (json!({"response_format": {}}), "response_format.type"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), SCHEMA),
        (format(json!({"not": {}})), SCHEMA),
        (format(json!({"oneOf": [{"minimum": 1}, {"maximum": 3}]})), SCHEMA),
        (format(json!({"type": "integer", "minimum": 2, "maximum": 1})), SCHEMA),
        (format(json!(3)), SCHEMA),
        (json!({"guided_json": "{"}), "guided_json"),
        (json!({"guided_regex": "("}), "guided_regex"),
        (json!({"guided_regex": ""}), "guided_regex"),
        (json!({"guided_choice": []}), "guided_choice"),
        (json!({"guided_grammar": "x"}), "guided_grammar"),
        (json!({"guided_regex": "a", "guided_json": {}}), "guided_regex"),
        (json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}), "structured_outputs.choice"),
        (json!({"structured_outputs": {"structural_tag": "x"}}), "structured_outputs.structural_tag"),
        (json!({"structured_outputs": {"whitespace_pattern": "x"}}), "structured_outputs.whitespace_pattern"),
        (
            json!({"structured_outputs": {"whitespace_pattern": " ", "disable_any_whitespace": true}}),
            "structured_outputs.whitespace_pattern",
        ),
        (json!({"guided_whitespace_pattern": "\\S"}), "guided_whitespace_pattern"),
        (
            json!({"structured_outputs": {"whitespace_pattern": " "}, "guided_whitespace_pattern": " "}),
            "structured_outputs.whitespace_pattern",
        ),
    ] {
        front.post("/v1/chat/completions", chat_with(body.clone())).await.refuses(param);
        front.post("/v1/completions", with(body)).await.refuses(param);
    }
    let without_text = Front::build(None, super::Engine::limits(), |_| ());
    let ids = json!({"prompt": [1], "guided_regex": "a"});
    without_text.post("/v1/completions", ids).await.refuses("guided_regex");
}

#[tokio::test]
async fn a_schema_cannot_become_large_in_memory() {
    let front = Front::new();
    let values = vec!["[]"; 70_000].join(",");
    let body = format!(r#"{{"prompt": "hi", "guided_json": {{"enum": [{values}]}}}}"#);
    let error = front.post_raw("/v1/completions", body).await.error(400);
    assert!(error["message"].as_str().unwrap().contains("values"), "{error}");
}

/// Tokens of bytes that are withheld before `open` is true.
struct WithheldTokens {
    open: Mutex<bool>,
    opened: Condvar,
}

impl TextOverride for WithheldTokens {
    fn token_bytes(&self, id: u32) -> Result<Vec<u8>, ServiceError> {
        let open = self.open.lock().unwrap();
        drop(self.opened.wait_while(open, |open| !*open).unwrap());
        Bytes.token_bytes(id)
    }
}

/// While a grammar is being compiled, which does not end before this test says so, others are answered from
/// their first token to their last, and the engine does not know of the request.
#[tokio::test]
async fn request_waits_for_no_other_grammar() {
    let held = Arc::new(WithheldTokens { open: Mutex::new(false), opened: Condvar::new() });
    let front = Front::build(Some(held.clone()), super::Engine::limits(), |_| ());
    let others = async {
        for _ in 0..3 {
            let body = chat_with(json!({"stream": true}));
            let (reply, asked) =
                front.answered("/v1/chat/completions", body, |_| say(0, "ok", FinishReason::Stop)).await;
            assert_eq!(reply.chunks().len(), 4);
            assert!(asked.iter().all(|request| request.grammar.is_none()));
        }
        *held.open.lock().unwrap() = true;
        held.opened.notify_all();
        let asked = front.engine.next().await;
        assert!(asked.request.grammar.is_some());
        for event in say(0, "a", FinishReason::Stop) {
            asked.events.try_send(event).unwrap();
        }
        asked.events.try_send(Event::Done(figures(&asked.request))).unwrap();
    };
    let (reply, ()) = tokio::join!(front.post("/v1/completions", with(json!({"guided_regex": "a"}))), others);
    assert_eq!(reply.ok()["choices"][0]["text"], "a");
}

#[tokio::test]
async fn whitespace_options_reach_every_form_of_json() {
    let front = front();
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": schema()}});
    let named = json!({"type": "json_schema", "json_schema": {"schema": schema()}});
    for (body, before, after) in [
        (json!({"response_format": {"type": "json_object"}}), "", ""),
        (json!({"response_format": named}), "", ""),
        (json!({"guided_json": schema()}), "", ""),
        (json!({"structured_outputs": {"json": schema()}}), "", ""),
        (
            json!({"tools": [tool], "tool_choice": "required"}),
            "<tool_call>\n{\"name\": \"f\", \"arguments\": ",
            "}\n</tool_call>",
        ),
    ] {
        for (options, taken, refused) in [
            (json!({}), "{\n  \"a\": 1\n}", "{  \"a\": 1}"),
            (json!({"disable_any_whitespace": true}), "{\"a\":1}", "{\"a\": 1}"),
            (json!({"whitespace_pattern": "[ ]{0,3}"}), "{   \"a\":1}", "{\n\"a\":1}"),
        ] {
            let mut body = body.clone();
            for (name, value) in options.as_object().unwrap() {
                body["structured_outputs"][name] = value.clone();
            }
            let (reply, asked) = front.chat(chat_with(body.clone())).await;
            reply.ok();
            let grammar = asked[0].grammar.as_ref().unwrap();
            assert!(takes(grammar, &format!("{before}{taken}{after}")), "{body}");
            assert!(!takes(grammar, &format!("{before}{refused}{after}")), "{body}");
        }
    }
}

#[tokio::test]
async fn answers_warn_of_what_is_not_enforced() {
    let front = front();
    let loose = json!({"type": "object", "properties": {"a": {"type": "string", "format": "iban"}}});
    let format = json!({"type": "json_schema", "json_schema": {"schema": loose}});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": loose}});
    const IBAN: &str = "at /properties/a: unknown format \"iban\" is not enforced";
    for (body, warning) in [
        (json!({}), None),
        (json!({"guided_json": schema()}), None),
        (json!({"tools": [tool]}), None),
        (json!({"guided_json": loose}), Some(format!("guided_json {IBAN}"))),
        (json!({"response_format": format}), Some(format!("response_format.json_schema.schema {IBAN}"))),
        (
            json!({"tools": [tool], "tool_choice": "required"}),
            Some(format!("tools[0].function.parameters {IBAN}")),
        ),
    ] {
        for stream in [false, true] {
            let mut body = chat_with(body.clone());
            body["stream"] = json!(stream);
            let (reply, _) =
                front.answered("/v1/chat/completions", body, |_| say(0, "ok", FinishReason::Stop)).await;
            let found = reply.headers.get("x-remoe-warning").map(|value| value.to_str().unwrap().to_owned());
            assert_eq!((found, reply.status.as_u16()), (warning.clone(), 200), "{}", reply.text);
        }
    }
}
