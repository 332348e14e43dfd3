//! Anthropic's routes: API keys in its header, and the gateway's own errors in its form.

use crate::stage::Stage;
use remoe_gateway_core::{GatewayOptions, Keys};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::Duration;

const MESSAGES: &str = "/v1/messages";

fn assert_error(text: &str, kind: &str) {
    let error: Value = serde_json::from_str(text).unwrap();
    let message = error["error"]["message"].as_str().unwrap_or_default();
    assert!(!message.is_empty(), "{text}");
    assert_eq!(error, json!({"type": "error", "error": {"type": kind, "message": message}}));
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_of_the_gateway_have_the_form_of_anthropic() {
    let keys = Keys::none().with_key("one", "key-one").unwrap();
    let stage = Stage::new(GatewayOptions { keys, ..GatewayOptions::default() }, |_| {}, 8, None).await;
    let key = [("x-api-key", "key-one"), ("anthropic-version", "2023-06-01")];
    let (head, text) = stage.ask_at(MESSAGES, &json!({"x": 1}), &key).await;
    assert_eq!((head.status().as_u16(), text.as_str()), (200, r#"{"x":1}"#));
    for (path, body, headers, status, kind) in [
        (MESSAGES, json!({}), &key[1..], 401, "authentication_error"),
        (MESSAGES, json!({"model": "other"}), &key[..], 404, "not_found_error"),
        (MESSAGES, json!({"model": 1}), &key[..], 400, "invalid_request_error"),
        ("/v1/messages/batches", json!({}), &key[..], 404, "not_found_error"),
    ] {
        let (head, text) = stage.ask_at(path, &body, headers).await;
        assert_eq!(head.status().as_u16(), status, "{text}");
        assert_error(&text, kind);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_that_breaks_off_ends_with_error_event() {
    let stage = Stage::new(GatewayOptions::default(), |_| {}, 8, Some(Duration::from_millis(4))).await;
    let (_, text) = stage.ask_at(MESSAGES, &json!({"stream": true, "breaks": true}), &[]).await;
    let data = text.split("event: error\ndata: ").nth(1).expect("an error event").trim_end();
    assert_error(data, "overloaded_error");
    // The same for a stream that has waited for its function.
    stage.wait_for_sleep().await;
    stage.functions.breaks.store(3, Ordering::SeqCst);
    let (_, text) = stage.ask_at(MESSAGES, &json!({"stream": true}), &[]).await;
    let data = text.split("event: error\ndata: ").nth(1).expect("an error event").trim_end();
    assert_error(data, "overloaded_error");
    let (_, text) = stage.ask_at("/v1/responses", &json!({"stream": true}), &[]).await;
    assert!(text.contains("event: response.completed"), "{text}");
}
