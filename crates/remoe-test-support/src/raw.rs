//! HTTP/1.1 at the level of bytes: sends requests that may be malformed and reads exactly what the server sent.

use crate::deadline::{LONG, SOON, within};
use remoe_proto::identity::{MaybeTlsStream, Protocol, Trust};
use serde_json::Value;
use std::io;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// Connection, which is closed on drop.
pub struct Connection {
    stream: MaybeTlsStream<TcpStream>,
    /// Received bytes that were not parsed yet.
    received: Vec<u8>,
    /// Trailers of the last complete chunked body.
    trailers: Vec<(String, String)>,
}

/// Status and headers of a response.
#[derive(Debug, Clone)]
pub struct ResponseHead {
    /// Status code.
    pub status: u16,
    /// Headers in order, with names in lower case.
    pub headers: Vec<(String, String)>,
}

/// Complete response.
#[derive(Debug, Clone)]
pub struct RawResponse {
    /// Status and headers.
    pub head: ResponseHead,
    /// Body, reassembled from its chunks.
    pub body: Vec<u8>,
    /// Trailers after the chunks, with names in lower case.
    pub trailers: Vec<(String, String)>,
}

/// Returns a GET request.
#[must_use]
pub fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n")
}

/// Returns a POST request with a JSON body.
#[must_use]
pub fn post(path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

/// Sends one request on a new connection and returns the response.
pub async fn ask(address: SocketAddr, request: impl AsRef<[u8]>) -> RawResponse {
    let mut connection = Connection::open(address).await;
    connection.write(request).await.expect("the request is taken");
    connection.answer().await.expect("an answer")
}

impl Connection {
    /// Connects to a server.
    pub async fn open(address: SocketAddr) -> Self {
        Self::reach(address).await.expect("the server accepts")
    }

    /// Connects to a server that may be absent.
    ///
    /// # Errors
    /// The connection is refused.
    pub async fn reach(address: SocketAddr) -> io::Result<Self> {
        let stream = within(SOON, "a TCP connection", TcpStream::connect(address)).await?;
        Ok(Self::new(MaybeTlsStream::Plain(stream)))
    }

    /// Connects with TLS to the peer that `trust` names.
    ///
    /// # Errors
    /// The connection is refused, or the handshake fails.
    pub async fn secured(address: SocketAddr, trust: &Trust) -> io::Result<Self> {
        let stream = within(SOON, "a TCP connection", TcpStream::connect(address)).await?;
        Ok(Self::new(trust.connect_for(Protocol::Http, stream).await?))
    }

    fn new(stream: MaybeTlsStream<TcpStream>) -> Self {
        Self { stream, received: Vec::new(), trailers: Vec::new() }
    }

    /// Connects with the smallest receive buffer.
    pub async fn narrow(address: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(1024).expect("a small buffer");
        let stream = within(SOON, "a TCP connection", socket.connect(address)).await;
        Self::new(MaybeTlsStream::Plain(stream.expect("the server accepts")))
    }

    /// Writes bytes.
    ///
    /// # Errors
    /// The server has closed the connection.
    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        within(LONG, "taking a request", self.stream.write_all(bytes.as_ref())).await
    }

    /// Reads the head of the next response.
    ///
    /// # Errors
    /// The connection ended too early.
    pub async fn head(&mut self) -> io::Result<ResponseHead> {
        let end = loop {
            if let Some(position) = find(&self.received, b"\r\n\r\n") {
                break position;
            }
            self.receive().await?;
        };
        let head: Vec<u8> = self.received.drain(..end + 4).collect();
        let text = String::from_utf8(head).map_err(io::Error::other)?;
        let mut lines = text.trim_end().split("\r\n");
        let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1.")?.get(2..5)?.parse().ok());
        let status = status.ok_or_else(|| io::Error::other(format!("not an HTTP answer: {text:?}")))?;
        let headers = lines.filter_map(|line| line.split_once(": "));
        let headers = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
        Ok(ResponseHead { status, headers })
    }

    /// Reads the next chunk of a chunked body. Returns `None` at its end.
    ///
    /// # Errors
    /// The connection ended too early.
    pub async fn chunk(&mut self) -> io::Result<Option<Vec<u8>>> {
        let size = usize::from_str_radix(&self.line().await?, 16).map_err(io::Error::other)?;
        if size == 0 {
            self.trailers.clear();
            loop {
                let line = self.line().await?;
                if line.is_empty() {
                    return Ok(None);
                }
                let (name, value) = line.split_once(": ").expect("a trailer has a name and a value");
                self.trailers.push((name.to_ascii_lowercase(), value.to_owned()));
            }
        }
        while self.received.len() < size + 2 {
            self.receive().await?;
        }
        let mut chunk: Vec<u8> = self.received.drain(..size + 2).collect();
        assert!(chunk.ends_with(b"\r\n"), "a chunk ends with its line");
        chunk.truncate(size);
        Ok(Some(chunk))
    }

    /// Reads the next line without its line end.
    async fn line(&mut self) -> io::Result<String> {
        let end = loop {
            if let Some(position) = find(&self.received, b"\r\n") {
                break position;
            }
            self.receive().await?;
        };
        let mut line: Vec<u8> = self.received.drain(..end + 2).collect();
        line.truncate(end);
        String::from_utf8(line).map_err(io::Error::other)
    }

    /// Reads the next response completely.
    ///
    /// # Errors
    /// The connection ended too early.
    pub async fn answer(&mut self) -> io::Result<RawResponse> {
        let head = self.head().await?;
        let (mut body, mut trailers) = (Vec::new(), Vec::new());
        if head.header("transfer-encoding") == "chunked" {
            while let Some(chunk) = self.chunk().await? {
                body.extend(chunk);
            }
            trailers = std::mem::take(&mut self.trailers);
        } else if let Ok(length) = head.header("content-length").parse() {
            while self.received.len() < length {
                self.receive().await?;
            }
            body = self.received.drain(..length).collect();
        }
        Ok(RawResponse { head, body, trailers })
    }

    /// Reads until the server ends the connection, cleanly or not.
    pub async fn rest(&mut self) -> Vec<u8> {
        while self.receive().await.is_ok() {}
        std::mem::take(&mut self.received)
    }

    async fn receive(&mut self) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        match within(LONG, "more of an answer", self.stream.read(&mut buffer)).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.received.extend_from_slice(&buffer[..count]);
                Ok(())
            }
        }
    }
}

impl ResponseHead {
    /// Returns the value of a header, empty if it is absent.
    #[must_use]
    pub fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(header, _)| header == name);
        found.map_or("", |(_, value)| value)
    }
}

impl RawResponse {
    /// Returns the body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("the body is UTF-8")
    }

    /// Asserts status 200 and returns the JSON body.
    pub fn ok(&self) -> Value {
        assert_eq!(self.head.status, 200, "{}", self.text());
        assert_eq!(self.head.header("content-type"), "application/json");
        serde_json::from_slice(&self.body).expect("the body is JSON")
    }

    /// Asserts an error of this status with exactly the four fields of an OpenAI-style error, and returns it.
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.head.status, status, "{}", self.text());
        assert_eq!(self.head.header("content-type"), "application/json");
        let body: Value = serde_json::from_slice(&self.body).expect("the body is JSON");
        let envelope = body.as_object().expect("an object");
        assert_eq!(envelope.keys().collect::<Vec<_>>(), ["error"], "{body}");
        let error = envelope["error"].as_object().expect("an object");
        let mut keys: Vec<&str> = error.keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, ["code", "message", "param", "type"], "{body}");
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
        envelope["error"].clone()
    }

    /// Asserts status 400 with an error about `param`.
    pub fn refuses(&self, param: &str) {
        let error = self.error(400);
        assert_eq!(error["param"], param, "{error}");
        assert_eq!(error["type"], "invalid_request_error", "{error}");
    }

    /// Asserts a complete event stream with correct framing and returns its events.
    #[must_use]
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.head.status, 200, "{}", self.text());
        assert_eq!(self.head.header("content-type"), "text/event-stream");
        assert_eq!(self.head.header("cache-control"), "no-cache");
        let text = self.text();
        let mut events: Vec<&str> = text.split("\n\n").filter(|event| !event.starts_with(':')).collect();
        assert_eq!(events.pop(), Some(""), "every event ends with an empty line");
        assert_eq!(events.pop(), Some("data: [DONE]"), "the last event");
        let event = |event: &str| {
            assert!(!event.contains('\n'), "an event is one line: {event:?}");
            let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("no data: {event:?}"));
            serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}"))
        };
        events.into_iter().map(event).collect()
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}
