//! As little HTTP/1.1 as a client of streamed completions needs, so that it takes nothing from the
//! server that shares the machine with it.

use super::deployment::NAME;
use crate::error::{BenchError, ErrorContext, Result};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Instant;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

/// A request for a completion of token ids.
#[derive(Debug, Clone)]
pub(super) struct CompletionPrompt {
    pub(super) ids: Vec<u32>,
    pub(super) max_tokens: usize,
    pub(super) seed: u64,
}

/// When a token arrived.
pub(super) type Token = Instant;

/// Streams the completion of `prompt`; when each of its tokens came. `begun` is told of the first one.
pub(super) async fn complete(
    server: SocketAddr,
    prompt: CompletionPrompt,
    begun: oneshot::Sender<()>,
) -> Result<Vec<Token>> {
    // Drawn at temperature 1, as greedy tokens of random weights repeat, and with them their experts.
    let body = json!({
        "model": NAME, "prompt": prompt.ids, "max_tokens": prompt.max_tokens, "seed": prompt.seed,
        "temperature": 1.0, "ignore_eos": true, "stream": true, "return_token_ids": true,
    });
    let mut answer = CompletionStream::begin(server, "POST", "/v1/completions", &body.to_string()).await?;
    let mut tokens = Vec::with_capacity(prompt.max_tokens);
    let mut unread = String::new();
    let mut begun = Some(begun);
    while let Some(chunk) = answer.chunk().await? {
        let now = Instant::now();
        unread.push_str(&chunk);
        while let Some((event, rest)) = unread.split_once("\n\n") {
            tokens.extend(std::iter::repeat_n(now, count(event)?));
            unread = rest.to_owned();
        }
        if let Some(begun) = begun.take_if(|_| !tokens.is_empty()) {
            // Who does not wait for it has dropped the other end.
            let _closed = begun.send(());
        }
    }
    if tokens.len() != prompt.max_tokens {
        let why = format!("expected {} tokens, got {}", prompt.max_tokens, tokens.len());
        return Err(BenchError::new("reading a stream", why));
    }
    Ok(tokens)
}

/// Tokens of a server-sent event.
fn count(event: &str) -> Result<usize> {
    let Some(data) = event.strip_prefix("data: ").filter(|data| *data != "[DONE]") else { return Ok(0) };
    let data: Value = serde_json::from_str(data).doing(|| format!("reading the event {data:?}"))?;
    match data.get("error") {
        Some(error) => Err(BenchError::new("reading a stream", error)),
        None => Ok(data["choices"][0]["token_ids"].as_array().map_or(0, Vec::len)),
    }
}

/// The body at `path`.
pub(super) async fn get(server: SocketAddr, path: &str) -> Result<String> {
    CompletionStream::begin(server, "GET", path, "").await?.rest().await
}

/// An answer whose head has been read.
struct CompletionStream {
    reader: BufReader<TcpStream>,
    chunked: bool,
}

impl CompletionStream {
    async fn begin(server: SocketAddr, method: &str, path: &str, body: &str) -> Result<Self> {
        let asking = || format!("{method} {path}");
        let mut stream = TcpStream::connect(server).await.doing(asking)?;
        stream.set_nodelay(true).doing(asking)?;
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.doing(asking)?;
        let mut answer = Self { reader: BufReader::new(stream), chunked: false };
        let status = answer.line().await?;
        loop {
            let header = answer.line().await?.to_ascii_lowercase();
            if header.is_empty() {
                break;
            }
            answer.chunked |= header == "transfer-encoding: chunked";
        }
        if status.split(' ').nth(1) == Some("200") {
            return Ok(answer);
        }
        Err(BenchError::new(asking(), format!("{status}: {}", answer.rest().await?)))
    }

    async fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.reader.read_line(&mut line).await.doing(|| "reading an HTTP answer")?;
        Ok(line.trim_end().to_owned())
    }

    /// The next part of a chunked body; none at its end.
    async fn chunk(&mut self) -> Result<Option<String>> {
        let reading = || "reading a chunk of an HTTP answer";
        let size = usize::from_str_radix(&self.line().await?, 16).doing(reading)?;
        let mut bytes = vec![0; size + 2];
        self.reader.read_exact(&mut bytes).await.doing(reading)?;
        bytes.truncate(size);
        Ok(Some(String::from_utf8(bytes).doing(reading)?).filter(|text| !text.is_empty()))
    }

    async fn rest(mut self) -> Result<String> {
        let mut text = String::new();
        if self.chunked {
            while let Some(chunk) = self.chunk().await? {
                text.push_str(&chunk);
            }
        } else {
            self.reader.read_to_string(&mut text).await.doing(|| "reading an HTTP answer")?;
        }
        Ok(text)
    }
}
