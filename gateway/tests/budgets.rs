//! Budgets of models: who asks is warned, then refused, whoever it is.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod stage;

use remoe_gateway::{Books, GatewayMetrics, GatewayOptions, KeyFile};
use remoe_ledger::{Ledger, LedgerLimits, Phases, Record, RequestRecord, Share};
use serde_json::json;
use stage::Stage;
use std::path::Path;
use std::sync::Arc;

/// A gateway with a budget of 1000 nano-dollars a day for the model `m` by one of its short names, which has `cost` that much today.
async fn stage(folder: &Path, cost: u64) -> Stage {
    let keys = folder.join("keys.yaml");
    let text = "{tenants: [{name: t, keys: [k]}], models: [{name: small, dollarsPerDay: 0.000001}, {name: n, dollarsPerDay: 1}]}";
    std::fs::write(&keys, text).unwrap();
    let ledger = Ledger::open(&folder.join(cost.to_string()), LedgerLimits::default()).unwrap();
    let share =
        Share { tier: "main".to_owned(), cost: Phases { prefill: cost, decode: 0 }, ..Share::default() };
    let request = RequestRecord {
        at: Books::now(),
        id: String::new(),
        model: "m".to_owned(),
        tenant: "another".to_owned(),
        function: "f".to_owned(),
        prompt_tokens: 1,
        completion_tokens: 1,
        shares: [("f".to_owned(), share)].into(),
        rivals: [].into(),
        served: 0,
    };
    ledger.append(&Record::Request(request)).unwrap();
    let metrics = GatewayMetrics::new().unwrap();
    let books = Books::open(Some(ledger), "p", metrics.registry()).unwrap();
    let options = GatewayOptions {
        keys: KeyFile::open(keys).unwrap().1,
        books: Some(Arc::new(books)),
        ..GatewayOptions::default()
    };
    Stage::new(options, |model| model.short_names = vec!["small".to_owned()], 8, None).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_models_budget_warns_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    let key = [("authorization", "Bearer k")];
    let body = json!({"model": "m", "x": 1});
    for (cost, warning) in [(700, None), (900, Some("0.900"))] {
        let stage = stage(folder.path(), cost).await;
        let (head, _) = stage.ask(&body, &key).await;
        let told = head.headers().get("x-remoe-budget").map(|share| share.to_str().unwrap());
        assert_eq!((head.status().as_u16(), told), (200, warning));
    }
    let stage = stage(folder.path(), 1000).await;
    let (head, text) = stage.ask(&body, &key).await;
    assert_eq!(head.status().as_u16(), 429);
    assert!(head.headers().contains_key("retry-after"));
    assert!(text.contains("the budget of the model m is spent"), "{text}");
    assert!(!text.contains('$'), "nobody is told what others have spent: {text}");
}
