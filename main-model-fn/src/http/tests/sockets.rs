//! Tests of the router on a socket, with clients that write raw HTTP.

use super::{TestServer, body_with, text_events};
use crate::engine::request::{Delta, Event, FinishReason};
use remoe_http::ConnectionLimits;
use serde_json::json;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

pub(super) async fn serve(server: &TestServer) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    server.serve(listener);
    address
}

pub(super) fn post(body: &str) -> String {
    let length = body.len();
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// Reads until the server closes or `end` was received.
pub(super) async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut text = String::new();
    let mut buffer = vec![0; 65536];
    while !text.contains(end) {
        let read = tokio::time::timeout(Duration::from_secs(20), stream.read(&mut buffer));
        match read.await.expect("the server answers").unwrap() {
            0 => break,
            count => text.push_str(&String::from_utf8_lossy(&buffer[..count])),
        }
    }
    text
}

#[tokio::test]
async fn chunks_are_sent_immediately() {
    let server = TestServer::new();
    let mut client = TcpStream::connect(serve(&server).await).await.unwrap();
    client.write_all(post(&body_with(json!({"stream": true})).to_string()).as_bytes()).await.unwrap();
    let requests = server.engine.next().await;
    for byte in ["a", "b"] {
        for event in text_events(0, byte, FinishReason::Stop).into_iter().take(1) {
            requests.events.try_send(event).unwrap();
        }
        let got = read_until(&mut client, &format!(r#""text":"{byte}""#)).await;
        assert!(got.contains(&format!(r#""text":"{byte}""#)), "{got}");
    }
    requests.events.try_send(Event::Done(super::figures(&requests.request))).unwrap();
    assert!(read_until(&mut client, "\r\n0\r\n\r\n").await.contains("data: [DONE]\n\n"));
}

#[tokio::test]
async fn disconnect_ends_the_request() {
    let server = TestServer::new();
    let address = serve(&server).await;
    for stream in [true, false] {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(post(&body_with(json!({ "stream": stream })).to_string()).as_bytes()).await.unwrap();
        let requests = server.engine.next().await;
        if stream {
            requests.events.try_send(text_events(0, "x", FinishReason::Stop).remove(0)).unwrap();
            read_until(&mut client, r#""text":"x""#).await;
        }
        assert!(!requests.events.is_closed());
        drop(client);
        tokio::time::timeout(Duration::from_secs(10), requests.events.closed())
            .await
            .expect("the events are dropped");
    }
}

#[tokio::test]
async fn too_large_body_gets_an_error_answer() {
    let server = TestServer::with(|options| options.body_limit = 1000);
    let address = serve(&server).await;
    // Writes the whole body before it reads, like many clients.
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all(post(&"x".repeat(8 << 20)).as_bytes()).await.unwrap();
    let answer = read_until(&mut client, "request_too_large").await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    assert!(answer.contains("request_too_large"));
    // A client with `Expect` gets the error before it writes the body.
    let mut client = TcpStream::connect(address).await.unwrap();
    let head =
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9999\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    assert!(read_until(&mut client, "request_too_large").await.starts_with("HTTP/1.1 413"));
}

#[tokio::test]
async fn garbage_does_not_disturb_other_clients() {
    let server = TestServer::new();
    let address = serve(&server).await;
    let mut streams = Vec::new();
    for garbage in [
        &b"\x16\x03\x01\x02\x00\x01"[..],
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        &[0xff; 4096],
    ] {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(garbage).await.unwrap();
        streams.push(client);
    }
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all(post(&body_with(json!({})).to_string()).as_bytes()).await.unwrap();
    let serve = server.engine.serve(|request| {
        let mut events = text_events(0, "ok", FinishReason::Stop);
        events.push(Event::Done(super::figures(request)));
        events
    });
    let answer = tokio::select! {
        answer = read_until(&mut client, "total_tokens") => answer,
        () = serve => unreachable!("the engine serves for ever"),
    };
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(r#""text":"ok""#), "{answer}");
}

#[tokio::test]
async fn connection_serves_several_requests() {
    let server = TestServer::new();
    let mut client = TcpStream::connect(serve(&server).await).await.unwrap();
    for _ in 0..3 {
        client.write_all(post("{").as_bytes()).await.unwrap();
        assert!(read_until(&mut client, "}}").await.starts_with("HTTP/1.1 400"));
    }
}

/// Clients that read get their answers, although others stop reading or disconnect; the requests of those end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_streams_with_slow_and_lost_clients() {
    const CLIENTS: usize = 200;
    const TOKENS: usize = 300;
    let limits = crate::engine::RequestLimits {
        max_requests: CLIENTS,
        context_length: 4000,
        cache_pages: 125,
        ..super::Engine::limits()
    };
    let server = TestServer::build(Some(std::sync::Arc::new(super::ByteTokenizer)), limits, |_| ());
    let address = serve(&server).await;
    let engine = async {
        let mut running = Vec::new();
        for _ in 0..CLIENTS {
            let requests = server.engine.next().await;
            running.push(tokio::spawn(async move {
                for event in text_events(0, &"x".repeat(TOKENS), FinishReason::Length) {
                    // The engine always has room; a client may be gone.
                    assert!(
                        requests.events.is_closed()
                            || requests.events.try_send(event).is_ok()
                            || requests.events.is_closed()
                    );
                    tokio::task::yield_now().await;
                }
                let _client_gone = requests.events.try_send(Event::Done(super::figures(&requests.request)));
            }));
        }
        for task in running {
            task.await.unwrap();
        }
    };
    let body = body_with(json!({"stream": true, "max_tokens": TOKENS, "ignore_eos": true})).to_string();
    let clients = (0..CLIENTS).map(|client| {
        let body = body.clone();
        tokio::spawn(async move {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(post(&body).as_bytes()).await.unwrap();
            match client % 4 {
                0 => drop(read_until(&mut stream, r#""text":"x""#).await),
                1 => {
                    // The head is sent once the engine has the request; earlier disconnects would not count.
                    stream.readable().await.unwrap();
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                _ => {
                    let got = read_until(&mut stream, "[DONE]").await;
                    assert_eq!(got.matches(r#""text":"x""#).count(), TOKENS);
                    assert!(got.contains("data: [DONE]"));
                }
            }
        })
    });
    let clients = clients.collect::<Vec<_>>();
    tokio::time::timeout(Duration::from_secs(60), engine).await.expect("all requests end");
    for client in clients {
        client.await.unwrap();
    }
    let idle = async {
        while !server.get("/metrics").await.text.contains("remoe_requests_in_flight 0\n") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), idle).await.expect("nothing is left over");
}

/// Opens a connection with a small receive buffer, as of clients that read slowly or never.
async fn connect_narrow(address: std::net::SocketAddr) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(address).await.unwrap()
}

/// Creates a server with long timeouts; `change` shortens those of the test.
pub(super) fn limited(change: impl FnOnce(&mut ConnectionLimits)) -> TestServer {
    let limits =
        crate::engine::RequestLimits { context_length: 4000, cache_pages: 125, ..super::Engine::limits() };
    TestServer::build(Some(std::sync::Arc::new(super::ByteTokenizer)), limits, |options| {
        let far = Duration::from_secs(3600);
        options.connections = ConnectionLimits { count: 100, head: far, idle: far, stall: far };
        change(&mut options.connections);
    })
}

/// Waits until `/metrics` has `line`.
pub(super) async fn metric(server: &TestServer, line: &str) {
    let line = format!("{line}\n");
    let seen = async {
        while !server.get("/metrics").await.text.contains(&line) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let seen = tokio::time::timeout(Duration::from_secs(20), seen).await;
    assert!(seen.is_ok(), "no {line:?} in {}", server.get("/metrics").await.text);
}

/// Returns events with more text than a connection buffers.
fn long_answer() -> Vec<Event> {
    let text = "x".repeat(64 << 10);
    let delta = Delta { choice: 0, token: Some(120), text, logprobs: None };
    let mut events = vec![Event::Delta(delta); 300];
    events.push(Event::Finished { choice: 0, reason: FinishReason::Length });
    events
}

pub(super) async fn ends(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut bytes));
    // A reset also ends the connection.
    let _outcome = read.await.expect("the server ends the connection");
    bytes
}

#[tokio::test]
async fn client_that_reads_nothing_is_disconnected() {
    for stream in [true, false] {
        let server = limited(|limits| limits.stall = Duration::from_millis(100));
        let mut client = connect_narrow(serve(&server).await).await;
        let body = body_with(json!({"stream": stream, "max_tokens": 900})).to_string();
        client.write_all(post(&body).as_bytes()).await.unwrap();
        let requests = server.engine.next().await;
        for event in long_answer() {
            requests.events.try_send(event).expect("the engine never waits for a client");
        }
        requests.events.try_send(Event::Done(super::figures(&requests.request))).unwrap();
        let closed = tokio::time::timeout(Duration::from_secs(20), requests.events.closed());
        closed.await.expect("the work of a client that stopped reading ends");
        metric(&server, r#"remoe_http_connections_ended_total{reason="stalled"} 1"#).await;
        metric(&server, "remoe_http_connections 0").await;
        metric(&server, "remoe_requests_in_flight 0").await;
        // The stream is recognizably incomplete.
        let got = String::from_utf8_lossy(&ends(&mut client).await).into_owned();
        assert!(!got.contains("[DONE]") && !got.ends_with("0\r\n\r\n"), "{}", got.len());
    }
}

#[tokio::test]
async fn slow_client_gets_the_complete_answer() {
    let server = limited(|limits| {
        limits.stall = Duration::from_secs(2);
        limits.idle = Duration::from_secs(2);
    });
    let mut client = connect_narrow(serve(&server).await).await;
    let body = body_with(json!({"max_tokens": 900})).to_string();
    client.write_all(post(&body).as_bytes()).await.unwrap();
    let requests = server.engine.next().await;
    for event in long_answer() {
        requests.events.try_send(event).unwrap();
    }
    requests.events.try_send(Event::Done(super::figures(&requests.request))).unwrap();
    let mut got = vec![0; 64 << 10];
    let (mut seen, mut step) = (0, 0);
    while seen < 300 * (64 << 10) {
        let read = tokio::time::timeout(Duration::from_secs(20), client.read(&mut got));
        let count = read.await.expect("there is more").unwrap();
        assert_ne!(count, 0, "the connection ended after {seen} bytes");
        seen += count;
        // Thirty pauses, in total longer than the timeouts.
        if seen / (1 << 19) > step {
            step = seen / (1 << 19);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    metric(&server, "remoe_http_connections 1").await;
}

#[tokio::test]
async fn clients_without_a_request_are_disconnected() {
    let server = limited(|limits| {
        limits.head = Duration::from_millis(200);
        limits.idle = Duration::from_millis(200);
    });
    let address = serve(&server).await;
    for (sent, answered) in [
        (String::new(), false),
        ("POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow:".to_owned(), false),
        // Kept alive until the timeout.
        ("GET /version HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), true),
        (post("{"), true),
        // The next request is incomplete.
        (post("{") + "GET /ver", true),
    ] {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(sent.as_bytes()).await.unwrap();
        assert_eq!(!ends(&mut client).await.is_empty(), answered, "{sent:?}");
    }
    metric(&server, r#"remoe_http_connections_ended_total{reason="idle"} 5"#).await;
    metric(&server, "remoe_http_connections 0").await;
    // A client that writes its head slowly is disconnected at last.
    let mut client = TcpStream::connect(address).await.unwrap();
    while client.write_all(b"x").await.is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    metric(&server, r#"remoe_http_connections_ended_total{reason="idle"} 6"#).await;
}

#[tokio::test]
async fn client_that_waits_for_the_engine_is_kept() {
    let server = limited(|limits| {
        limits.idle = Duration::from_millis(100);
        limits.stall = Duration::from_millis(100);
    });
    let address = serve(&server).await;
    for stream in [true, false] {
        let mut client = TcpStream::connect(address).await.unwrap();
        let body = body_with(json!({ "stream": stream })).to_string();
        client.write_all(post(&body).as_bytes()).await.unwrap();
        let requests = server.engine.next().await;
        let mut events = text_events(0, "ok", FinishReason::Stop);
        events.push(Event::Done(super::figures(&requests.request)));
        for event in events {
            tokio::time::sleep(Duration::from_millis(150)).await;
            requests.events.try_send(event).unwrap();
        }
        let got = ends(&mut client).await;
        let got = String::from_utf8(got).unwrap();
        assert!(got.contains(if stream { "[DONE]" } else { "total_tokens" }), "{got}");
    }
}

#[tokio::test]
async fn answers_have_a_length_unless_they_are_streams() {
    let server = TestServer::new();
    let mut client = TcpStream::connect(serve(&server).await).await.unwrap();
    for (request, end, length) in [
        ("GET /health HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), "}", true),
        ("HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), "\r\n\r\n", true),
        ("GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), "}}", true),
        (post("{"), "}}", true),
    ] {
        client.write_all(request.as_bytes()).await.unwrap();
        let answer = read_until(&mut client, end).await.to_ascii_lowercase();
        assert_eq!(answer.contains("content-length: "), length, "{answer}");
        assert!(!answer.contains("transfer-encoding"), "{answer}");
    }
}
