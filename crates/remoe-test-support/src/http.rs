//! Minimal HTTP/1.1 client.

use crate::deadline::{LONG, SOON, within};
use std::io;
use std::net::SocketAddr;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// Complete response.
#[derive(Debug, Clone)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// Value of `Retry-After`, in seconds.
    pub retry_after: Option<u64>,
    /// Body as text.
    pub body: String,
}

/// Response whose head was read.
pub struct HttpExchange {
    /// Status code.
    pub status: u16,
    /// Value of `Retry-After`, in seconds.
    pub retry_after: Option<u64>,
    reader: BufReader<TcpStream>,
    length: BodyLength,
}

/// Framing of a body.
enum BodyLength {
    ContentLength(usize),
    Chunked,
    UntilClose,
}

/// Sends GET for `path` and returns the response.
pub async fn get(address: SocketAddr, path: &str) -> Response {
    let exchange = send_request(address, "GET", path, "").await;
    exchange
        .unwrap_or_else(|error| panic!("GET {path} at {address}: {error}"))
        .finish()
        .await
        .expect("a body")
}

/// Posts JSON to `path` and returns once the head of the response was read.
///
/// # Errors
/// The connection is refused or ends before the head.
pub async fn post(address: SocketAddr, path: &str, body: &serde_json::Value) -> io::Result<HttpExchange> {
    send_request(address, "POST", path, &body.to_string()).await
}

async fn send_request(address: SocketAddr, method: &str, path: &str, body: &str) -> io::Result<HttpExchange> {
    let mut stream = within(SOON, "a TCP connection", TcpStream::connect(address)).await?;
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await?;
    let mut reader = BufReader::new(stream);
    let status = read_line(&mut reader).await?;
    let status = status.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status = status.ok_or_else(|| io::Error::other("not an HTTP answer"))?;
    let (mut length, mut retry_after) = (BodyLength::UntilClose, None);
    loop {
        let header = read_line(&mut reader).await?.to_ascii_lowercase();
        if header.is_empty() {
            return Ok(HttpExchange { status, retry_after, reader, length });
        }
        match header.split_once(": ") {
            Some(("content-length", value)) => {
                length = BodyLength::ContentLength(value.parse().map_err(io::Error::other)?);
            }
            Some(("transfer-encoding", "chunked")) => length = BodyLength::Chunked,
            Some(("retry-after", value)) => retry_after = value.parse().ok(),
            _ => (),
        }
    }
}

impl HttpExchange {
    /// Reads the next chunk of a chunked body. Returns `None` at its end.
    ///
    /// # Errors
    /// The connection ended within the body.
    pub async fn chunk(&mut self) -> io::Result<Option<String>> {
        assert!(matches!(self.length, BodyLength::Chunked), "the body does not come in chunks");
        let size = read_line(&mut self.reader).await?;
        let size = usize::from_str_radix(&size, 16).map_err(io::Error::other)?;
        let mut bytes = vec![0; size + 2];
        within(LONG, "a chunk", self.reader.read_exact(&mut bytes)).await?;
        bytes.truncate(size);
        Ok((size > 0).then(|| String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Reads the rest of the response.
    ///
    /// # Errors
    /// The connection ended within the body.
    pub async fn finish(mut self) -> io::Result<Response> {
        let mut bytes = Vec::new();
        match self.length {
            BodyLength::ContentLength(length) => {
                bytes.resize(length, 0);
                within(LONG, "a body", self.reader.read_exact(&mut bytes)).await?;
            }
            BodyLength::UntilClose => {
                within(LONG, "a body", self.reader.read_to_end(&mut bytes)).await?;
            }
            BodyLength::Chunked => {
                while let Some(chunk) = self.chunk().await? {
                    bytes.extend(chunk.bytes());
                }
            }
        }
        let body = String::from_utf8_lossy(&bytes).into_owned();
        Ok(Response { status: self.status, retry_after: self.retry_after, body })
    }
}

async fn read_line(reader: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = String::new();
    if within(LONG, "a line of an HTTP answer", reader.read_line(&mut line)).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(line.trim_end().to_owned())
}
