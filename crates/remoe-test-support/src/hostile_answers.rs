//! Servers that act as hostile main functions, and as an honest one.

use crate::hostile::{Cases, SeededChoices};
use bytes::Bytes;
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Cost of an honest answer, in nano-dollars.
pub const COST: u64 = 12;

const NAMES: [&str; 13] = [
    "x-remoe-tokens",
    "x-remoe-told",
    "server-timing",
    "x-remoe-activations",
    "x-remoe-cost",
    "x-remoe-tenant",
    "content-length",
    "transfer-encoding",
    "trailer",
    "connection",
    "retry-after",
    "x-should-retry",
    "content-encoding",
];

/// Behaviour of a connection after its answer was written.
enum ConnectionEnd {
    Closes,
    Stalls,
    /// Writes the same bytes without end.
    Repeats(Vec<u8>),
}

/// Returns a cost report with invalid or extreme values.
fn cost_report(choices: &mut SeededChoices) -> String {
    let mut share = || {
        let [prefill, decode, cost, more, busy] = std::array::from_fn(|_| choices.whole());
        format!(
            r#"{{"work":{{"prefill":{prefill},"decode":{decode}}},"cost":{{"prefill":{cost},"decode":{more}}},"busy":{busy}}}"#
        )
    };
    let shares = format!(r#""main":{},"other":{}"#, share(), share());
    let mut rivals = String::from(r#""mix":18446744073709551615"#);
    for number in 0..*choices.one_of(&[0, 3, 300, 50_000]) {
        let _written = write!(rivals, r#","rival-{number}":{}"#, choices.whole());
    }
    match choices.below(5) {
        0 => choices.json(8).replace(['\n', '\r'], ""),
        _ => format!(r#"{{"shares":{{{shares}}},"rivals":{{{rivals}}},"served":{}}}"#, choices.whole()),
    }
}

fn write_headers(choices: &mut SeededChoices, into: &mut Vec<u8>) {
    for _ in 0..choices.below(5) {
        let name = choices.one_of(&NAMES);
        let value = match *name {
            "x-remoe-told" => cost_report(choices).into_bytes(),
            "x-remoe-tokens" => format!("{}, {}", choices.number(), choices.number()).into_bytes(),
            _ => choices.header_value(),
        };
        // Sometimes repeats the header.
        for _ in 0..=usize::from(choices.once_in(6)) {
            into.extend_from_slice(name.as_bytes());
            into.extend_from_slice(b": ");
            into.extend_from_slice(&value);
            into.extend_from_slice(b"\r\n");
        }
    }
}

/// Returns an almost valid answer and the behaviour after it.
fn answer(choices: &mut SeededChoices) -> (Vec<u8>, ConnectionEnd) {
    let end = match choices.below(8) {
        0 => ConnectionEnd::Stalls,
        1 => ConnectionEnd::Repeats(
            b"1000\r\n".iter().copied().chain([b'x'; 0x1000]).chain(*b"\r\n").collect(),
        ),
        2 => ConnectionEnd::Repeats(b"HTTP/1.1 100 Continue\r\n\r\n".to_vec()),
        3 => ConnectionEnd::Repeats(b"f\r\ndata: {\"n\":0}\n\n\r\n".to_vec()),
        _ => ConnectionEnd::Closes,
    };
    if choices.once_in(12) {
        return (choices.noise(4096), end);
    }
    let status = *choices
        .one_of(&["200", "200", "200", "200", "204", "304", "400", "429", "500", "503", "599", "999"]);
    let is_stream = choices.once_in(2);
    let kind = if is_stream { "text/event-stream" } else { "application/json" };
    let mut answer = format!("HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\n").into_bytes();
    write_headers(choices, &mut answer);
    let body = match (is_stream, choices.below(4)) {
        (_, 0) => choices.noise(2000),
        (true, 1) => b"data: [DONE]\n\ndata: [DONE]\n\n".to_vec(),
        (true, 2) => b"data: {\"n\":0}\n\nevent: response.completed\ndata: {\n\n".to_vec(),
        (true, _) => "data: {\"n\":0}\n\n".repeat(choices.below(50)).into_bytes(),
        (false, _) => choices.json(8).into_bytes(),
    };
    if choices.once_in(2) {
        answer.extend(format!("transfer-encoding: chunked\r\n\r\n{:x}\r\n", body.len()).bytes());
        answer.extend(body);
        answer.extend_from_slice(b"\r\n");
        if matches!(end, ConnectionEnd::Closes) {
            answer.extend_from_slice(b"0\r\n");
            write_headers(choices, &mut answer);
            answer.extend_from_slice(b"\r\n");
        }
    } else {
        let length = if choices.once_in(3) { choices.number() } else { body.len().to_string() };
        answer.extend(format!("content-length: {length}\r\n\r\n").bytes());
        answer.extend(body);
    }
    // A second answer to the same request.
    if choices.once_in(10) {
        answer.extend_from_slice(
            b"HTTP/1.1 200 x\r\ncontent-length: 9\r\nx-remoe-tokens: 9, 9\r\n\r\n{\"not\":1}",
        );
    }
    if choices.once_in(3) {
        choices.spoil(&mut answer);
    }
    (answer, end)
}

/// Reads one request and sends the answer of case `number`.
async fn misbehave(
    mut stream: TcpStream,
    cases: Cases,
    number: usize,
    sent: Arc<AtomicU64>,
) -> std::io::Result<()> {
    let mut choices = cases.choices(number);
    if choices.once_in(20) {
        // Answers before any request.
        stream.write_all(&answer(&mut choices).0).await?;
    }
    let mut request = vec![0; 64 << 10];
    if stream.read(&mut request).await? == 0 {
        return Ok(());
    }
    let (answer, end) = answer(&mut choices);
    for piece in answer.chunks(1 + choices.below(2000)) {
        stream.write_all(piece).await?;
        sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
    }
    match end {
        ConnectionEnd::Closes => Ok(()),
        // Until the gateway gives it up.
        ConnectionEnd::Stalls => stream.read_to_end(&mut Vec::new()).await.map(drop),
        ConnectionEnd::Repeats(bytes) => loop {
            stream.write_all(&bytes).await?;
            sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        },
    }
}

/// Serves hostile answers for ever; each connection is a case. Returns the address, and counts the bytes that it sends.
pub async fn hostile(cases: Cases) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, sent) = (listener.local_addr().unwrap(), Arc::new(AtomicU64::new(0)));
    let counted = sent.clone();
    tokio::spawn(async move {
        for number in 0.. {
            let Ok((stream, _)) = listener.accept().await else { return };
            tokio::spawn(misbehave(stream, cases, number, counted.clone()));
        }
    });
    (address, sent)
}

/// Serves honest answers of `bytes` bytes, each with the cost [`COST`].
pub async fn honest(bytes: usize) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let body = Bytes::from(format!("{{{}}}", " ".repeat(bytes.saturating_sub(2))));
    let answer = move || {
        let told = format!(
            r#"{{"shares":{{"main":{{"work":{{"prefill":5,"decode":7}},"cost":{{"prefill":5,"decode":{}}},"busy":12}}}},"served":12}}"#,
            COST - 5
        );
        std::future::ready(([("x-remoe-tokens", "3, 4".to_owned()), ("x-remoe-told", told)], body.clone()))
    };
    // Gateways also ask if it is ready, by GET.
    let router = axum::Router::new().fallback(answer);
    tokio::spawn(async move { drop(axum::serve(listener, router).await) });
    address
}
