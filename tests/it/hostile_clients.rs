//! Two hundred concurrent streams, most from clients that stop reading, disconnect or send garbage. The other clients
//! get exactly the tokens that they get alone, memory stays bounded, and nothing remains of disconnected clients.

use remoe_test_support::deadline::{LONG, SOON, until, within};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::main_http::MainHttp;
use remoe_test_support::raw::{self, Connection};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// Number of clients of each kind.
const CLIENTS: usize = 50;

/// Tokens per request of clients that do not read.
const STUCK_MAX_TOKENS: usize = 300;

/// Length of the model's name, which is in every chunk: `STUCK_MAX_TOKENS` chunks exceed the buffers of a connection
/// (Linux allows at most 4 MiB by default).
const NAME_LENGTH: usize = 16 << 10;

/// Size of the KV cache, the largest allocation for requests, in bytes.
const CACHE_BYTES: u64 = 128 << 20;

/// Allowed growth of the process in bytes: the pages of the cache, which the allocator may keep, and a margin as
/// large as the largest growth seen besides.
const MAX_GROWTH: u64 = CACHE_BYTES + (96 << 20);

/// Returns a valid request that depends on `index` alone.
fn valid_request(index: usize) -> (&'static str, Value) {
    let subjects = ["fox", "river", "king", "garden", "storm", "violin", "market"];
    let text = format!("Story {index}. Once there was a {}", subjects[index % subjects.len()]);
    let mut body = json!({
        "max_tokens": 24 + index % 25,
        "ignore_eos": true,
        "return_token_ids": true,
        "temperature": 0,
        "stream": !index.is_multiple_of(3),
    });
    if index % 2 == 1 {
        body["temperature"] = json!(0.9);
        body["seed"] = json!(index);
        body["n"] = json!(1 + index % 3);
    }
    if index.is_multiple_of(5) {
        body["messages"] = json!([{"role": "user", "content": text}]);
        return (CHAT, body);
    }
    body["prompt"] = json!(text);
    (COMPLETIONS, body)
}

/// Returns the text and token ids of each choice, from a response or a stream.
async fn tokens(address: SocketAddr, index: usize) -> Vec<(String, Vec<u64>)> {
    let (path, body) = valid_request(index);
    let mut connection = Connection::open(address).await;
    connection.write(raw::post(path, &body.to_string())).await.unwrap();
    let answer = connection.answer().await.unwrap();
    let parts = if body["stream"] == true { answer.events() } else { vec![answer.ok()] };
    let mut choices = vec![(String::new(), Vec::new()); body["n"].as_u64().unwrap_or(1) as usize];
    for choice in parts.iter().flat_map(|part| part["choices"].as_array().unwrap()) {
        let (text, ids) = &mut choices[choice["index"].as_u64().unwrap() as usize];
        let texts = [&choice["text"], &choice["message"]["content"], &choice["delta"]["content"]];
        text.extend(texts.into_iter().filter_map(Value::as_str));
        ids.extend(choice["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()));
    }
    for (_, ids) in &choices {
        assert_eq!(ids.len() as u64, body["max_tokens"], "request {index}");
    }
    choices
}

/// Sends a large request and never reads the response.
async fn open_stuck_client(address: SocketAddr) -> Connection {
    let mut connection = Connection::narrow(address).await;
    let body = json!({
        "prompt": "Tell all that you know", "max_tokens": STUCK_MAX_TOKENS, "ignore_eos": true, "temperature": 0,
        "stream": true,
    });
    connection.write(raw::post(COMPLETIONS, &body.to_string())).await.unwrap();
    connection
}

/// Disconnects at a point that depends on `index`.
async fn run_vanishing_client(address: SocketAddr, index: usize) {
    let mut connection = Connection::open(address).await;
    let body = json!({
        "prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": true, "stream": index % 7 != 6,
    });
    let request = raw::post(COMPLETIONS, &body.to_string());
    let chunks = match index % 7 {
        // Within the head or the body of the request.
        0 => return connection.write(&request[..1 + index]).await.unwrap(),
        1 => return connection.write(&request[..request.len() - 1 - index % 20]).await.unwrap(),
        // Before the response, after its head, after one token, or later.
        2 | 6 => {
            connection.write(&request).await.unwrap();
            return sleep(Duration::from_millis(index as u64)).await;
        }
        3 => 0,
        4 => 1,
        _ => index,
    };
    connection.write(&request).await.unwrap();
    connection.head().await.unwrap();
    for _ in 0..chunks {
        connection.chunk().await.unwrap();
    }
}

/// Returns pseudo-random bytes.
fn random_bytes(seed: usize, count: usize) -> Vec<u8> {
    let mut state = seed as u64 + 1;
    let next = || {
        // Linear congruential generator by Knuth, whose upper bits are random enough.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// Sends garbage until `stop` or until the server closes the connection.
async fn send_garbage(address: SocketAddr, index: usize, mut stop: watch::Receiver<bool>) {
    let mut connection = Connection::open(address).await;
    let head = |more: &str| format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: test\r\n{more}");
    let first_bytes: Vec<u8> = match index % 10 {
        0 => random_bytes(index, 100_000),
        1 => raw::post(COMPLETIONS, "{\"prompt\": \"hi\", \"max_tokens\": }").into(),
        2 => raw::post(CHAT, &"[".repeat(100_000)).into(),
        3 => {
            let mut body = raw::post(COMPLETIONS, &" ".repeat(1000)).into_bytes();
            let at = body.len() - 500;
            body[at..].copy_from_slice(&random_bytes(index, 500));
            body
        }
        // A missing body, an endless head, and invalid chunks.
        4 => head("Content-Length: 1000\r\n\r\n{").into(),
        5 => head("X-Half: ").into(),
        6 => head("Transfer-Encoding: chunked\r\n\r\nzz\r\n").into(),
        7 => b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        // An endless head, an endless body.
        8 => head("X-Slow: ").into(),
        _ => head("Transfer-Encoding: chunked\r\n\r\n").into(),
    };
    let endless = match index % 10 {
        8 => b"x".to_vec(),
        9 => [b"400\r\n".as_slice(), &[b' '; 0x400], b"\r\n"].concat(),
        _ => Vec::new(),
    };
    // The server may close at any byte, which ends this client.
    let mut open = connection.write(first_bytes).await.is_ok();
    while open && !*stop.borrow_and_update() {
        if endless.is_empty() {
            // Keeps its connection open until `stop`.
            let _changed = stop.changed().await;
        } else {
            open = connection.write(&endless).await.is_ok();
            sleep(Duration::from_millis(2)).await;
        }
    }
}

/// Waits until no request is left in the server and no forward pass runs.
async fn wait_until_idle(server: &MainHttp) {
    for gauge in ["remoe_requests_in_flight", "remoe_requests_waiting", "remoe_requests_running"] {
        server.settles(gauge, 0).await;
    }
    let rows = server.metrics().await.value("remoe_forwarded_positions_total");
    sleep(Duration::from_millis(200)).await;
    let later = server.metrics().await.value("remoe_forwarded_positions_total");
    assert_eq!(rows, later, "no rows are forwarded without a client");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_streams() {
    let (cache, name) = (CACHE_BYTES.to_string(), "m".repeat(NAME_LENGTH));
    // The clients that do not read stay connected: nothing may depend on their leaving.
    let server = MainHttp::start(
        &ModelFixture::demo().folder,
        &["--max-batch", "256", "--kv-cache-bytes", &cache, "--served-model-name", &name],
        &[("REMOE_HTTP_STALL_S", "3600"), ("REMOE_HTTP_HEAD_S", "3600"), ("REMOE_HTTP_IDLE_S", "3600")],
    )
    .await;
    let address = server.address;
    let mut alone = Vec::new();
    for index in 0..CLIENTS {
        alone.push(tokens(address, index).await);
    }
    wait_until_idle(&server).await;
    let descriptors = server.descriptors();
    let (memory, _) = server.memory();

    let (stop_sender, stop) = watch::channel(false);
    let (mut readers, mut others, mut garbage_clients) = (JoinSet::new(), JoinSet::new(), JoinSet::new());
    let held_connections = Arc::new(Mutex::new(Vec::new()));
    let arrived = Arc::new(AtomicUsize::new(0));
    for index in 0..CLIENTS {
        let (held_connections, arrived) = (held_connections.clone(), arrived.clone());
        others.spawn(async move {
            let connection = open_stuck_client(address).await;
            held_connections.lock().unwrap().push(connection);
            arrived.fetch_add(1, Ordering::Relaxed);
        });
        others.spawn(run_vanishing_client(address, index));
        garbage_clients.spawn(send_garbage(address, index, stop.clone()));
        readers.spawn(async move { (index, tokens(address, index).await) });
    }
    // All valid requests complete with the tokens that they get alone.
    while let Some(done) = within(LONG, "a stream of a client that reads", readers.join_next()).await {
        let (index, together) = done.unwrap();
        assert_eq!(together, alone[index], "request {index} beside hostile clients");
    }
    while let Some(done) = within(LONG, "a client that goes", others.join_next()).await {
        done.unwrap();
    }
    // The clients that do not read are still connected, and the engine did their work without waiting.
    assert_eq!(arrived.load(Ordering::Relaxed), CLIENTS);
    server.settles("remoe_requests_running", 0).await;
    server.settles("remoe_requests_waiting", 0).await;
    server.settles("remoe_requests_in_flight", CLIENTS as u64).await;
    let (_, peak) = server.memory();

    // All clients disconnect, and nothing remains of them.
    held_connections.lock().unwrap().clear();
    stop_sender.send_replace(true);
    while let Some(done) = within(LONG, "a client that sends garbage", garbage_clients.join_next()).await {
        done.unwrap();
    }
    wait_until_idle(&server).await;
    until(SOON, "the descriptors of gone clients", async || {
        (server.descriptors() <= descriptors).then_some(())
    })
    .await;
    let (after, _) = server.memory();
    println!("resident: {} MiB, {} at most, {} after", memory >> 20, peak >> 20, after >> 20);
    assert!(peak <= memory + MAX_GROWTH, "{peak} bytes at the peak, {memory} before");
    assert!(after <= memory + MAX_GROWTH, "{after} bytes in the end, {memory} before");
    // The server works as before.
    assert_eq!(tokens(address, 7).await, alone[7]);
}

#[tokio::test(flavor = "multi_thread")]
async fn work_of_disconnecting_clients_ends() {
    let server = MainHttp::start(&ModelFixture::demo().folder, &[], &[]).await;
    let rows = async || server.metrics().await.value("remoe_forwarded_positions_total");
    for stream in [true, false] {
        let before = rows().await;
        let body = json!({
            "prompt": "Once", "max_tokens": 900, "n": 16, "temperature": 1, "ignore_eos": true, "stream": stream,
        });
        let mut connection = Connection::open(server.address).await;
        connection.write(raw::post(COMPLETIONS, &body.to_string())).await.unwrap();
        until(SOON, "the beginning of the work", async || (rows().await > before + 32).then_some(())).await;
        drop(connection);
        wait_until_idle(&server).await;
        let done = rows().await - before;
        assert!(done < 16 * 900 / 2, "{done} rows for a client that went at once");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_keep_the_server_waiting_are_given_up() {
    const STUCK: usize = 8;
    let server = MainHttp::start(
        &ModelFixture::demo().folder,
        &["--served-model-name", &"m".repeat(NAME_LENGTH)],
        &[("REMOE_HTTP_STALL_S", "1"), ("REMOE_HTTP_HEAD_S", "1"), ("REMOE_HTTP_IDLE_S", "1")],
    )
    .await;
    let address = server.address;
    let alone = tokens(address, 4).await;
    server.settles("remoe_http_connections", 1).await;
    let descriptors = server.descriptors();
    let ended_metric = |reason: &str| format!("remoe_http_connections_ended_total{{reason=\"{reason}\"}}");
    let before = server.metrics().await.value(&ended_metric("idle"));

    let mut held_connections = Vec::new();
    for _ in 0..STUCK {
        held_connections.push(open_stuck_client(address).await);
        let silent = Connection::open(address).await;
        let mut half = Connection::open(address).await;
        half.write("GET /version HTTP/1.1\r\nHost:").await.unwrap();
        held_connections.extend([silent, half]);
    }
    assert_eq!(tokens(address, 4).await, alone);
    server.settles(&ended_metric("stalled"), STUCK as u64).await;
    let idle = async || {
        (server.metrics().await.value(&ended_metric("idle")) >= before + 2 * STUCK as u64).then_some(())
    };
    until(SOON, "the end of connections without requests", idle).await;
    wait_until_idle(&server).await;
    // The clients keep their connections open.
    until(SOON, "the descriptors of clients that were given up", async || {
        (server.descriptors() <= descriptors).then_some(())
    })
    .await;
    // The streams of clients that did not read are truncated, not complete.
    for mut connection in held_connections {
        let rest = connection.rest().await;
        assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
    }
    assert_eq!(tokens(address, 4).await, alone);
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_sockets_keep_no_client_out() {
    const MAX_CONNECTIONS: usize = 16;
    let server = MainHttp::start(
        &ModelFixture::demo().folder,
        &["--health-listen", "127.0.0.1:0"],
        &[("REMOE_HTTP_MAX_CONNECTIONS", &MAX_CONNECTIONS.to_string())],
    )
    .await;
    let alone = tokens(server.address, 4).await;
    let mut idle = Vec::new();
    for number in 0..12 * MAX_CONNECTIONS {
        let mut connection = Connection::open(server.address).await;
        if number % 2 == 0 {
            connection.write("GET /version HTTP/1.1\r\nHost:").await.unwrap();
        }
        idle.push(connection);
    }
    let answer =
        within(SOON, "an answer beside idle sockets", raw::ask(server.address, raw::get("/health"))).await;
    assert_eq!(answer.head.status, 200);
    assert_eq!(tokens(server.address, 4).await, alone);
    let probes = server.health.unwrap();
    for path in ["/healthz", "/readyz"] {
        let answer = within(SOON, "an answer to a probe", raw::ask(probes, raw::get(path))).await;
        assert_eq!(answer.head.status, 200);
    }
    let series = "remoe_http_connections_ended_total{reason=\"displaced\"}";
    assert!(server.metrics().await.value(series) >= 10 * MAX_CONNECTIONS as u64);
}
