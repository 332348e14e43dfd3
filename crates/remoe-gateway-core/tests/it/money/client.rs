//! Clients that read as much of an answer as their script says, and what they were told by then.

use super::script::{Api, ClientBehaviour, Script};
use remoe_billing::RequestCost;
use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Part of an answer that a client has seen.
#[derive(Debug, Default)]
pub(super) struct ClientView {
    /// It is a proper answer, to its end.
    pub(super) is_whole: bool,
    /// In a header, or behind a stream.
    pub(super) header: Option<u64>,
    pub(super) usage: Option<RequestCost>,
    /// All bytes.
    pub(super) bytes: Vec<u8>,
}

/// Sends request `number` and reads its answer.
pub(super) async fn ask(gateway: SocketAddr, number: u64, script: &Script) -> ClientView {
    let mut stream = TcpStream::connect(gateway).await.unwrap();
    stream.write_all(script.request(number).as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    let most = match script.client {
        ClientBehaviour::Leaves(most) => most,
        ClientBehaviour::Reads | ClientBehaviour::ReadsSlowly => usize::MAX,
    };
    let mut piece = vec![0; if script.client == ClientBehaviour::Reads { 64 << 10 } else { 200 }];
    while bytes.len() < most {
        let capacity = piece.len().min(most - bytes.len());
        // A connection that breaks off has ended as well.
        let Ok(read @ 1..) = stream.read(&mut piece[..capacity]).await else { break };
        bytes.extend_from_slice(&piece[..read]);
        if script.client == ClientBehaviour::ReadsSlowly && bytes.len() < 4000 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    drop(stream);
    seen(bytes, script)
}

/// Reads `bytes`, the beginning of an answer.
fn seen(bytes: Vec<u8>, script: &Script) -> ClientView {
    let text = String::from_utf8_lossy(&bytes);
    let Some((head, rest)) = text.split_once("\r\n\r\n") else {
        return ClientView { bytes, ..ClientView::default() };
    };
    let is_success = head.get(9..12) == Some("200");
    let header = |lines: &str, name: &str| {
        let mut pairs = lines.split("\r\n").filter_map(|line| line.split_once(": "));
        pairs.find(|(of, _)| of.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
    };
    let (body, is_whole, trailers) = match header(head, "content-length") {
        Some(length) => (rest.to_owned(), rest.len() == length.parse::<usize>().unwrap(), None),
        None => joined(rest),
    };
    let told = header(head, "x-remoe-cost").or(trailers.and_then(|lines| header(&lines, "x-remoe-cost")));
    let begin = r#","cost":{"#;
    // Half of it says nothing.
    let usage = body.rsplit_once(begin).and_then(|(_, rest)| {
        serde_json::Deserializer::from_str(&format!("{{{rest}")).into_iter().next()?.ok()
    });
    let is_answer = is_success && is_whole && is_proper(&body, script);
    ClientView { is_whole: is_answer, header: told.map(|told| told.parse().unwrap()), usage, bytes }
}

/// A body in chunks, whether all of it is there, and what follows it.
fn joined(mut rest: &str) -> (String, bool, Option<String>) {
    let mut body = String::new();
    while let Some((size, more)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            // A line that goes on says nothing yet.
            let lines = more.rsplit_once("\r\n").map(|(lines, _)| lines.to_owned());
            return (body, more.starts_with("\r\n") || more.ends_with("\r\n\r\n"), lines);
        }
        body.push_str(more.get(..size).unwrap_or(more));
        rest = more.get(size + 2..).unwrap_or_default();
    }
    (body, false, None)
}

/// Returns whether `body` is the whole answer and no error. All of its events must be JSON then.
fn is_proper(body: &str, script: &Script) -> bool {
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
