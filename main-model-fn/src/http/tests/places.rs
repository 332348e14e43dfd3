//! Tests of connections: timeouts of request heads, limits, probes, hosts.

use super::sockets::{ends, limited, metric, post, read_until, serve};
use super::{TestServer, body_with, text_events};
use crate::engine::request::{Event, FinishReason};
use remoe_http::ConnectionLimits;
use serde_json::json;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

#[tokio::test]
async fn request_heads_have_a_shorter_timeout_than_idle_connections() {
    let server = limited(|limits| limits.head = Duration::from_millis(300));
    let address = serve(&server).await;
    let mut kept = TcpStream::connect(address).await.unwrap();
    let version = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n";
    kept.write_all(version).await.unwrap();
    read_until(&mut kept, "}").await;
    for sent in ["", "GET /ver"] {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(sent.as_bytes()).await.unwrap();
        assert!(ends(&mut client).await.is_empty(), "{sent:?}");
    }
    metric(&server, r#"remoe_http_connections_ended_total{reason="idle"} 2"#).await;
    // The idle one has waited longer than a head may take.
    kept.write_all(version).await.unwrap();
    assert!(read_until(&mut kept, "}").await.starts_with("HTTP/1.1 200"));
    kept.write_all(b"GET /ver").await.unwrap();
    assert!(ends(&mut kept).await.is_empty());
}

#[tokio::test]
async fn connections_beyond_the_limit_wait_while_all_have_requests() {
    let server = limited(|limits| limits.count = 2);
    let address = serve(&server).await;
    let mut busy = Vec::new();
    for _ in 0..2 {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(post(&body_with(json!({})).to_string()).as_bytes()).await.unwrap();
        busy.push((client, server.engine.next().await));
    }
    let mut third = TcpStream::connect(address).await.unwrap();
    third.write_all(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let early = tokio::time::timeout(Duration::from_millis(200), third.readable()).await;
    assert!(early.is_err(), "the third is served beside two others");
    // One gets its complete answer, and then its place is free.
    let (mut first, request) = busy.remove(0);
    for event in text_events(0, "ok", FinishReason::Stop)
        .into_iter()
        .chain([Event::Done(super::figures(&request.request))])
    {
        request.events.try_send(event).unwrap();
    }
    assert!(read_until(&mut first, "total_tokens").await.contains("\"ok\""));
    assert!(read_until(&mut third, "version").await.starts_with("HTTP/1.1 200"));
    assert!(ends(&mut first).await.len() < 100, "nothing but the end of the answer follows");
    assert!(!busy[0].1.events.is_closed(), "what has a request stays");
    drop((third, busy));
    metric(&server, "remoe_http_connections 0").await;
}

#[tokio::test]
async fn new_connections_replace_idle_ones() {
    const COUNT: usize = 4;
    let server = limited(|limits| limits.count = COUNT);
    let address = serve(&server).await;
    let version = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n";
    let mut busy = TcpStream::connect(address).await.unwrap();
    busy.write_all(post(&body_with(json!({})).to_string()).as_bytes()).await.unwrap();
    let request = server.engine.next().await;
    let mut idle = Vec::new();
    for number in 0..10 * COUNT {
        let mut client = TcpStream::connect(address).await.unwrap();
        // Connections that send nothing, or stop in the middle of a head.
        client.write_all(if number % 2 == 0 { b"" } else { b"GET" }).await.unwrap();
        idle.push(client);
    }
    for _ in 0..3 {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(version).await.unwrap();
        assert!(read_until(&mut client, "version").await.starts_with("HTTP/1.1 200"));
        idle.push(client);
    }
    let mut kept = idle.split_off(idle.len() - 1);
    for client in &mut idle[..9 * COUNT] {
        assert!(ends(client).await.is_empty(), "the oldest went first");
    }
    kept[0].write_all(version).await.unwrap();
    assert!(read_until(&mut kept[0], "version").await.starts_with("HTTP/1.1 200"), "the youngest is there");
    request.events.try_send(Event::Done(super::figures(&request.request))).unwrap();
    assert!(read_until(&mut busy, "total_tokens").await.starts_with("HTTP/1.1 200"));
    let text = server.get("/metrics").await.text;
    let displaced = r#"remoe_http_connections_ended_total{reason="displaced"}"#;
    assert!(text.lines().any(|line| line.starts_with(displaced)), "{text}");
}

#[tokio::test]
async fn probes_are_answered_on_a_separate_listener() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (ready, is_ready) = tokio::sync::watch::channel(false);
    let probes = remoe_http::Probes::start(Some(listener), is_ready).unwrap();
    assert_eq!(probes.address(), Some(address));
    // More than the limit, all without a request.
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    let ask = async |path: &str| {
        let mut client = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: 10.0.0.7:8081\r\nconnection: close\r\n\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        String::from_utf8(ends(&mut client).await).unwrap()
    };
    assert!(ask("/healthz").await.starts_with("HTTP/1.1 503"), "it has not loaded");
    probes.has_loaded();
    for (is_ready, health) in [(false, "503"), (true, "200"), (false, "503")] {
        ready.send_replace(is_ready);
        assert!(ask("/readyz").await.starts_with(&format!("HTTP/1.1 {health}")), "{is_ready}");
        assert!(ask("/healthz").await.starts_with("HTTP/1.1 200"));
        assert!(ask("/metrics").await.starts_with("HTTP/1.1 404"), "nothing else is there");
    }
    drop((probes, silent));
    let closed = async {
        while TcpStream::connect(address).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), closed).await.expect("it stops with its owner");
}

#[tokio::test]
async fn requests_have_exactly_one_host() {
    let server = TestServer::new();
    let address = serve(&server).await;
    for (head, status) in [
        ("HTTP/1.1\r\nhost: x\r\n", 200),
        ("HTTP/1.1\r\nHost: [::1]:8000\r\n", 200),
        ("HTTP/1.1\r\nhost:\r\n", 200),
        ("HTTP/1.1\r\n", 400),
        ("HTTP/1.1\r\nhost: x\r\nhost: x\r\n", 400),
        ("HTTP/1.1\r\nhost: x\r\nHOST: y\r\n", 400),
        ("HTTP/1.1\r\nhost: x, y\r\n", 400),
        ("HTTP/1.1\r\nhost: http://x/\r\n", 400),
        ("HTTP/1.1\r\nhost: u@x\r\n", 400),
        ("HTTP/1.0\r\n", 200),
        ("HTTP/1.0\r\nhost: x\r\n", 200),
        ("HTTP/1.0\r\nhost: x\r\nhost: x\r\n", 400),
    ] {
        let mut client = TcpStream::connect(address).await.unwrap();
        let request = format!("GET /version {head}connection: close\r\n\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        let answer = String::from_utf8(ends(&mut client).await).unwrap();
        assert!(answer.get(9..12) == Some(&status.to_string()), "{head:?}: {answer}");
        assert_eq!(answer.contains("invalid_host"), status == 400, "{answer}");
    }
}

#[test]
fn limits_of_connections_come_from_the_environment() {
    let limits = |value: Option<&str>| ConnectionLimits::from_environment(|_| value.map(str::to_owned));
    let usual = ConnectionLimits {
        count: 480,
        head: Duration::from_secs(10),
        idle: Duration::from_secs(75),
        stall: Duration::from_secs(60),
    };
    let three = Duration::from_secs(3);
    assert_eq!(limits(None), usual);
    assert_eq!(limits(Some("3")), ConnectionLimits { count: 3, head: three, idle: three, stall: three });
    for wrong in ["", "0", "-1", "1.5", "x", "99999999999999999999"] {
        assert_eq!(limits(Some(wrong)), usual, "{wrong:?}");
    }
}
