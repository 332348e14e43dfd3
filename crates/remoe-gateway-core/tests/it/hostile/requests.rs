//! Hostile clients that send anything.

use super::{post, stage, statuses};
use crate::stage::LONG;
use futures_util::stream::{StreamExt, iter};
use remoe_test_support::hostile::{Cases, SeededChoices, chart_limit, has_grown_little, panics, resident};
use serde_json::json;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Number of cases in a usual test run.
const DEFAULT_CASES: usize = 600;
/// Number of concurrent clients.
const CLIENTS: usize = 16;
/// Time without an answer after which the client ends its connection.
const CLIENT_TIMEOUT: Duration = Duration::from_millis(300);

const HEADERS: [&str; 14] = [
    "X-Remoe-Tenant",
    "X-Remoe-Timing",
    "X-Remoe-Rates",
    "X-Remoe-Told",
    "X-Remoe-Cost",
    "X-Request-Timeout",
    "X-Request-Id",
    "Traceparent",
    "Expect",
    "TE",
    "Connection",
    "Content-Length",
    "Transfer-Encoding",
    "X-Api-Key",
];

/// Returns an almost valid request.
fn request(choices: &mut SeededChoices) -> Vec<u8> {
    let body = match choices.below(4) {
        0 => choices.json(8),
        1 => format!(r#"{{"model":"m","x":{},"max_tokens":{}}}"#, choices.json(8), choices.number()),
        2 => format!(
            r#"{{"model":"m","n":{},"stream":{}}}"#,
            choices.number(),
            choices.one_of(&["true", "false"])
        ),
        _ => r#"{"model":"m","x":1}"#.to_owned(),
    };
    let mut headers = Vec::new();
    for _ in 0..choices.below(4) {
        headers.extend_from_slice(choices.one_of(&HEADERS).as_bytes());
        headers.extend_from_slice(b": ");
        headers.extend(choices.header_value());
        headers.extend_from_slice(b"\r\n");
    }
    let length = if choices.once_in(8) { choices.number() } else { body.len().to_string() };
    let mut request = post(&format!("Connection: close\r\nContent-Length: {length}\r\n@"), &body);
    let at = request.iter().rposition(|byte| *byte == b'@').unwrap();
    request.splice(at..at + 3, headers);
    if choices.once_in(3) {
        choices.spoil(&mut request);
    }
    request
}

/// Writes `request` and returns the answer. Ends the connection if the gateway waits for more.
async fn send(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The gateway may close the connection before all is written.
    let _refused = stream.write_all(request).await;
    let mut received = Vec::new();
    if timeout(CLIENT_TIMEOUT, stream.read_to_end(&mut received)).await.is_err() {
        let _gone = stream.shutdown().await;
        let _reset = timeout(LONG, stream.read_to_end(&mut received)).await.expect("the connection ends");
    }
    String::from_utf8_lossy(&received).into_owned()
}

/// Clients that send anything get a valid answer or none, and other clients are served meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn generated_requests_harm_no_other_client() {
    let cases = Cases::new("requests", DEFAULT_CASES);
    let (stage, panics) = (stage().await, panics());
    let key = format!("Bearer {}", super::KEY);
    let before = resident();
    iter(0..cases.count())
        .for_each_concurrent(CLIENTS, |number| {
            let (stage, key) = (&stage, &key);
            async move {
                let received = send(stage.address, &request(&mut cases.choices(number))).await;
                // Timeouts that clients state end with 503 and 504.
                let is_expected = |status: &u16| (200..500).contains(status) || [503, 504].contains(status);
                assert!(statuses(&received).iter().all(is_expected), "case {number}: {received}");
                if number % CLIENTS == 0 {
                    let body = json!({"model": "m", "x": number});
                    let (head, body) = stage.ask(&body, &[("authorization", key)]).await;
                    assert_eq!(head.status(), 200, "beside case {number}: {body}");
                }
            }
        })
        .await;
    stage.until(|stage| stage.model.load() == (0, 0)).await;
    assert_eq!(panics.load(Ordering::SeqCst), 0);
    // Clients and gateway are in this process.
    has_grown_little(before, chart_limit("gateway"));
}
