//! Clients that read as much of an answer as their script says, and the costs that they saw by then.

use super::script::{Api, ClientBehaviour, Script};
use remoe_billing::RequestCost;
use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Part of an answer that a client has read.
#[derive(Debug, Default)]
pub(super) struct ClientResult {
    /// Set if it is a complete answer and no error.
    pub(super) is_complete: bool,
    /// Cost in a header, or in the trailers of a stream.
    pub(super) header: Option<u64>,
    /// Cost in the usage.
    pub(super) usage: Option<RequestCost>,
    /// All bytes that were read.
    pub(super) bytes: Vec<u8>,
}

/// Sends request `number` and reads its answer.
pub(super) async fn send_scripted(gateway: SocketAddr, number: u64, script: &Script) -> ClientResult {
    let mut stream = TcpStream::connect(gateway).await.unwrap();
    stream.write_all(script.request(number).as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    let max_bytes = match script.client {
        ClientBehaviour::Leaves(max_bytes) => max_bytes,
        ClientBehaviour::Reads | ClientBehaviour::ReadsSlowly => usize::MAX,
    };
    let mut piece = vec![0; if script.client == ClientBehaviour::Reads { 64 << 10 } else { 200 }];
    while bytes.len() < max_bytes {
        let capacity = piece.len().min(max_bytes - bytes.len());
        // A connection that breaks off has ended as well.
        let Ok(read @ 1..) = stream.read(&mut piece[..capacity]).await else { break };
        bytes.extend_from_slice(&piece[..read]);
        if script.client == ClientBehaviour::ReadsSlowly && bytes.len() < 4000 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    drop(stream);
    parse_answer(bytes, script)
}

/// Parses `bytes`, the beginning of an answer.
fn parse_answer(bytes: Vec<u8>, script: &Script) -> ClientResult {
    let text = String::from_utf8_lossy(&bytes);
    let Some((head, rest)) = text.split_once("\r\n\r\n") else {
        return ClientResult { bytes, ..ClientResult::default() };
    };
    let is_success = head.get(9..12) == Some("200");
    let header = |lines: &str, name: &str| {
        let mut pairs = lines.split("\r\n").filter_map(|line| line.split_once(": "));
        pairs.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
    };
    let (body, is_complete, trailers) = match header(head, "content-length") {
        Some(length) => (rest.to_owned(), rest.len() == length.parse::<usize>().unwrap(), None),
        None => join_chunks(rest),
    };
    let cost = header(head, "x-remoe-cost").or(trailers.and_then(|lines| header(&lines, "x-remoe-cost")));
    let begin = r#","cost":{"#;
    // An incomplete cost does not parse.
    let usage = body.rsplit_once(begin).and_then(|(_, rest)| {
        serde_json::Deserializer::from_str(&format!("{{{rest}")).into_iter().next()?.ok()
    });
    let is_answer = is_success && is_complete && is_complete_answer(&body, script);
    ClientResult { is_complete: is_answer, header: cost.map(|cost| cost.parse().unwrap()), usage, bytes }
}

/// Joins the chunks of a body. Returns the body, whether it is complete, and its trailers.
fn join_chunks(mut rest: &str) -> (String, bool, Option<String>) {
    let mut body = String::new();
    while let Some((size, more)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            // An incomplete last line is ignored.
            let lines = more.rsplit_once("\r\n").map(|(lines, _)| lines.to_owned());
            return (body, more.starts_with("\r\n") || more.ends_with("\r\n\r\n"), lines);
        }
        body.push_str(more.get(..size).unwrap_or(more));
        rest = more.get(size + 2..).unwrap_or_default();
    }
    (body, false, None)
}

/// Reports if `body` is a complete answer and no error. Asserts that all of its events are JSON.
fn is_complete_answer(body: &str, script: &Script) -> bool {
    if !script.is_stream {
        let answer: Value = serde_json::from_str(body).unwrap();
        return answer.get("error").is_none();
    }
    if !body.contains(script.api.end()) {
        return false;
    }
    for line in body.lines().filter_map(|line| line.strip_prefix("data: ")) {
        assert!(line == "[DONE]" || serde_json::from_str::<Value>(line).is_ok(), "{line}");
    }
    assert!(script.api != Api::Completions || body.ends_with(script.api.end()), "{body}");
    true
}
