//! Requests without the right key: they wake no model and read nothing of other tenants.

use crate::api::Api;
use crate::gateway::{Gateway, answered_by, main_function, write_spending};
use remoe_proto::identity::Protocol;
use remoe_test_support::realm::{LIFE, TestAuthority, gateway as gateways_name, operator};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const KEYS: &str = "tenants:
  - {name: team-a, keys: [sk-a], namespaces: [a], dollarsPerDay: 1}
  - {name: team-b, keys: [sk-b], models: [b/demo]}
  - {name: admin, keys: [sk-admin], admin: true}
  - {name: metrics, keys: [sk-metrics], admin: true, models: []}
";

const POSTS: [&str; 8] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
];

#[tokio::test(flavor = "multi_thread")]
async fn request_without_a_key_for_the_model_wakes_nothing() {
    let api = Api::start().await;
    api.deploy("a/demo", "demo", None);
    api.deploy("b/demo", "demo", None);
    let gateway = Gateway::start(&api, "gateway", Some(KEYS), &[]).await;
    let body = json!({"model": "a/demo", "prompt": "x", "text": "x", "messages": []});
    for (key, status) in
        [(None, 401), (Some("sk-unknown"), 401), (Some("sk-b"), 404), (Some("sk-metrics"), 404)]
    {
        for path in POSTS {
            let answer = gateway.post(path, key, &body).await;
            assert_eq!(answer.0, status, "{path} with {key:?}: {answer:?}");
            assert!(key.is_some() || !answer.1.contains("demo"), "{answer:?}");
        }
        let placement = gateway.get("/v1/placement?model=a/demo", key).await;
        assert_eq!(placement.0, status, "{key:?}: {placement:?}");
        for path in ["/v1/models", "/v1/models/a/demo", "/status", "/metrics"] {
            let answer = gateway.get(path, key).await;
            assert!(
                answer.0 == status || (status == 404 && answer.0 == 200),
                "{path} with {key:?}: {answer:?}"
            );
        }
    }
    // A request for a sleeping model would be reported at once.
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert_eq!((api.max_waiting("a/demo"), api.max_waiting("b/demo")), (0, 0));
    let models = gateway.get("/v1/models", Some("sk-b")).await.1;
    assert!(models.contains("b/demo") && !models.contains("a/demo"), "{models}");

    let waiting_request = gateway.ask(Some("sk-b"), Some("demo"));
    let ((), answer) = tokio::join!(
        async {
            api.wait_for_wake("b/demo").await;
            api.deploy("b/demo", "demo", Some(main_function("b/demo").await));
        },
        waiting_request
    );
    assert_eq!(
        (answered_by(&answer).as_deref(), api.max_waiting("a/demo")),
        (Some("b/demo"), 0),
        "{answer:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn spending_is_shown_to_admin_keys_only() {
    let api = Api::start().await;
    api.deploy("a/demo", "demo", Some(main_function("a/demo").await));
    let folder = tempfile::tempdir().unwrap();
    write_spending(folder.path(), "gateway", "team-a", 7);
    let ledger = format!("--ledger={}", folder.path().display());
    let gateway = Gateway::start(&api, "gateway", Some(KEYS), &[&ledger]).await;
    assert_eq!(gateway.ask(Some("sk-a"), Some("demo")).await.0, 200);
    let spent = "remoe_budget_spent_nanodollars{model=\"\",tenant=\"team-a\"} 7\n";
    for key in [None, Some("sk-a"), Some("sk-b")] {
        let (status, page) = gateway.scrape(key).await;
        assert_eq!(status, 200);
        assert!(page.contains("remoe_gateway_requests_total{"), "{page}");
        for hidden in ["remoe_cost_", "remoe_budget_", "team-a"] {
            assert!(!page.contains(hidden), "{key:?} {hidden}: {page}");
        }
    }
    for key in ["sk-admin", "sk-metrics"] {
        let (status, page) = gateway.scrape(Some(key)).await;
        assert!(
            status == 200 && page.contains(spent) && page.contains("remoe_cost_paid_nanodollars "),
            "{page}"
        );
        assert!(gateway.get("/metrics", Some(key)).await.1.contains(spent));
    }
    assert_eq!(gateway.scrape(Some("sk-unknown")).await.0, 401);
    assert!(!gateway.get("/metrics", Some("sk-b")).await.1.contains("team-a"));
}

/// Connections made after the files have changed get the new certificate.
#[tokio::test(flavor = "multi_thread")]
async fn clients_get_tls_and_a_renewed_certificate() {
    let (api, realm) = (Api::start().await, TestAuthority::default());
    let folder = realm.write("tls", &realm.sign(&gateways_name(), LIFE), "");
    let flag = format!("--tls-dir={}", folder.display());
    let gateway = Gateway::start_within_tls(&api, KEYS, &flag).await;
    let ask = async |name| {
        let stream = TcpStream::connect(gateway.address).await.unwrap();
        let mut stream = realm.trust(&operator(), &name).connect_for(Protocol::Http, stream).await?;
        let request =
            "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-a\r\nconnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        // The gateway may close the connection without `close_notify`.
        drop(stream.read_to_end(&mut answer).await);
        Ok::<_, std::io::Error>(String::from_utf8_lossy(&answer).into_owned())
    };
    assert!(ask(gateways_name()).await.unwrap().starts_with("HTTP/1.1 200 OK"));
    assert!(ask(operator()).await.is_err());
    realm.write("tls", &realm.sign(&operator(), LIFE), "");
    tokio::time::sleep(std::time::Duration::from_millis(600)).await;
    assert!(ask(operator()).await.unwrap().starts_with("HTTP/1.1 200 OK"));

    let mut plain = TcpStream::connect(gateway.address).await.unwrap();
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    drop(plain.read_to_end(&mut answer).await);
    assert!(!String::from_utf8_lossy(&answer).contains("HTTP/1.1"), "plaintext is not answered");
}
