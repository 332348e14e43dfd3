//! HTTP port of a main function with identities: it answers gateways as it answers every client without identities,
//! and rejects all other clients. Certificates rotate during streams.

use remoe_proto::identity::{Counterpart, Identity, Keyring, Trust};
use remoe_test_support::deadline::{SOON, until, within};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, StartOptions};
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::raw::{self, Connection};
use remoe_test_support::realm::{
    DEPLOYMENT, LIFE, TestAuthority, gateway, main_of, operator, remote_of, with_identity,
};
use serde_json::json;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::sleep;

const COMPLETIONS: &str = "/v1/completions";

/// Main function with only local experts that accepts requests from gateways alone.
async fn start(realm: &TestAuthority, options: StartOptions) -> MainFunction {
    let options = realm.main(options).with("--gateway-identity", gateway());
    let options = options.with("--metrics-listen", "127.0.0.1:0");
    let trust = realm.trust(&operator(), &main_of(DEPLOYMENT));
    let main = MainFunction::start_within(&ModelFixture::demo().folder, options, trust).await;
    main.control.route(&[], &[]).await;
    main
}

async fn metrics(main: &MainFunction) -> MetricsPage {
    MetricsPage::read(main.announcement.metrics.unwrap()).await
}

async fn refused(main: &MainFunction, reason: &str) -> u64 {
    metrics(main).await.value(&format!("remoe_connections_refused_total{{reason=\"{reason}\"}}"))
}

/// Returns the trust with which `own` connects to the main function under test.
fn shown(realm: &TestAuthority, own: &Identity) -> Trust {
    realm.trust(own, &main_of(DEPLOYMENT))
}

/// Returns a completion request of `tokens` tokens.
fn completion(tokens: usize, stream: bool) -> String {
    let body = json!({"prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
        "stream": stream});
    raw::post(COMPLETIONS, &body.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn main_function_answers_only_gateways_of_the_release() {
    let (realm, other) = (TestAuthority::default(), TestAuthority::default());
    let main = start(&realm, StartOptions::default()).await;
    let address = main.http();
    let mut known = Connection::secured(address, &shown(&realm, &gateway())).await.unwrap();
    for _ in 0..2 {
        known.write(completion(4, false)).await.unwrap();
        let answer = known.answer().await.unwrap().ok();
        assert_eq!(answer["usage"]["completion_tokens"], 4);
    }
    known.write(completion(4, true)).await.unwrap();
    assert!(known.answer().await.unwrap().events().len() >= 4);

    let beside = Identity::Gateway { namespace: "elsewhere".to_owned() };
    let strangers = [beside, operator(), main_of(DEPLOYMENT), main_of("other"), remote_of(DEPLOYMENT)];
    for own in &strangers {
        // The client's handshake completes before the server checks the identity.
        let mut connection = Connection::secured(address, &shown(&realm, own)).await.unwrap();
        let _closed = connection.write(raw::get("/health")).await;
        assert!(connection.answer().await.is_err(), "{own} is answered");
    }
    assert_eq!(refused(&main, "identity").await, strangers.len() as u64);

    // A correct name from another authority; no TLS; another protocol.
    let before = refused(&main, "handshake").await;
    assert!(Connection::secured(address, &shown(&other, &gateway())).await.is_err());
    let mut open = Connection::open(address).await;
    open.write(raw::get("/health")).await.unwrap();
    assert!(open.answer().await.is_err());
    let stream = TcpStream::connect(address).await.unwrap();
    assert!(shown(&realm, &gateway()).connect(stream).await.is_err(), "gRPC is not spoken there");
    let all = async || (refused(&main, "handshake").await == before + 3).then_some(());
    until(SOON, "three refused handshakes", all).await;

    // A gateway sends requests only to the intended main function.
    let elsewhere = realm.trust(&gateway(), &main_of("other"));
    let error = Connection::secured(address, &elsewhere).await.err().unwrap();
    assert!(error.to_string().contains(&main_of(DEPLOYMENT).to_string()), "{error}");

    known.write(completion(4, false)).await.unwrap();
    known.answer().await.unwrap().ok();
}

/// A main function with a gateway identity but no certificate of its own fails to start.
#[tokio::test(flavor = "multi_thread")]
async fn gateways_are_known_by_a_certificate_of_ones_own() {
    let options = StartOptions::default().with("--gateway-identity", gateway());
    let (status, log) = MainFunction::refuse(&ModelFixture::demo().folder, options).await;
    assert_eq!(status.code(), Some(2), "{log:?}");
}

/// Certificates are rotated, finally to another authority, during streams. A client that disconnects ends its work.
#[tokio::test(flavor = "multi_thread")]
async fn certificates_change_under_running_streams() {
    const LIVES: Duration = Duration::from_secs(60);
    let (realm, next) = (TestAuthority::default(), TestAuthority::default());
    let both = format!("{}{}", realm.certificate(), next.certificate());
    let renew = |signs: &TestAuthority, authorities: &str| {
        let write = |name: &str, own: &Identity| realm.write(name, &signs.sign(own, LIVES), authorities);
        (write("main", &main_of(DEPLOYMENT)), write("gateway", &gateway()))
    };
    let (as_main, as_gateway) = renew(&realm, realm.certificate());
    let options = with_identity(StartOptions::default(), &as_main).with("--operator-identity", operator());
    let options = options.with("--gateway-identity", gateway()).with("--metrics-listen", "127.0.0.1:0");
    let by_operator = realm.trust(&operator(), &main_of(DEPLOYMENT));
    let main = MainFunction::start_within(&ModelFixture::demo().folder, options, by_operator).await;
    main.control.route(&[], &[]).await;
    let trust = Trust {
        keyring: Keyring::from_folder(&as_gateway).unwrap(),
        peer: Counterpart::Named(main_of(DEPLOYMENT)),
    };
    let begin = async || {
        let mut connection = Connection::secured(main.http(), &trust).await.unwrap();
        connection.write(completion(900, true)).await.unwrap();
        assert_eq!(connection.head().await.unwrap().status, 200);
        connection.chunk().await.unwrap().unwrap();
        connection
    };
    renew(&realm, realm.certificate());
    sleep(Duration::from_millis(600)).await;
    let mut streams = Vec::new();
    for _ in 0..16 {
        streams.push(begin().await);
    }
    let reading = streams.into_iter().map(|mut stream| {
        tokio::spawn(async move {
            let mut end = Vec::new();
            while let Some(chunk) = stream.chunk().await.unwrap() {
                end = chunk;
            }
            String::from_utf8(end).unwrap()
        })
    });
    let reading: Vec<_> = reading.collect();
    for (signs, authorities) in
        [(&realm, realm.certificate()), (&realm, &both), (&next, &both), (&next, next.certificate())]
    {
        renew(signs, authorities);
        // Both ends reload their files.
        sleep(Duration::from_millis(600)).await;
        let mut fresh = Connection::secured(main.http(), &trust).await.unwrap();
        fresh.write(raw::get("/health")).await.unwrap();
        assert_eq!(fresh.answer().await.unwrap().head.status, 200);
    }
    for stream in reading {
        let end = within(SOON, "the end of a stream", stream).await.unwrap();
        assert!(end.ends_with("data: [DONE]\n\n"), "{end}");
    }
    assert_eq!(refused(&main, "identity").await, 0);
    renew(&next, next.certificate());
    sleep(Duration::from_millis(600)).await;
    drop(begin().await);
    let idle = async || (metrics(&main).await.value("remoe_requests_running") == 0).then_some(());
    until(SOON, "the end of the work for who left", idle).await;
}

/// Idle connections, half handshakes and half request heads do not keep a gateway out, and are closed.
#[tokio::test(flavor = "multi_thread")]
async fn strangers_keep_no_gateway_out() {
    const PLACES: usize = 16;
    /// Start of a ClientHello of 512 bytes.
    const HALF: [u8; 11] = [22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3];
    let realm = TestAuthority::default();
    let mut options = StartOptions::default();
    options.environment.push(("REMOE_HTTP_MAX_CONNECTIONS", PLACES.to_string()));
    options.environment.push(("REMOE_HTTP_HEAD_S", "8".to_owned()));
    let main = start(&realm, options).await;
    let trust = realm.trust_for(&gateway(), &main_of(DEPLOYMENT), LIFE);
    let mut held = Vec::new();
    for number in 0..6 * PLACES {
        let mut connection = Connection::open(main.http()).await;
        if number % 2 == 0 {
            connection.write(HALF).await.unwrap();
        }
        held.push(connection);
    }
    let mut known = within(SOON, "a handshake", Connection::secured(main.http(), &trust)).await.unwrap();
    known.write(completion(4, false)).await.unwrap();
    known.answer().await.unwrap().ok();
    let displaced = "remoe_http_connections_ended_total{reason=\"displaced\"}";
    assert!(metrics(&main).await.value(displaced) >= 4 * PLACES as u64);

    // Below the connection limit, they are closed after the handshake or header timeout.
    drop(held);
    let mut silent = TcpStream::connect(main.http()).await.unwrap();
    let end = within(SOON, "the end of a handshake that never began", silent.read(&mut [0; 1])).await;
    assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    assert!(refused(&main, "timeout").await > 0);
    let mut slow = Connection::secured(main.http(), &trust).await.unwrap();
    slow.write("GET /health HTTP/1.1\r\nHost:").await.unwrap();
    assert!(within(SOON, "the end of half a head", slow.answer()).await.is_err());
    let idle = metrics(&main).await.value("remoe_http_connections_ended_total{reason=\"idle\"}");
    assert!(idle > 0);
}
