//! A budget shared by two gateways.

use crate::api::Api;
use crate::gateway::{Gateway, main_function, write_spending};
use remoe_test_support::deadline::{SOON, until};

/// Tenants with daily budgets of 1000 nano-dollars.
const KEYS: &str = "tenants:
  - {name: team-a, keys: [sk-a], dollarsPerDay: 0.000001}
  - {name: team-b, keys: [sk-b], dollarsPerDay: 0.000001}
  - {name: admin, keys: [sk-admin], admin: true}
";

#[tokio::test(flavor = "multi_thread")]
async fn budget_spent_at_two_gateways_is_spent_at_both() {
    let api = Api::start().await;
    api.deploy("a/demo", "demo", Some(main_function("a/demo").await));
    let folder = tempfile::tempdir().unwrap();
    let ledger = format!("--ledger={}", folder.path().display());
    write_spending(folder.path(), "one", "team-a", 600);
    let one = Gateway::start(&api, "one", Some(KEYS), &[&ledger]).await;
    assert_eq!(one.ask(Some("sk-a"), Some("a/demo")).await.0, 200, "600 of 1000 are spent");
    write_spending(folder.path(), "two", "team-a", 500);
    let two = Gateway::start(&api, "two", Some(KEYS), &[&ledger]).await;
    for gateway in [&two, &one] {
        until(SOON, "the budget to be spent", async || {
            let (status, text) = gateway.ask(Some("sk-a"), Some("a/demo")).await;
            (status == 429 && text.contains("Daily budget of tenant team-a exhausted")).then_some(())
        })
        .await;
        assert_eq!(
            gateway.ask(Some("sk-b"), Some("a/demo")).await.0,
            200,
            "the budget of another tenant is not spent"
        );
    }
    let (_, page) = two.scrape(Some("sk-admin")).await;
    assert!(page.contains("remoe_budget_spent_nanodollars{model=\"\",tenant=\"team-a\"} 1100\n"), "{page}");

    // The spending of a stopped gateway still counts.
    drop(one);
    assert_eq!(two.ask(Some("sk-a"), Some("a/demo")).await.0, 429);
}
