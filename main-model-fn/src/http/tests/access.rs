//! Tests of API keys, CORS origins and request ids.

use super::{HttpOptions, Reply, TestServer, figures, text_events};
use crate::engine::request::{Event, FinishReason};
use crate::pages::CacheScope;
use axum::body::Body;
use axum::http::{Method, Request};

async fn send(server: &TestServer, method: Method, path: &str, headers: &[(&str, &[u8])]) -> Reply {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    server.send(request.body(Body::empty()).unwrap()).await
}

async fn get(server: &TestServer, path: &str, headers: &[(&str, &[u8])]) -> Reply {
    send(server, Method::GET, path, headers).await
}

#[tokio::test]
async fn key_protects_every_route_except_health() {
    let server = TestServer::with(|options| options.api_key = Some("secret-key".into()));
    for (method, path) in [
        (Method::POST, "/v1/chat/completions"),
        (Method::POST, "/v1/completions"),
        (Method::POST, "/v1/embeddings"),
        (Method::POST, "/tokenize"),
        (Method::POST, "/detokenize"),
        (Method::GET, "/v1/models"),
        (Method::GET, "/v1/models/org/tiny"),
        (Method::GET, "/metrics"),
        (Method::GET, "/version"),
        (Method::GET, "/nowhere"),
        (Method::DELETE, "/v1/models"),
        (Method::OPTIONS, "/v1/models"),
        (Method::GET, "/health/"),
    ] {
        let reply = send(&server, method, path, &[]).await;
        let error = reply.error(401);
        assert_eq!(error["code"], "invalid_api_key");
        assert_eq!(error["type"], "authentication_error");
        assert_eq!(reply.header("www-authenticate"), "Bearer");
    }
    assert_eq!(get(&server, "/health", &[]).await.status, 200);
}

#[tokio::test]
async fn only_the_complete_key_is_accepted() {
    let server = TestServer::with(|options| options.api_key = Some("secret-key".into()));
    let body_with = async |value: &[u8]| get(&server, "/version", &[("authorization", value)]).await;
    for value in ["Bearer secret-key", "bearer secret-key", "Bearer  secret-key"] {
        assert_eq!(body_with(value.as_bytes()).await.status, 200, "{value}");
    }
    let wrong: [&[u8]; 9] = [
        b"Bearer secret-ke",
        b"Bearer secret-key2",
        b"Bearer secret-keY",
        b"Bearer ",
        b"Bearer",
        b"Basic secret-key",
        b"secret-key",
        b"",
        b"Bearer secret-key\xff",
    ];
    for value in wrong {
        let reply = body_with(value).await;
        reply.error(401);
        assert!(!reply.text.contains("secret-key"));
    }
    let server = TestServer::with(|options| options.api_key = Some("a\0".into()));
    get(&server, "/version", &[("authorization", b"Bearer a")]).await.error(401);
}

#[tokio::test]
async fn without_a_key_all_requests_are_accepted() {
    let server = TestServer::new();
    assert_eq!(get(&server, "/version", &[]).await.status, 200);
    assert_eq!(get(&server, "/version", &[("authorization", b"Bearer whatever")]).await.status, 200);
}

#[tokio::test]
async fn request_ids_are_kept_or_created() {
    let server = TestServer::with(|options| options.api_key = Some("k".into()));
    for path in ["/health", "/nowhere", "/version"] {
        let reply = get(&server, path, &[("x-request-id", b"abc-123_~!")]).await;
        assert_eq!(reply.header("x-request-id"), "abc-123_~!", "{path}");
        assert_eq!(get(&server, path, &[]).await.header("x-request-id").len(), 32);
    }
    let longest = [b'a'; 128];
    assert_eq!(
        get(&server, "/health", &[("x-request-id", &longest)]).await.header("x-request-id").len(),
        128
    );
    let bad: [&[u8]; 5] = [b"", b"a b", b"a\tb", b"\xe2\x82\xac", &[b'a'; 129]];
    for id in bad {
        let reply = get(&server, "/health", &[("x-request-id", id)]).await;
        assert_eq!(reply.header("x-request-id").len(), 32, "{id:?}");
    }
    let first = get(&server, "/health", &[]).await;
    let second = get(&server, "/health", &[]).await;
    assert_ne!(first.header("x-request-id"), second.header("x-request-id"));
}

#[tokio::test]
async fn only_configured_origins_are_allowed() {
    let preflight: [(&str, &[u8]); 3] = [
        ("origin", b"https://a.example"),
        ("access-control-request-method", b"POST"),
        ("access-control-request-headers", b"authorization,content-type"),
    ];
    let server = TestServer::new();
    let reply = get(&server, "/health", &preflight[..1]).await;
    assert_eq!(reply.header("access-control-allow-origin"), "");
    let reply = send(&server, Method::OPTIONS, "/v1/completions", &preflight).await;
    reply.error(405);
    assert_eq!(reply.header("access-control-allow-origin"), "");

    let server = TestServer::with(|options| {
        options.cors_origins = ["https://a.example".into()].into();
        options.api_key = Some("k".into());
    });
    let reply = send(&server, Method::OPTIONS, "/v1/completions", &preflight).await;
    assert_eq!(reply.status, 204);
    assert_eq!(reply.header("access-control-allow-origin"), "https://a.example");
    assert_eq!(reply.header("access-control-allow-methods"), "GET, POST, DELETE");
    assert_eq!(reply.header("access-control-allow-headers"), "authorization,content-type");
    assert_eq!(reply.header("vary"), "origin");
    let reply = get(&server, "/version", &preflight[..1]).await;
    reply.error(401);
    assert_eq!(reply.header("access-control-allow-origin"), "https://a.example", "errors can be read too");
    assert!(reply.header("access-control-expose-headers").contains("x-request-id"));
    let other: [(&str, &[u8]); 2] =
        [("origin", b"https://b.example"), ("access-control-request-method", b"POST")];
    let reply = send(&server, Method::OPTIONS, "/v1/completions", &other).await;
    reply.error(401);
    assert_eq!(reply.header("access-control-allow-origin"), "");
    assert_eq!(reply.header("vary"), "origin");

    let server = TestServer::with(|options| options.cors_origins = ["*".into()].into());
    let reply = get(&server, "/health", &other).await;
    assert_eq!(reply.header("access-control-allow-origin"), "https://b.example");
}

/// A client that names another tenant does not find its prefixes in the cache.
#[tokio::test]
async fn tenant_is_accepted_from_gateways_only() {
    type OptionsChange = fn(&mut HttpOptions);
    let keys: OptionsChange = |options| {
        options.api_key = Some("client".into());
        options.gateway_key = Some("gateway".into());
    };
    let identity: OptionsChange = |options| options.is_only_for_gateways = true;
    let cases: [(OptionsChange, &[u8], bool); 5] = [
        (|_| (), b"Bearer gateway", false),
        (|options| options.api_key = Some("client".into()), b"Bearer client", false),
        (keys, b"Bearer client", false),
        (keys, b"Bearer gateway", true),
        (identity, b"", true),
    ];
    for (change, key, is_believed) in cases {
        let server = TestServer::with(change);
        let ask = async |tenant: Option<&str>| {
            let mut request = Request::post("/v1/completions").header("authorization", key);
            if let Some(tenant) = tenant {
                request = request.header("x-remoe-tenant", tenant);
            }
            let body = Body::from(r#"{"prompt": "a", "max_tokens": 1}"#);
            let request = request.body(body).unwrap();
            let requests = async {
                let requests = server.engine.next().await;
                for event in text_events(0, "x", FinishReason::Stop)
                    .into_iter()
                    .chain([Event::Done(figures(&requests.request))])
                {
                    requests.events.send(event).await.unwrap();
                }
                requests.request.tenant
            };
            let (reply, tenant) = tokio::join!(server.send(request), requests);
            assert_eq!(reply.status, 200);
            tenant
        };
        let named = CacheScope::named(b"one");
        assert_eq!(ask(Some("one")).await == named, is_believed);
        assert_eq!(ask(Some("one")).await == ask(Some("one")).await, is_believed);
        // Requests without a tenant share one.
        assert_eq!(ask(None).await, CacheScope::default());
    }
    let server = TestServer::with(|options| options.gateway_key = Some("gateway".into()));
    get(&server, "/version", &[]).await.error(401);
    get(&server, "/version", &[("authorization", b"Bearer client")]).await.error(401);
    assert_eq!(get(&server, "/version", &[("authorization", b"Bearer gateway")]).await.status, 200);
}
