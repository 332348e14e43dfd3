//! Which deployment a name selects, and that another namespace cannot take it.

use crate::api::Api;
use crate::gateway::{Gateway, by, main_function};
use remoe_test_support::deadline::{SOON, until};

const KEYS: &str = "tenants:
  - {name: team-a, keys: [sk-a], namespaces: [a]}
  - {name: team-b, keys: [sk-b], namespaces: [b]}
  - {name: both, keys: [sk-both], namespaces: [a, b]}
  - {name: all, keys: [sk-all]}
";

/// Two namespaces with the same names, of which `gpt` is granted to `a`.
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
async fn names_select_deployments_of_who_may_claim_them() {
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
        assert_eq!(by(&answer).as_deref(), expected, "{key} {model:?}: {answer:?}");
        let refusal = if model.is_some() { 404 } else { 400 };
        assert_eq!(answer.0, if expected.is_some() { 200 } else { refusal }, "{key} {model:?}: {answer:?}");
    }
}

/// The original is deleted, and comes back; the other one stays where it is.
#[tokio::test(flavor = "multi_thread")]
async fn granted_name_waits_for_its_namespace_after_deletion() {
    let (api, gateway) = stage(&["--short-name=gpt=a"]).await;
    assert_eq!(by(&gateway.ask(Some("sk-all"), Some("gpt")).await).as_deref(), Some("a/demo"));
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
    // Another name of the same namespace, and then the original again.
    api.deploy("a/new", "gpt", Some(main_function("a/new").await));
    until(SOON, "the successor in its own namespace", async || {
        let answer = gateway.ask(Some("sk-all"), Some("gpt")).await;
        (by(&answer).as_deref() == Some("a/new")).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_the_one_served_namespace_all_count() {
    let api = Api::start().await;
    api.deploy("a/demo", "gpt", Some(main_function("a/demo").await));
    let gateway = Gateway::start(&api, "gateway", None, &["--open", "--watch-namespace=a"]).await;
    for model in [Some("a/demo"), Some("demo"), Some("gpt"), None] {
        let answer = gateway.ask(None, model).await;
        assert_eq!(by(&answer).as_deref(), Some("a/demo"), "{model:?}: {answer:?}");
    }
}

/// The rule of earlier releases, for the upgrade from them.
#[tokio::test(flavor = "multi_thread")]
async fn any_short_name_counts_if_that_is_asked_for() {
    let api = Api::start().await;
    api.deploy("a/demo", "gpt", Some(main_function("a/demo").await));
    let gateway = Gateway::start(&api, "gateway", None, &["--open", "--short-names=any"]).await;
    assert_eq!(by(&gateway.ask(None, Some("gpt")).await).as_deref(), Some("a/demo"));
    assert_eq!(by(&gateway.ask(None, None).await).as_deref(), Some("a/demo"));
}
