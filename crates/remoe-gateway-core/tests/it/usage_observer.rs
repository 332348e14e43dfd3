//! The usage observer of a model gets all its requests, and clients do not notice it.

use crate::stage;

use axum::body::Bytes;
use remoe_gateway_core::{GatewayOptions, KeyFile, Privacy, UsageObserver};
use serde_json::{Value, json};
use stage::Stage;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const ACTIVATIONS: &str = "x-remoe-activations";

/// Observer that records its calls. It does not follow requests with an `x` of 9.
#[derive(Default)]
struct RecordingObserver(Mutex<Vec<(u64, String)>>);

impl RecordingObserver {
    fn record(&self, id: u64, note: impl Into<String>) {
        self.0.lock().unwrap().push((id, note.into()));
    }

    /// Waits until there are `count` notes, and returns all notes.
    async fn wait_for(&self, count: usize) -> Vec<(u64, String)> {
        let deadline = tokio::time::Instant::now() + stage::LONG;
        loop {
            let notes = self.0.lock().unwrap().clone();
            if notes.len() >= count {
                return notes;
            }
            assert!(tokio::time::Instant::now() < deadline, "only {notes:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

impl UsageObserver for RecordingObserver {
    fn request_started(&self, id: u64, tenant: &str, privacy: Privacy, body: &Bytes) -> bool {
        let body: Value = serde_json::from_slice(body).unwrap();
        let privacy = if privacy == Privacy::None { String::new() } else { format!(" {privacy:?}") };
        self.record(id, format!("came {tenant:?} {}{privacy}", body["x"]));
        body["x"] != 9
    }

    fn usage_reported(&self, id: u64, activations: &str) {
        self.record(id, format!("told {activations}"));
    }

    fn request_ended(&self, id: u64) {
        self.record(id, "left");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_prediction_follows_requests_from_queue_to_end() {
    let stage = Stage::new(GatewayOptions::default(), |_| {}, 8, Some(Duration::from_millis(4))).await;
    let was_usage_requested = || stage.functions.headers.lock().unwrap().contains_key(ACTIVATIONS);
    // A client cannot request the usage itself.
    let (head, _) = stage.ask(&json!({"model": "m", "x": 1}), &[(ACTIVATIONS, "counts")]).await;
    assert!(!was_usage_requested() && !head.headers().contains_key(ACTIVATIONS));

    let notes = Arc::new(RecordingObserver::default());
    stage.model.set_usage_observer(notes.clone());
    stage.wait_for_sleep().await;
    let starts = stage.functions.starts.load(Ordering::SeqCst);
    let (head, _) = stage.ask(&json!({"model": "m", "x": 2}), &[]).await;
    assert!(was_usage_requested() && !head.headers().contains_key(ACTIVATIONS));
    assert_eq!(stage.functions.starts.load(Ordering::SeqCst), starts + 1);
    let recorded = notes.wait_for(3).await;
    assert!(recorded.iter().all(|(id, _)| *id == recorded[0].0));
    let texts: Vec<&str> = recorded.iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(texts, ["came \"\" 2", "told AQID", "left"]);

    // A request that the observer does not follow, and one whose attempts all fail.
    stage.ask(&json!({"model": "m", "x": 9}), &[]).await;
    assert!(!was_usage_requested());
    stage.functions.breaks.store(3, Ordering::SeqCst);
    let (head, _) = stage.ask(&json!({"model": "m", "x": 3}), &[]).await;
    assert_eq!(head.status(), 503);
    let texts: Vec<String> = notes.wait_for(6).await.into_iter().skip(3).map(|(_, text)| text).collect();
    assert_eq!(texts, ["came \"\" 9", "came \"\" 3", "left"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_are_not_asked_for_expert_usage_of_opted_out_tenant() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for privacy in ["leftout", "Leftout", "null", "true", "[LeftOut]", "''"] {
        std::fs::write(&file, format!("tenants: [{{name: a, keys: [top-secret], privacy: {privacy}}}]"))
            .unwrap();
        let error = KeyFile::open(file.path().to_owned()).unwrap_err().to_string();
        assert!(error.contains("tenants[0].privacy") && !error.contains("top-secret"), "{privacy}: {error}");
    }
    let tenants = "tenants: [{name: a, keys: [ka]}, {name: b, keys: [kb], privacy: CountsOnly}, \
                   {name: c, keys: [kc], privacy: LeftOut}]";
    std::fs::write(&file, tenants).unwrap();
    let (_, keys) = KeyFile::open(file.path().to_owned()).unwrap();
    let options = GatewayOptions { keys, ..GatewayOptions::default() };
    let stage = Stage::new(options, |_| {}, 8, None).await;
    let notes = Arc::new(RecordingObserver::default());
    stage.model.set_usage_observer(notes.clone());
    let mut usage_requests = Vec::new();
    for (x, key) in [(1, "Bearer kc"), (2, "Bearer kb"), (3, "Bearer ka")] {
        let (head, _) = stage.ask(&json!({"model": "m", "x": x}), &[("authorization", key)]).await;
        assert_eq!(head.status(), 200);
        usage_requests.push(stage.functions.headers.lock().unwrap().contains_key(ACTIVATIONS));
    }
    assert_eq!(usage_requests, [false, true, true]);
    let texts: Vec<String> = notes.wait_for(7).await.into_iter().map(|(_, text)| text).collect();
    let expected = [
        "came \"c\" 1 LeftOut",
        "came \"b\" 2 CountsOnly",
        "told AQID",
        "left",
        "came \"a\" 3",
        "told AQID",
        "left",
    ];
    assert_eq!(texts, expected, "only the start of an opted-out request is reported");
}
