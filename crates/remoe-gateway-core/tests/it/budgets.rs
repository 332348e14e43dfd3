//! Budgets of models: clients are warned, then refused. Costs of a model, and who may see them.

use crate::stage;

use remoe_billing::{
    Basis, FunctionEvent, Ledger, LedgerLimits, Phases, Rate, Record, ReportedCost, RequestRecord, Share,
};
use remoe_gateway_core::{
    Billing, CompletedRequest, CostAccounting, GatewayMetrics, GatewayOptions, KeyFile, Keys,
};
use serde_json::{Value, json};
use stage::Stage;
use std::path::Path;
use std::sync::Arc;

/// Starts a gateway where `m` has a daily budget of 1000 nano-dollars, under one of its short names, and has cost
/// `cost` today.
async fn stage(folder: &Path, cost: u64) -> Stage {
    let keys = folder.join("keys.yaml");
    let text = "{tenants: [{name: t, keys: [k]}], models: [{name: small, dollarsPerDay: 0.000001}, {name: n, dollarsPerDay: 1}]}";
    std::fs::write(&keys, text).unwrap();
    let ledger = Ledger::open(&folder.join(cost.to_string()), LedgerLimits::default()).unwrap();
    let share =
        Share { tier: "main".to_owned(), cost: Phases { prefill: cost, decode: 0 }, ..Share::default() };
    let request = RequestRecord {
        at: CostAccounting::now(),
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
    let cost_accounting = CostAccounting::open(Some(ledger), "p", metrics.registry()).unwrap();
    let options = GatewayOptions {
        keys: KeyFile::open(keys).unwrap().1,
        cost_accounting: Some(Arc::new(cost_accounting)),
        ..GatewayOptions::default()
    };
    Stage::new(options, |model| model.short_names = vec!["small".to_owned()], 8, None).await
}

#[tokio::test(flavor = "multi_thread")]
async fn budget_of_a_model_warns_and_then_refuses() {
    let folder = tempfile::tempdir().unwrap();
    let key = [("authorization", "Bearer k")];
    let body = json!({"model": "m", "x": 1});
    for (cost, warning) in [(700, None), (900, Some("0.900"))] {
        let stage = stage(folder.path(), cost).await;
        let (head, _) = stage.ask(&body, &key).await;
        let reported = head.headers().get("x-remoe-budget").map(|share| share.to_str().unwrap());
        assert_eq!((head.status().as_u16(), reported), (200, warning));
    }
    let stage = stage(folder.path(), 1000).await;
    let (head, text) = stage.ask(&body, &key).await;
    assert_eq!(head.status().as_u16(), 429);
    assert!(head.headers().contains_key("retry-after"));
    assert!(text.contains("Daily budget of model m exhausted; resets at 00:00 UTC."), "{text}");
    assert!(!text.contains('$'), "a tenant reads what others have spent: {text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn budget_counts_what_another_gateway_reports() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (stage(folder.path(), 600).await, stage(folder.path(), 500).await);
    let (body, key) = (json!({"model": "m", "x": 1}), [("authorization", "Bearer k")]);
    assert_eq!(other.ask(&body, &key).await.0.status().as_u16(), 200, "its own 500 of 1000");
    let reported = serde_json::to_string(&one.gateway.spending().unwrap()).unwrap();
    other.gateway.spent_elsewhere("one", serde_json::from_str(&reported).unwrap());
    let (head, text) = other.ask(&body, &key).await;
    assert_eq!(head.status().as_u16(), 429, "{text}");
    assert_eq!(one.ask(&body, &key).await.0.status().as_u16(), 200, "it got no report of the other gateway");
}

/// `/status` states a model's costs. An operator's key sees all; a tenant's key sees nothing that other tenants
/// cause.
#[tokio::test(flavor = "multi_thread")]
async fn status_states_the_costs_that_the_key_may_see() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.yaml");
    std::fs::write(&keys, "tenants: [{name: t, keys: [k]}]").unwrap();
    let tenants = || KeyFile::open(keys.clone()).unwrap().1;
    let operators = tenants().with_key("default", "o").unwrap();
    for (keys, key) in [(Keys::none(), None), (operators, Some("o")), (tenants(), Some("k"))] {
        let cost_accounting =
            Arc::new(CostAccounting::open(None, "p", GatewayMetrics::new().unwrap().registry()).unwrap());
        let options = GatewayOptions {
            keys,
            cost_accounting: Some(cost_accounting.clone()),
            ..GatewayOptions::default()
        };
        let stage = Stage::new(options, |_| {}, 8, None).await;
        let hour = 3_600_000_000_000;
        let started = CostAccounting::now() - hour;
        for (model, function) in [("m", "a"), ("another", "b")] {
            let (tier, rate, basis) = ("main".to_owned(), Rate(40_000_000), Basis::Alive);
            cost_accounting.record_function_event(
                started,
                model,
                function,
                FunctionEvent::Started { tier, rate, basis },
            );
        }
        let share =
            Share { tier: "main".to_owned(), cost: Phases { prefill: 5, decode: 6 }, ..Share::default() };
        let reported =
            ReportedCost { shares: [("main".to_owned(), share)].into(), rivals: [].into(), served: 0 };
        let billing = Billing {
            functions: [("main".to_owned(), ("a".to_owned(), "main".to_owned()))].into(),
            ..Billing::default()
        };
        let (prompt_tokens, completion_tokens) = (1, 1);
        cost_accounting.record_answer(
            CompletedRequest {
                id: "id",
                model: "m",
                tenant: "o",
                prompt_tokens,
                completion_tokens,
                reported,
            },
            &billing,
            None,
        );
        let status: Value = serde_json::from_str(&stage.get("/status", key).await.1).unwrap();
        let cost = &status["models"][0]["cost"];
        assert_eq!(cost["per_hour"], 40_000_000, "{status}");
        if key == Some("k") {
            assert_eq!((&cost["paid"], &cost["requests"]), (&Value::Null, &Value::Null), "{status}");
            continue;
        }
        let paid = cost["paid"].as_u64().unwrap();
        let max_cost = Rate(40_000_000).cost(CostAccounting::now() - started);
        assert!((40_000_000..=max_cost).contains(&paid) && cost["requests"] == 11, "{status}");
    }
}
