//! The Responses API: responses are stored per tenant, inserted into later requests, read and removed.

use crate::stage::{LONG, Stage};
use axum::http::{Request, header};
use http_body_util::{BodyExt, Full};
use remoe_gateway_core::{GatewayOptions, Keys, ResponseLimits, ResponseStore};
use serde_json::{Value, json};
use std::time::Duration;

const RESPONSES: &str = "/v1/responses";

async fn stage(options: GatewayOptions) -> Stage {
    Stage::new(options, |_| {}, 8, None).await
}

fn with_keys() -> GatewayOptions {
    let keys = Keys::none().with_key("one", "key-one").unwrap().with_key("two", "key-two").unwrap();
    GatewayOptions { keys, ..GatewayOptions::default() }
}

fn user(text: &str) -> Value {
    json!({"type": "message", "role": "user", "content": text})
}

fn last_request_body(stage: &Stage) -> Value {
    stage.functions.asked.lock().unwrap().last().unwrap().clone()
}

/// Sends `method` to `path` with a key.
async fn call(stage: &Stage, method: &str, path: &str, key: Option<&str>) -> (u16, Value) {
    let mut request = Request::builder().method(method).uri(format!("http://{}{path}", stage.address));
    if let Some(key) = key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let sent = stage.client.request(request.body(Full::default()).unwrap());
    let (head, body) = tokio::time::timeout(LONG, sent).await.expect("an answer").unwrap().into_parts();
    let bytes =
        tokio::time::timeout(LONG, body.collect()).await.expect("the answer ends").unwrap().to_bytes();
    (head.status.as_u16(), serde_json::from_slice(&bytes).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn previous_response_is_replaced_by_its_items() {
    let stage = stage(GatewayOptions::default()).await;
    let item = json!({"type": "message", "text": "x"});
    let mut items = Vec::new();
    for (number, stream) in [false, true, false, true].into_iter().enumerate() {
        let mut body = json!({"model": "m", "input": format!("u{number}"), "stream": stream});
        if number > 0 {
            body["previous_response_id"] = format!("resp_{number}").into();
        }
        let (head, text) = stage.ask_at(RESPONSES, &body, &[("x-remoe-resolved", "1")]).await;
        assert_eq!(head.status(), 200, "{text}");
        items.push(user(&format!("u{number}")));
        let asked = last_request_body(&stage);
        if number > 0 {
            assert_eq!(asked["input"], json!(items));
        }
        assert_eq!(asked["previous_response_id"], body["previous_response_id"]);
        let is_resolved = stage.functions.headers.lock().unwrap().contains_key("x-remoe-resolved");
        assert_eq!(is_resolved, number > 0, "a client cannot set the header");
        items.push(item.clone());
        if stream {
            // The stream is relayed unchanged.
            let data = json!({"type": "response.completed", "response": {"id": format!("resp_{}", number + 1), "status": "completed", "output": [item]}});
            let expected = format!(
                "event: response.created\ndata: {{\"response\":{{}}}}\n\nevent: response.completed\ndata: {data}\n\n"
            );
            assert_eq!(text, expected);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_belong_to_their_tenant() {
    let stage = stage(with_keys()).await;
    let (one, two) = ([("authorization", "Bearer key-one")], [("x-api-key", "key-two")]);
    let (head, text) = stage.ask_at(RESPONSES, &json!({"input": "a"}), &one).await;
    assert_eq!(head.status(), 200);
    let asked = stage.functions.headers.lock().unwrap().clone();
    assert!(
        !asked.contains_key("x-api-key") && !asked.contains_key("authorization"),
        "keys are not forwarded"
    );
    let path = format!("{RESPONSES}/resp_1");
    let next = json!({"input": "b", "previous_response_id": "resp_1"});
    let (head, refused) = stage.ask_at(RESPONSES, &next, &two).await;
    let error: Value = serde_json::from_str(&refused).unwrap();
    assert_eq!((head.status().as_u16(), &error["error"]["param"]), (404, &json!("previous_response_id")));
    assert_eq!(stage.functions.asked.lock().unwrap().len(), 1, "the refused request reached no function");
    for method in ["GET", "DELETE"] {
        assert_eq!(call(&stage, method, &path, Some("key-two")).await.0, 404);
        assert_eq!(call(&stage, method, &path, None).await.0, 401);
    }
    let stored: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(call(&stage, "GET", &path, Some("key-one")).await, (200, stored));
    let removed = json!({"id": "resp_1", "object": "response", "deleted": true});
    assert_eq!(call(&stage, "DELETE", &path, Some("key-one")).await, (200, removed));
    assert_eq!(call(&stage, "GET", &path, Some("key-one")).await.0, 404);
    assert_eq!(stage.ask_at(RESPONSES, &next, &one).await.0.status(), 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_are_stored_unless_opted_out_or_failed() {
    let stage = stage(GatewayOptions::default()).await;
    for (number, (extra, is_stored)) in [
        (json!({}), true),
        (json!({"store": false}), false),
        (json!({"store": false, "stream": true}), false),
        (json!({"fails": true}), false),
        (json!({"fails": true, "stream": true}), false),
        // Larger than answers that are held completely.
        (json!({"long": 3 << 20}), true),
        (json!({"long": 3 << 20, "stream": true}), true),
    ]
    .into_iter()
    .enumerate()
    {
        let mut body = json!({"input": "a"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        assert_eq!(stage.ask_at(RESPONSES, &body, &[]).await.0.status(), 200);
        let (status, _) = call(&stage, "GET", &format!("{RESPONSES}/resp_{}", number + 1), None).await;
        assert_eq!(status, if is_stored { 200 } else { 404 }, "{extra}");
    }
    // With all items of the last response, the body exceeds the limit.
    let next = json!({"input": "x".repeat(2 << 20), "previous_response_id": "resp_7"});
    assert_eq!(stage.ask_at(RESPONSES, &next, &[]).await.0.status(), 413);
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_gateway_continues_stored_responses() {
    let folder = tempfile::tempdir().unwrap();
    let open = || {
        let responses = ResponseStore::open(folder.path(), ResponseLimits::default()).unwrap();
        (GatewayOptions { responses: responses.clone(), ..GatewayOptions::default() }, responses)
    };
    let (options, store) = open();
    let before = stage(options).await;
    before.ask_at(RESPONSES, &json!({"input": "a"}), &[]).await;
    store.flush(Duration::from_secs(30));
    let (options, _store) = open();
    let after = stage(options).await;
    let next = json!({"input": [user("b")], "previous_response_id": "resp_1"});
    assert_eq!(after.ask_at(RESPONSES, &next, &[]).await.0.status(), 200);
    assert_eq!(
        last_request_body(&after)["input"],
        json!([user("a"), {"type": "message", "text": "x"}, user("b")])
    );
}
