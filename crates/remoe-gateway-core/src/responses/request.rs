//! Requests that continue a stored response: inserts the earlier items before their own.

use super::items::{MAX_ID_BYTES, elements, join};
use super::recording::Recording;
use super::store::ResponseStore;
use axum::http::StatusCode;
use bytes::Bytes;
use remoe_http::ApiError;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::sync::Arc;

/// Fields of a request that the gateway needs. The main function refuses invalid values.
#[derive(Deserialize)]
struct ResponseFields<'a> {
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    previous_response_id: Option<String>,
    store: Option<bool>,
}

/// Request with all its items, ready for a main function.
pub(crate) struct ResolvedRequest {
    pub(crate) body: Bytes,
    /// Set if items of an earlier response were inserted.
    pub(crate) has_previous: bool,
    pub(crate) recording: Option<Recording>,
}

/// Inserts the items of the response `previous_response_id` before the input of `body`, a request of `tenant`. If the
/// request does not state whether to store its response, `is_stored_by_default` decides.
///
/// # Errors
/// The input is missing, the tenant has no such response, or the new body exceeds `limit` bytes.
pub(crate) fn resolve(
    store: &Arc<ResponseStore>,
    tenant: Arc<str>,
    body: Bytes,
    limit: usize,
    is_stored_by_default: bool,
) -> Result<ResolvedRequest, ApiError> {
    let Some((fields, input)) = read_fields(&body)? else {
        return Ok(ResolvedRequest { body, has_previous: false, recording: None });
    };
    let is_stored = fields.store.unwrap_or(is_stored_by_default);
    let recorded = |items| is_stored.then(|| Recording::new(store.clone(), tenant.clone(), items));
    let Some(id) = &fields.previous_response_id else {
        let recording = recorded(input.items);
        return Ok(ResolvedRequest { body, has_previous: false, recording });
    };
    let Some(previous) = store.get(id, &tenant) else {
        let id: String = id.chars().take(MAX_ID_BYTES).collect();
        let message = format!("response {id:?} not found; send all items as `input`");
        return Err(ApiError::new(StatusCode::NOT_FOUND, "previous_response_not_found", message)
            .about("previous_response_id"));
    };
    let items = join(&[&previous.items, &input.items]);
    let (before, after) = (&body[..input.begin], &body[input.end..]);
    let size = before.len() + items.len() + after.len() + 2;
    if size > limit {
        let message =
            format!("request too large with its earlier items: expected at most {limit} bytes, got {size}");
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message));
    }
    let resolved_body = [before, b"[", items.as_bytes(), b"]", after].concat();
    let recording = recorded(items);
    Ok(ResolvedRequest { body: resolved_body.into(), has_previous: true, recording })
}

/// Input of a request: its items without brackets, and its byte range in the body.
struct ItemRange {
    items: String,
    begin: usize,
    end: usize,
}

/// Parses the body. Returns `None` if it is invalid, which the main function reports.
fn read_fields(body: &[u8]) -> Result<Option<(ResponseFields<'_>, ItemRange)>, ApiError> {
    let Ok(fields) = serde_json::from_slice::<ResponseFields<'_>>(body) else { return Ok(None) };
    match fields.input {
        None if fields.previous_response_id.is_some() => {
            let message = "missing `input`: send at least []";
            Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message).about("input"))
        }
        None => Ok(None),
        Some(input) => Ok(items_of(body, input.get()).map(|input| (fields, input))),
    }
}

fn items_of(body: &[u8], input: &str) -> Option<ItemRange> {
    let items = match input.as_bytes().first()? {
        b'"' => format!(r#"{{"type":"message","role":"user","content":{input}}}"#),
        b'[' => elements(input)?.to_owned(),
        _ => return None,
    };
    let begin = (input.as_ptr() as usize).checked_sub(body.as_ptr() as usize)?;
    let end = begin.checked_add(input.len()).filter(|end| *end <= body.len())?;
    Some(ItemRange { items, begin, end })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::responses::ResponseLimits;
    use serde_json::{Value, json};

    fn store() -> Arc<ResponseStore> {
        ResponseStore::in_memory(ResponseLimits::default())
    }

    fn resolved(store: &Arc<ResponseStore>, tenant: &str, body: &Value) -> Result<ResolvedRequest, ApiError> {
        resolve(store, tenant.into(), body.to_string().into(), 10_000, true)
    }

    fn answer(id: &str, text: &str) -> String {
        json!({"id": id, "status": "completed", "output": [{"type": "message", "text": text}]}).to_string()
    }

    #[test]
    fn chain_of_responses_has_all_items() {
        let store = store();
        let first = resolved(&store, "t", &json!({"input": "a", "instructions": "i"})).unwrap();
        assert!(!first.has_previous);
        first.recording.unwrap().store_body(answer("resp_1", "b").as_bytes());
        let second = json!({"model": "m", "input": [{"role": "user", "content": "c"}], "previous_response_id": "resp_1", "z": 1});
        let second = resolved(&store, "t", &second).unwrap();
        assert!(second.has_previous);
        let body: Value = serde_json::from_slice(&second.body).unwrap();
        let items = json!([
            {"type": "message", "role": "user", "content": "a"},
            {"type": "message", "text": "b"},
            {"role": "user", "content": "c"},
        ]);
        assert_eq!(body, json!({"model": "m", "input": items, "previous_response_id": "resp_1", "z": 1}));
        let event = format!(
            "event: response.completed\ndata: {{\"type\":\"x\",\"response\":{}}}\n\n",
            answer("resp_2", "d")
        );
        second.recording.unwrap().store_event(event.as_bytes());
        let third = resolved(&store, "t", &json!({"input": [], "previous_response_id": "resp_2"})).unwrap();
        let body: Value = serde_json::from_slice(&third.body).unwrap();
        assert_eq!(body["input"].as_array().unwrap().len(), 4);
        assert_eq!(body["input"][3]["text"], "d");
    }

    #[test]
    fn response_of_another_tenant_is_not_found() {
        let store = store();
        resolved(&store, "t", &json!({"input": "a"}))
            .unwrap()
            .recording
            .unwrap()
            .store_body(answer("resp_1", "b").as_bytes());
        let body = json!({"input": "c", "previous_response_id": "resp_1"});
        assert!(resolved(&store, "t", &body).is_ok());
        let error = resolved(&store, "u", &body).err().unwrap();
        assert_eq!(error.status(), 404);
        assert!(store.get("resp_1", "u").is_none() && !store.remove("resp_1", "u"));
    }

    #[test]
    fn request_with_store_false_is_not_recorded() {
        let store = store();
        assert!(resolved(&store, "t", &json!({"input": "a", "store": false})).unwrap().recording.is_none());
        for wrong in
            [json!({"input": 1}), json!({}), json!({"input": "a", "store": "x"}), json!({"input": {}})]
        {
            let passed = resolved(&store, "t", &wrong).unwrap();
            assert_eq!(
                (passed.body, passed.recording.is_none()),
                (wrong.to_string().into(), true),
                "{wrong}"
            );
        }
    }

    #[test]
    fn items_beyond_the_limit_are_refused() {
        let store = store();
        let long = "x".repeat(6000);
        resolved(&store, "t", &json!({"input": long}))
            .unwrap()
            .recording
            .unwrap()
            .store_body(answer("resp_1", "b").as_bytes());
        let error =
            resolved(&store, "t", &json!({"input": long, "previous_response_id": "resp_1"})).err().unwrap();
        assert_eq!(error.status(), 413);
    }

    #[test]
    fn answers_that_are_no_response_are_not_stored() {
        let store = store();
        for wrong in [
            "{}".to_owned(),
            "[DONE]".to_owned(),
            answer("../x", "b"),
            answer("resp_../x", "b"),
            answer("resp_1", "b").replace("completed", "failed"),
            r#"{"id": "resp_1", "status": "completed", "output": 1}"#.to_owned(),
        ] {
            resolved(&store, "t", &json!({"input": "a"}))
                .unwrap()
                .recording
                .unwrap()
                .store_body(wrong.as_bytes());
        }
        assert_eq!(store.len(), 0);
    }
}
