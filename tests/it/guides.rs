//! Commands of README.md and of the guides, run as written. Those for a cluster are a cluster test (tests/e2e).

use remoe_test_support::binaries::workspace;
use remoe_test_support::guide::{Block, run, script};

async fn commands_run(page: &str) {
    let text = std::fs::read_to_string(workspace().join(page)).unwrap();
    let script = script(&text, |block: &Block| !block.is_for_cluster());
    assert!(script.contains("=== line"), "{page}: no command runs\n{script}");
    run(page, &script).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn readme_commands_run() {
    commands_run("README.md").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn first_model_commands_run() {
    commands_run("docs/guides/first-model.md").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cost_and_budgets_commands_run() {
    commands_run("docs/guides/cost-and-budgets.md").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn identity_and_keys_commands_run() {
    commands_run("docs/guides/identity-and-keys.md").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn monitoring_commands_run() {
    commands_run("docs/guides/monitoring.md").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn planning_a_purchase_commands_run() {
    commands_run("docs/guides/planning-a-purchase.md").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scale_to_zero_commands_run() {
    commands_run("docs/guides/scale-to-zero.md").await;
}
