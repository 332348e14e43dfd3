//! Resolution of model names: which deployment a name selects, and that other namespaces cannot claim it.

use crate::api::Api;
use crate::gateway::{Gateway, answered_by, main_function};
use remoe_test_support::deadline::{SOON, until};

const KEYS: &str = "tenants:
  - {name: team-a, keys: [sk-a], namespaces: [a]}
  - {name: team-b, keys: [sk-b], namespaces: [b]}
  - {name: both, keys: [sk-both], namespaces: [a, b]}
  - {name: all, keys: [sk-all]}
";

/// Starts a gateway with two namespaces whose deployments have the same names.
async fn stage(flags: &[&str]) -> (Api, Gateway) {
    let api = Api::start().await;
    for namespace in ["a", "b"] {
        let name = format!("{namespace}/demo");
        api.deploy(&name, "gpt", Some(main_function(&name).await));
    }
    let gateway = Gateway::start(&api, "gateway", Some(KEYS), flags).await;
    (api, gateway)
}

#[tokio::test(flavor = "multi_thread")]
async fn short_names_select_deployments_of_granted_namespaces() {
    let (_api, gateway) = stage(&["--short-name=gpt=a"]).await;
    let (a, b) = (Some("a/demo"), Some("b/demo"));
    for (key, model, expected) in [
        ("sk-all", Some("a/demo"), a),
        ("sk-all", Some("b/demo"), b),
        ("sk-all", Some("gpt"), a),
        ("sk-all", Some("demo"), None),
        ("sk-all", None, None),
        ("sk-both", Some("demo"), None),
        ("sk-both", Some("gpt"), a),
        ("sk-a", Some("demo"), a),
        ("sk-a", None, a),
        ("sk-b", Some("demo"), b),
        ("sk-b", Some("gpt"), b),
        ("sk-b", Some("a/demo"), None),
        ("sk-a", Some("b/demo"), None),
    ] {
        let answer = gateway.ask(Some(key), model).await;
        assert_eq!(answered_by(&answer).as_deref(), expected, "{key} {model:?}: {answer:?}");
        let refusal = if model.is_some() { 404 } else { 400 };
        assert_eq!(answer.0, if expected.is_some() { 200 } else { refusal }, "{key} {model:?}: {answer:?}");
    }
}

/// The granted namespace's deployment is deleted and replaced. The other namespace's keeps the same served name.
#[tokio::test(flavor = "multi_thread")]
async fn granted_name_waits_for_its_namespace_after_deletion() {
    let (api, gateway) = stage(&["--short-name=gpt=a"]).await;
    assert_eq!(answered_by(&gateway.ask(Some("sk-all"), Some("gpt")).await).as_deref(), Some("a/demo"));
    api.delete("a/demo");
    until(SOON, "the deletion to be seen", async || {
        (gateway.ask(Some("sk-all"), Some("a/demo")).await.0 == 404).then_some(())
    })
    .await;
    for key in ["sk-all", "sk-both", "sk-a"] {
        let answer = gateway.ask(Some(key), Some("gpt")).await;
        assert_eq!(answer.0, 404, "{key}: {answer:?}");
    }
    assert_eq!(gateway.ask(Some("sk-a"), None).await.0, 400);
    // A new deployment of the same namespace takes the name.
    api.deploy("a/new", "gpt", Some(main_function("a/new").await));
    until(SOON, "the successor in its own namespace", async || {
        let answer = gateway.ask(Some("sk-all"), Some("gpt")).await;
        (answered_by(&answer).as_deref() == Some("a/new")).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_names_count_if_one_namespace_is_served() {
    let api = Api::start().await;
    api.deploy("a/demo", "gpt", Some(main_function("a/demo").await));
    let gateway = Gateway::start(&api, "gateway", None, &["--open", "--watch-namespace=a"]).await;
    for model in [Some("a/demo"), Some("demo"), Some("gpt"), None] {
        let answer = gateway.ask(None, model).await;
        assert_eq!(answered_by(&answer).as_deref(), Some("a/demo"), "{model:?}: {answer:?}");
    }
}

/// The rule of earlier releases, which eases upgrades from them.
#[tokio::test(flavor = "multi_thread")]
async fn any_short_name_counts_if_configured() {
    let api = Api::start().await;
    api.deploy("a/demo", "gpt", Some(main_function("a/demo").await));
    let gateway = Gateway::start(&api, "gateway", None, &["--open", "--short-names=any"]).await;
    assert_eq!(answered_by(&gateway.ask(None, Some("gpt")).await).as_deref(), Some("a/demo"));
    assert_eq!(answered_by(&gateway.ask(None, None).await).as_deref(), Some("a/demo"));
}
