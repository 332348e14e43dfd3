//! The router behind a real socket, and clients that write raw HTTP.

use super::{Front, say, with};
use crate::engine::request::{Event, FinishReason};
use serde_json::json;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

async fn serve(front: &Front) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = front.router.clone();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

fn post(body: &str) -> String {
    let length = body.len();
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// Everything until the server closes or `end` has come.
async fn read_until(stream: &mut TcpStream, end: &str) -> String {
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
async fn chunks_leave_one_by_one() {
    let front = Front::new();
    let mut client = TcpStream::connect(serve(&front).await).await.unwrap();
    client.write_all(post(&with(json!({"stream": true})).to_string()).as_bytes()).await.unwrap();
    let asked = front.engine.next().await;
    for byte in ["a", "b"] {
        for event in say(0, byte, FinishReason::Stop).into_iter().take(1) {
            asked.events.try_send(event).unwrap();
        }
        let got = read_until(&mut client, &format!(r#""text":"{byte}""#)).await;
        assert!(got.contains(&format!(r#""text":"{byte}""#)), "{got}");
    }
    asked.events.try_send(Event::Done(super::figures(&asked.request))).unwrap();
    assert!(read_until(&mut client, "\r\n0\r\n\r\n").await.contains("data: [DONE]\n\n"));
}

#[tokio::test]
async fn clients_that_hang_up_end_their_work() {
    let front = Front::new();
    let address = serve(&front).await;
    for stream in [true, false] {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(post(&with(json!({ "stream": stream })).to_string()).as_bytes()).await.unwrap();
        let asked = front.engine.next().await;
        if stream {
            asked.events.try_send(say(0, "x", FinishReason::Stop).remove(0)).unwrap();
            read_until(&mut client, r#""text":"x""#).await;
        }
        assert!(!asked.events.is_closed());
        drop(client);
        tokio::time::timeout(Duration::from_secs(10), asked.events.closed())
            .await
            .expect("the events are dropped");
    }
}

#[tokio::test]
async fn a_client_that_writes_too_much_reads_why() {
    let front = Front::with(|options| options.body_limit = 1000);
    let address = serve(&front).await;
    // The whole body is written before anything is read, as many clients do.
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all(post(&"x".repeat(8 << 20)).as_bytes()).await.unwrap();
    let answer = read_until(&mut client, "request_too_large").await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    assert!(answer.contains("request_too_large"));
    // A client that asks first is told before it writes.
    let mut client = TcpStream::connect(address).await.unwrap();
    let head =
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9999\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    assert!(read_until(&mut client, "request_too_large").await.starts_with("HTTP/1.1 413"));
}

#[tokio::test]
async fn garbage_leaves_the_others_alone() {
    let front = Front::new();
    let address = serve(&front).await;
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
    client.write_all(post(&with(json!({})).to_string()).as_bytes()).await.unwrap();
    let serve = front.engine.serve(|request| {
        let mut events = say(0, "ok", FinishReason::Stop);
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
async fn one_connection_serves_one_request_after_another() {
    let front = Front::new();
    let mut client = TcpStream::connect(serve(&front).await).await.unwrap();
    for _ in 0..3 {
        client.write_all(post("{").as_bytes()).await.unwrap();
        assert!(read_until(&mut client, "}}").await.starts_with("HTTP/1.1 400"));
    }
}

/// Clients that stop reading or hang up beside clients that read: these get their answers, and the
/// work of those that went ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_streams() {
    const CLIENTS: usize = 200;
    const TOKENS: usize = 300;
    let limits = crate::engine::RequestLimits {
        max_requests: CLIENTS,
        context_length: 4000,
        cache_positions: 4000,
        ..super::Engine::limits()
    };
    let front = Front::build(Some(std::sync::Arc::new(super::Bytes)), limits, |_| ());
    let address = serve(&front).await;
    let engine = async {
        let mut running = Vec::new();
        for _ in 0..CLIENTS {
            let asked = front.engine.next().await;
            running.push(tokio::spawn(async move {
                for event in say(0, &"x".repeat(TOKENS), FinishReason::Length) {
                    // Not once may the engine find no room; a client may be gone.
                    assert!(
                        asked.events.is_closed()
                            || asked.events.try_send(event).is_ok()
                            || asked.events.is_closed()
                    );
                    tokio::task::yield_now().await;
                }
                let _client_gone = asked.events.try_send(Event::Done(super::figures(&asked.request)));
            }));
        }
        for task in running {
            task.await.unwrap();
        }
    };
    let body = with(json!({"stream": true, "max_tokens": TOKENS, "ignore_eos": true})).to_string();
    let clients = (0..CLIENTS).map(|client| {
        let body = body.clone();
        tokio::spawn(async move {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(post(&body).as_bytes()).await.unwrap();
            match client % 4 {
                0 => drop(read_until(&mut stream, r#""text":"x""#).await),
                1 => tokio::time::sleep(Duration::from_secs(1)).await,
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
        while !front.get("/metrics").await.text.contains("remoe_requests_in_flight 0\n") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), idle).await.expect("nothing is left over");
}
