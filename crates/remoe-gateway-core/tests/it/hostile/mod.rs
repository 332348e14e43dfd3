//! The gateway under hostile clients: invalid requests reach no function, and no client keeps others out.

mod functions;
mod latency;
mod requests;

use crate::stage;

use futures_util::future::{FutureExt, join_all};
use futures_util::stream::{FuturesUnordered, StreamExt};
use remoe_gateway_core::{GatewayOptions, KeyFile, Keys};
use remoe_http::ConnectionLimits;
use remoe_test_support::hostile::resident;
use serde_json::json;
use stage::{LONG, Stage};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

const KEY: &str = "key-that-is-a-secret";

async fn stage() -> Stage {
    let keys = Keys::none().with_key("one", KEY).unwrap();
    // Short limits, because the test waits for them.
    let short = Duration::from_millis(500);
    let stall = GatewayOptions::default().connections.stall;
    let limits = ConnectionLimits { count: 200, head: short, idle: short, stall };
    Stage::new(GatewayOptions { keys, connections: limits, ..GatewayOptions::default() }, |_| {}, 8, None)
        .await
}

/// Writes `request` and returns everything until the gateway closes the connection.
async fn raw(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The gateway may close the connection before all is written.
    let _refused = stream.write_all(request).await;
    let mut received = Vec::new();
    let _reset = timeout(LONG, stream.read_to_end(&mut received))
        .await
        .expect("the gateway gives up clients that stall");
    String::from_utf8_lossy(&received).into_owned()
}

/// Unfinished bodies use up the budget of their sender, which is half of the total at most.
#[tokio::test(flavor = "multi_thread")]
async fn unfinished_bodies_keep_no_other_tenant_out() {
    const BODY: usize = 64 << 10;
    let keys = Keys::none().with_key("one", KEY).unwrap().with_key("two", "key-of-two").unwrap();
    let options =
        GatewayOptions { keys, body_limit: BODY, bodies_limit: 8 * BODY, ..GatewayOptions::default() };
    let stage = Stage::new(options, |_| {}, 8, None).await;
    let mut stalled = Vec::new();
    for _ in 0..8 {
        let mut stream = TcpStream::connect(stage.address).await.unwrap();
        stream.write_all(&post("Transfer-Encoding: chunked", "1\r\n{\r\n")).await.unwrap();
        stalled.push(stream);
    }
    // Bodies beyond the sender's half are refused. Which ones these are depends on the gateway's threads.
    let mut answers: FuturesUnordered<_> = stalled
        .iter_mut()
        .map(|stream| async {
            let mut received = [0; 256];
            let length = stream.read(&mut received).await.unwrap();
            String::from_utf8_lossy(&received[..length]).into_owned()
        })
        .collect();
    for _ in 0..4 {
        let received = timeout(LONG, answers.next()).await.expect("an answer").unwrap();
        assert!(received.starts_with("HTTP/1.1 429"), "{received}");
    }
    let authorization = [("authorization", "Bearer key-of-two")];
    for _ in 0..4 {
        let (head, body) = stage.ask(&json!({"model": "m", "x": 1}), &authorization).await;
        assert_eq!(head.status(), 200, "{body}");
    }
    // The gateway still waits for the other four.
    assert_eq!(answers.len(), 4);
    assert!(answers.next().now_or_never().is_none());
    drop(answers);
    // The budget of aborted bodies is given back.
    drop(stalled);
    stage.until(|stage| stage.model.load() == (0, 0)).await;
    let received = loop {
        let received = raw(stage.address, &sized(br#"{"model":"m","x":2}"#)).await;
        if statuses(&received) != [429] {
            break received;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!(statuses(&received), [200], "{received}");
}

/// Returns the status codes of all answers in `received`.
fn statuses(received: &str) -> Vec<u16> {
    let lines = received.split("HTTP/1.1 ").skip(1);
    lines.map(|line| line[..3].parse().expect("a status")).collect()
}

fn post(headers: &str, body: &str) -> Vec<u8> {
    format!(
        "POST /v1/completions HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n\
         {headers}\r\n\r\n{body}"
    )
    .into_bytes()
}

fn sized(body: &[u8]) -> Vec<u8> {
    let mut request = post(&format!("Connection: close\r\nContent-Length: {}", body.len()), "");
    request.extend_from_slice(body);
    request
}

/// Returns a request that a smuggler hides in the body of another.
fn smuggled_request() -> String {
    String::from_utf8(sized(br#"{"model":"m","x":"smuggled"}"#)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn smuggled_or_forged_requests_reach_no_function() {
    let stage = stage().await;
    let hidden = smuggled_request();
    let length = hidden.len();
    let empty = "{}";
    let refused: Vec<(&str, Vec<u8>)> = vec![
        ("two lengths", post("Content-Length: 2\r\nContent-Length: 100", &format!("{empty}{hidden}"))),
        ("a list of lengths", post("Content-Length: 2, 100", &format!("{empty}{hidden}"))),
        ("a signed length", post("Content-Length: +2", empty)),
        ("a length beyond numbers", post("Content-Length: 99999999999999999999999", empty)),
        ("a length that is negative", post("Content-Length: -1", empty)),
        ("an unknown coding", post("Transfer-Encoding: xchunked", &format!("0\r\n\r\n{hidden}"))),
        ("chunked not last", post("Transfer-Encoding: chunked, identity", &format!("0\r\n\r\n{hidden}"))),
        (
            "a coding with a space before its colon",
            post("Transfer-Encoding : chunked", &format!("0\r\n\r\n{hidden}")),
        ),
        (
            "a chunk of no size",
            post("Transfer-Encoding: chunked", &format!("zz\r\n{empty}\r\n0\r\n\r\n{hidden}")),
        ),
        (
            "a chunk beyond numbers",
            post("Transfer-Encoding: chunked", "fffffffffffffffff\r\n{}\r\n0\r\n\r\n"),
        ),
        ("a folded header", post("X-One: a\r\n b\r\nContent-Length: 2", empty)),
        ("a header without a name", post(": x\r\nContent-Length: 2", empty)),
        ("a zero in a value", post("X-One: a\0b\r\nContent-Length: 2", empty)),
        ("a lone carriage return", post("X-One: a\rX-Remoe-Tenant: root\r\nContent-Length: 2", empty)),
        ("a space in the target", b"GET /v1/models /x HTTP/1.1\r\nHost: test\r\n\r\n".to_vec()),
        ("no host", b"GET /v1/models HTTP/1.1\r\n\r\n".to_vec()),
        ("two hosts", b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n".to_vec()),
        ("another protocol", b"GET /v1/models SPDY/3\r\nHost: test\r\n\r\n".to_vec()),
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec()),
        (
            "a head that never ends",
            format!("GET / HTTP/1.1\r\nHost: test\r\nX: {}", "a".repeat(1 << 20)).into_bytes(),
        ),
        ("ten thousand headers", post(&format!("{}Content-Length: 2", "A: b\r\n".repeat(10_000)), empty)),
    ];
    for (what, request) in refused {
        let received = raw(stage.address, &request).await;
        // The gateway may close a connection without an answer if the bytes are no HTTP at all.
        assert!(statuses(&received).iter().all(|status| (400..500).contains(status)), "{what}: {received}");
        assert!(statuses(&received).len() <= 1 && !received.contains(KEY), "{what}: {received}");
        assert!(stage.functions.asked.lock().unwrap().is_empty(), "{what} reached a function");
    }
    // With both framings the chunks count (RFC 9112, 6.3). The length is not forwarded, and bytes after the chunks
    // are no request.
    let both = post(
        &format!("Transfer-Encoding: chunked\r\nContent-Length: {}", 5 + length),
        &format!("0\r\n\r\n{hidden}"),
    );
    let received = raw(stage.address, &both).await;
    assert!(statuses(&received).first().is_some_and(|status| (400..500).contains(status)), "{received}");
    let asked = stage.functions.asked.lock().unwrap().clone();
    assert!(!asked.contains(&json!("smuggled")), "{received}");
    // A valid request is forwarded completely, without the client's hop-by-hop and internal headers.
    let body = r#"{"model":"m","x":"proper"}"#;
    let headers = format!(
        "Connection: close, x-hop\r\nX-Hop: 1\r\nX-Remoe-Tenant: root\r\nProxy-Authorization: {KEY}\r\nContent-Length: {}",
        body.len()
    );
    let received = raw(stage.address, &post(&headers, body)).await;
    assert_eq!(statuses(&received), [200], "{received}");
    let headers = stage.functions.headers.lock().unwrap().clone();
    assert_eq!(headers["x-remoe-tenant"], "one");
    assert!(!headers.contains_key("x-hop") && !format!("{headers:?}").contains(KEY), "{headers:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_json_bodies_are_refused() {
    let stage = stage().await;
    let deep = |depth: usize| format!(r#"{{"model":"m","x":{}{}}}"#, "[".repeat(depth), "]".repeat(depth));
    let mut invalid = br#"{"model":"m","x":""#.to_vec();
    invalid.extend_from_slice(b"\xff\xc0\xaf\"}");
    let bodies: Vec<(&str, Vec<u8>)> = vec![
        ("nothing", Vec::new()),
        ("no object", b"[1]".to_vec()),
        ("cut off", br#"{"model":"m""#.to_vec()),
        ("two objects", br#"{"model":"m"}{"model":"m"}"#.to_vec()),
        ("a field twice", br#"{"model":"m","model":"n"}"#.to_vec()),
        ("a comment", b"{\"model\":\"m\" /* x */}".to_vec()),
        ("not a number", br#"{"model":"m","x":NaN}"#.to_vec()),
        ("half a surrogate", br#"{"model":"\ud800"}"#.to_vec()),
        ("bytes that are no text", invalid),
        ("a zero", b"{\"model\":\"m\0\"}".to_vec()),
        ("a model that is none", br#"{"model":["m"]}"#.to_vec()),
        ("a stream that is neither", br#"{"model":"m","stream":"yes"}"#.to_vec()),
        ("nested", deep(65).into_bytes()),
        ("nested far too deeply", deep(1 << 20).into_bytes()),
    ];
    for (what, body) in bodies {
        let received = raw(stage.address, &sized(&body)).await;
        assert_eq!(statuses(&received), [400], "{what}: {received}");
        assert!(received.contains("invalid_request_error") && !received.contains(KEY), "{what}: {received}");
    }
    assert!(stage.functions.asked.lock().unwrap().is_empty());
    let large = sized(&vec![b' '; (4 << 20) + 1]);
    assert_eq!(statuses(&raw(stage.address, &large).await), [413]);
    assert_eq!(
        statuses(&raw(stage.address, &sized(deep(50).as_bytes())).await),
        [200],
        "deep, but not too deep"
    );
}

/// Clients that write one byte at a time or nothing, and thousands that only connect.
#[tokio::test(flavor = "multi_thread")]
async fn slow_clients_and_connection_floods_keep_no_client_out() {
    let all = std::env::var("REMOE_CONNECTIONS").map_or(5_000, |count| count.parse().unwrap());
    let stage = stage().await;
    // As many as the limit of file descriptors allows are open at the same time. Each has one here and two at the
    // gateway, which keeps 200 of them.
    let fitting = descriptors().saturating_sub(700);
    assert!(fitting >= 100, "a limit of {} open files is too low, 800 are needed", descriptors());
    let wave_size = fitting.min(10_000).min(all).max(1);
    let slow: Vec<_> = (0..100)
        .map(|_| {
            let address = stage.address;
            tokio::spawn(async move {
                let mut stream = TcpStream::connect(address).await.unwrap();
                // Never idle, and never complete.
                for byte in
                    b"GET /health HTTP/1.1\r\nHost: test\r\nX: ".iter().chain(std::iter::repeat(&b'a'))
                {
                    if stream.write_all(&[*byte]).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            })
        })
        .collect();
    let key = format!("Bearer {KEY}");
    let key = [("authorization", key.as_str())];
    let before = resident();
    for wave in 0..all / wave_size {
        // From many addresses, because one has too few ports.
        let open = join_all((0..wave_size).map(|number| async move {
            let socket = TcpSocket::new_v4()?;
            let third = u8::try_from((wave * 10 + number % 10) % 250 + 1).unwrap_or(1);
            socket.bind(SocketAddrV4::new(Ipv4Addr::new(127, 0, third, 1), 0).into())?;
            let mut stream = socket.connect(stage.address).await?;
            if number % 2 == 0 {
                stream.write_all(b"GET /health HTTP/1.1\r\nHost:").await?;
            }
            Ok::<_, std::io::Error>(stream)
        }));
        let body = json!({"model": "m", "x": wave});
        let (connected, (head, _)) = tokio::join!(timeout(LONG, open), stage.ask(&body, &key));
        assert_eq!(head.status(), 200, "wave {wave}");
        let connected = connected.expect("connections are taken");
        let connected_count = connected.iter().filter(|one| one.is_ok()).count();
        assert!(
            connected_count > wave_size * 9 / 10,
            "{connected_count} of {wave_size} connected: {:?}",
            connected.iter().find(|one| one.is_err())
        );
        let (head, _) = stage.ask(&body, &key).await;
        assert_eq!(head.status(), 200, "wave {wave}");
    }
    for slow in slow {
        timeout(LONG, slow).await.expect("a client that never finishes its head is given up").unwrap();
    }
    // Clients and gateway are in this process.
    let grown = resident().saturating_sub(before);
    eprintln!("{wave_size} at the same time, {all} in all: {} KiB more are resident", grown >> 10);
    assert!(grown < 64 << 20, "{grown} bytes more are resident");
}

/// A function reports 2^64 - 1 tokens for an answer. The caller is charged only what request and context allow, and
/// is not refused later.
#[tokio::test(flavor = "multi_thread")]
async fn absurd_tokens_lock_out_no_caller() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.yaml");
    std::fs::write(&file, "tenants: [{name: one, keys: [k], tokensPerMinute: 1000}]").unwrap();
    let options = GatewayOptions { keys: KeyFile::open(file).unwrap().1, ..GatewayOptions::default() };
    let stage = Stage::new(options, |_| {}, 8, None).await;
    let key = [("authorization", "Bearer k")];
    for tokens in
        ["18446744073709551615,1", "1, 18446744073709551615", "18446744073709551615, 18446744073709551615"]
    {
        let (head, body) = stage.ask(&json!({"model": "m", "max_tokens": 7, "tokens": tokens}), &key).await;
        assert_eq!(head.status(), 200, "{body}");
    }
    let (head, body) = stage.ask(&json!({"model": "m"}), &key).await;
    assert_eq!(head.status(), 200, "{body}");
    // The context has 64 tokens.
    let (_, metrics) = stage.get("/metrics", Some("k")).await;
    let value =
        |series: &str| metrics.lines().find_map(|line| line.strip_prefix(series)?.trim().parse::<u64>().ok());
    let charged = (64 + 1) + (1 + 8) + (64 + 8) + (3 + 4);
    assert_eq!(value("remoe_gateway_tokens_total{model=\"m\",tenant=\"one\"}"), Some(charged), "{metrics}");
    let bounded = value("remoe_gateway_implausible_usage_total{model=\"m\",what=\"tokens\"}");
    assert_eq!(bounded, Some(3), "{metrics}");
}

/// Answers of stalled functions use up the budget of held answers. Further answers are relayed as they arrive.
#[tokio::test(flavor = "multi_thread")]
async fn answers_beyond_the_budget_are_relayed_as_they_arrive() {
    let options = GatewayOptions { answers_limit: 1 << 20, ..GatewayOptions::default() };
    let stage = Stage::new(options, |_| {}, 8, None).await;
    let stalls = json!({"model": "m", "stalls": 900_000});
    let mut first = Box::pin(stage.send(&stalls, &[]));
    assert!(timeout(Duration::from_millis(500), &mut first).await.is_err(), "the gateway holds the answer");
    let second = stage.send(&stalls, &[]).await;
    assert_eq!(second.status(), 200);
    drop(second);
    // A small answer is always held.
    let (head, body) = stage.ask(&json!({"model": "m", "x": 1}), &[]).await;
    assert_eq!((head.status().as_u16(), &*body), (200, r#"{"x":1}"#));
}

/// While one client holds the whole answer budget and reads nothing, another one still gets errors, in any framing.
#[tokio::test(flavor = "multi_thread")]
async fn errors_reach_clients_while_one_holds_the_budget() {
    let keys = Keys::none().with_key("greedy", "g").unwrap().with_key("other", "o").unwrap();
    let options = GatewayOptions { answers_limit: 1 << 20, keys, ..GatewayOptions::default() };
    let stage = Stage::new(options, |_| {}, 8, None).await;
    let (stalls, key) = (json!({"model": "m", "stalls": 1_040_000}), [("authorization", "Bearer g")]);
    let mut held = Box::pin(stage.send(&stalls, &key));
    assert!(timeout(Duration::from_millis(500), &mut held).await.is_err(), "the gateway holds the answer");
    for chunked in [false, true] {
        for stream in [false, true] {
            let body = json!({"model": "m", "refuse": true, "chunked": chunked, "stream": stream});
            let (head, body) = stage.ask(&body, &[("authorization", "Bearer o")]).await;
            assert_eq!((head.status().as_u16(), body.contains("\"no\"")), (400, true), "{body}");
        }
    }
}

/// Returns the limit of open files of this process.
fn descriptors() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap_or(usize::MAX)
}
