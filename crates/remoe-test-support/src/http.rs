//! As little HTTP/1.1 as the tests need.

use crate::deadline::{LONG, SOON, within};
use std::io;
use std::net::SocketAddr;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// Seconds of `Retry-After`.
    pub retry_after: Option<u64>,
    /// The body.
    pub body: String,
}

/// An answer whose head has been read.
pub struct HttpExchange {
    /// The status code.
    pub status: u16,
    /// Seconds of `Retry-After`.
    pub retry_after: Option<u64>,
    reader: BufReader<TcpStream>,
    length: Length,
}

/// How a body's end is known.
enum Length {
    Known(usize),
    Chunked,
    Close,
}

/// Gets `path`.
pub async fn get(address: SocketAddr, path: &str) -> Response {
    let exchange = begin(address, "GET", path, "").await;
    exchange
        .unwrap_or_else(|error| panic!("GET {path} at {address}: {error}"))
        .finish()
        .await
        .expect("a body")
}

/// Posts JSON to `path`; returns when the answer begins.
///
/// # Errors
/// No connection, or it ended before the answer began.
pub async fn post(address: SocketAddr, path: &str, body: &serde_json::Value) -> io::Result<HttpExchange> {
    begin(address, "POST", path, &body.to_string()).await
}

async fn begin(address: SocketAddr, method: &str, path: &str, body: &str) -> io::Result<HttpExchange> {
    let mut stream = within(SOON, "a TCP connection", TcpStream::connect(address)).await?;
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await?;
    let mut reader = BufReader::new(stream);
    let status = line(&mut reader).await?;
    let status = status.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status = status.ok_or_else(|| io::Error::other("not an HTTP answer"))?;
    let (mut length, mut retry_after) = (Length::Close, None);
    loop {
        let header = line(&mut reader).await?.to_ascii_lowercase();
        if header.is_empty() {
            return Ok(HttpExchange { status, retry_after, reader, length });
        }
        match header.split_once(": ") {
            Some(("content-length", value)) => {
                length = Length::Known(value.parse().map_err(io::Error::other)?);
            }
            Some(("transfer-encoding", "chunked")) => length = Length::Chunked,
            Some(("retry-after", value)) => retry_after = value.parse().ok(),
            _ => (),
        }
    }
}

impl HttpExchange {
    /// The next part of a body in chunks; none at its proper end.
    ///
    /// # Errors
    /// The connection broke before the end of the body.
    pub async fn chunk(&mut self) -> io::Result<Option<String>> {
        assert!(matches!(self.length, Length::Chunked), "the body does not come in chunks");
        let size = line(&mut self.reader).await?;
        let size = usize::from_str_radix(&size, 16).map_err(io::Error::other)?;
        let mut bytes = vec![0; size + 2];
        within(LONG, "a chunk", self.reader.read_exact(&mut bytes)).await?;
        bytes.truncate(size);
        Ok((size > 0).then(|| String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// The whole body.
    ///
    /// # Errors
    /// The connection broke before the end of the body.
    pub async fn finish(mut self) -> io::Result<Response> {
        let mut bytes = Vec::new();
        match self.length {
            Length::Known(length) => {
                bytes.resize(length, 0);
                within(LONG, "a body", self.reader.read_exact(&mut bytes)).await?;
            }
            Length::Close => {
                within(LONG, "a body", self.reader.read_to_end(&mut bytes)).await?;
            }
            Length::Chunked => {
                while let Some(chunk) = self.chunk().await? {
                    bytes.extend(chunk.bytes());
                }
            }
        }
        let body = String::from_utf8_lossy(&bytes).into_owned();
        Ok(Response { status: self.status, retry_after: self.retry_after, body })
    }
}

async fn line(reader: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = String::new();
    if within(LONG, "a line of an HTTP answer", reader.read_line(&mut line)).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(line.trim_end().to_owned())
}
