//! Mutual TLS with main functions: both ends prove their identities.

use crate::stage;

use axum::Router;
use axum::routing::post;
use remoe_gateway_core::{Backend, GatewayOptions, RunningFunctions};
use remoe_http::{ConnectionLimits, ConnectionMetrics};
use remoe_proto::TlsHandshake;
use remoe_proto::identity::Identity;
use remoe_test_support::realm::{TestAuthority, gateway, main_of};
use serde_json::json;
use stage::Stage;
use std::net::SocketAddr;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Starts a main function of `deployment` that only serves gateways. Returns its address.
async fn main_function(realm: &TestAuthority, deployment: &str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let handshake = TlsHandshake::new(realm.trust(&main_of(deployment), &gateway()), |_| {});
    let routes = Router::new().route("/v1/completions", post(|body: String| async { body }));
    let metrics = ConnectionMetrics::new().unwrap();
    let (limits, stop) = (ConnectionLimits::PROBES, CancellationToken::new());
    tokio::spawn(remoe_http::serve(listener, Some(handshake), routes, limits, metrics, stop));
    address
}

/// A pooled connection to a function is never used for another function at the same address, nor for a plaintext one.
#[tokio::test(flavor = "multi_thread")]
async fn request_reaches_only_the_function_of_its_identity() {
    let realm = TestAuthority::default();
    let keyring = realm.trust(&gateway(), &main_of("one")).keyring;
    let options = GatewayOptions { keyring: Some(keyring), ..GatewayOptions::default() };
    let mut stage = Stage::new(options, |_| {}, 8, None).await;
    stage.stop_launcher().await;
    let address = main_function(&realm, "one").await;
    let mut ids = 100;
    let mut report_running = |identity: Option<Identity>| {
        ids += 1;
        let backend = Backend { id: ids, address, identity, capacity: 8, authorization: None, billing: None };
        stage.model.set_running_functions(RunningFunctions {
            order: u64::MAX,
            backends: vec![backend],
            ..RunningFunctions::default()
        });
    };
    let body = json!({"model": "m", "x": 1});
    report_running(Some(main_of("one")));
    for _ in 0..2 {
        let (head, text) = stage.ask(&body, &[]).await;
        assert_eq!((head.status().as_u16(), text), (200, body.to_string()));
    }
    for identity in [Some(main_of("other")), Some(gateway()), None] {
        report_running(identity.clone());
        let (head, text) = stage.ask(&body, &[("x-request-timeout", "0.5")]).await;
        assert_eq!(head.status().as_u16(), 503, "{identity:?}: {text}");
    }
    report_running(Some(main_of("one")));
    assert_eq!(stage.ask(&body, &[]).await.0.status().as_u16(), 200);
}
