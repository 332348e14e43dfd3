//! Tests of structured output: fields, concurrent compilation, and the engine's grammar.

use super::{
    BOS, ByteTokenizer, TestServer, TextFrontend, TextOverride, body_with, chat_body_with, figures,
    text_events,
};
use crate::engine::RequestLimits;
use crate::engine::request::{Event, FinishReason};
use crate::grammar::tests::accepts;
use remoe_proto::ServiceError;
use serde_json::{Value, json};
use std::sync::{Arc, Condvar, Mutex};

fn schema() -> Value {
    json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
}

/// Creates a server with a context that is long enough for tools.
fn server() -> TestServer {
    let vocab_size = BOS as usize + 1;
    let limits =
        RequestLimits { context_length: 4000, cache_pages: 400, vocab_size, ..super::Engine::limits() };
    TestServer::build(Some(Arc::new(ByteTokenizer)), limits, |options| options.end_ids = vec![BOS])
}

#[tokio::test]
async fn every_structure_field_reaches_the_engine() {
    let server = TestServer::new();
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
        for (reply, requests) in
            [server.chat(chat_body_with(body.clone())).await, server.complete(body_with(body.clone())).await]
        {
            reply.ok();
            assert!(requests[0].grammar.is_some(), "{body}");
        }
    }
    for body in [json!({}), json!({"response_format": {"type": "text"}}), json!({"guided_json": null})] {
        assert_eq!(server.chat(chat_body_with(body)).await.1[0].grammar, None);
    }
}

#[tokio::test]
async fn equal_schemas_are_compiled_once() {
    let server = TestServer::new();
    let body = json!({"prompt": ["a", "b"], "guided_json": schema()});
    let (_, first) = server.complete(body_with(body.clone())).await;
    let (_, second) = server.complete(body_with(body)).await;
    assert_eq!(first[0].grammar, first[1].grammar);
    assert_eq!(first[0].grammar, second[0].grammar);
    let (_, other) = server.complete(body_with(json!({"guided_regex": "x"}))).await;
    assert_ne!(first[0].grammar, other[0].grammar);
}

#[tokio::test]
async fn unsupported_structures_are_refused_by_name() {
    let server = TestServer::new();
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
        server.post("/v1/chat/completions", chat_body_with(body.clone())).await.refuses(param);
        server.post("/v1/completions", body_with(body)).await.refuses(param);
    }
    let without_text = TestServer::build(None, super::Engine::limits(), |_| ());
    let ids = json!({"prompt": [1], "guided_regex": "a"});
    without_text.post("/v1/completions", ids).await.refuses("guided_regex");
}

#[tokio::test]
async fn schemas_stay_small_in_memory() {
    let server = TestServer::new();
    let values = vec!["[]"; 70_000].join(",");
    let body = format!(r#"{{"prompt": "hi", "guided_json": {{"enum": [{values}]}}}}"#);
    let error = server.post_raw("/v1/completions", body).await.error(400);
    assert!(error["message"].as_str().unwrap().contains("values"), "{error}");
}

/// Byte tokenizer that blocks until `open` is true.
struct WithheldTokens {
    open: Mutex<bool>,
    opened: Condvar,
}

impl TextOverride for WithheldTokens {
    fn token_bytes(&self, id: u32) -> Result<Vec<u8>, ServiceError> {
        let open = self.open.lock().unwrap();
        drop(self.opened.wait_while(open, |open| !*open).unwrap());
        ByteTokenizer.token_bytes(id)
    }
}

/// While a grammar is compiled, other requests are answered completely, and the engine does not get the request.
#[tokio::test]
async fn requests_do_not_wait_for_other_grammars() {
    let held = Arc::new(WithheldTokens { open: Mutex::new(false), opened: Condvar::new() });
    let server = TestServer::build(Some(held.clone()), super::Engine::limits(), |_| ());
    let others = async {
        for _ in 0..3 {
            let body = chat_body_with(json!({"stream": true}));
            let (reply, requests) = server
                .post_with_script("/v1/chat/completions", body, |_| text_events(0, "ok", FinishReason::Stop))
                .await;
            assert_eq!(reply.chunks().len(), 4);
            assert!(requests.iter().all(|request| request.grammar.is_none()));
        }
        *held.open.lock().unwrap() = true;
        held.opened.notify_all();
        let requests = server.engine.next().await;
        assert!(requests.request.grammar.is_some());
        for event in text_events(0, "a", FinishReason::Stop) {
            requests.events.try_send(event).unwrap();
        }
        requests.events.try_send(Event::Done(figures(&requests.request))).unwrap();
    };
    let (reply, ()) =
        tokio::join!(server.post("/v1/completions", body_with(json!({"guided_regex": "a"}))), others);
    assert_eq!(reply.ok()["choices"][0]["text"], "a");
}

#[tokio::test]
async fn whitespace_options_apply_to_every_form_of_json() {
    let server = server();
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
            let (reply, requests) = server.chat(chat_body_with(body.clone())).await;
            reply.ok();
            let grammar = requests[0].grammar.as_ref().unwrap();
            assert!(accepts(grammar, &format!("{before}{taken}{after}")), "{body}");
            assert!(!accepts(grammar, &format!("{before}{refused}{after}")), "{body}");
        }
    }
}

#[tokio::test]
async fn answers_warn_about_keywords_that_are_not_enforced() {
    let server = server();
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
            let mut body = chat_body_with(body.clone());
            body["stream"] = json!(stream);
            let (reply, _) = server
                .post_with_script("/v1/chat/completions", body, |_| text_events(0, "ok", FinishReason::Stop))
                .await;
            let found = reply.headers.get("x-remoe-warning").map(|value| value.to_str().unwrap().to_owned());
            assert_eq!((found, reply.status.as_u16()), (warning.clone(), 200), "{}", reply.text);
        }
    }
}
