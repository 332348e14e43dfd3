//! HTTP/1.1 byte by byte: what a client may write, well formed or not, and exactly what comes back.

use crate::deadline::{LONG, SOON, within};
use remoe_proto::identity::{MaybeTlsStream, Protocol, Trust};
use serde_json::Value;
use std::io;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// A connection; it is closed when it is dropped.
pub struct Connection {
    stream: MaybeTlsStream<TcpStream>,
    /// Bytes that were received and not yet read.
    came: Vec<u8>,
    /// Trailers of the last chunked body that has ended.
    trailers: Vec<(String, String)>,
}

/// The head of an answer.
#[derive(Debug, Clone)]
pub struct Head {
    /// The status code.
    pub status: u16,
    /// Names in lower case, in order.
    pub headers: Vec<(String, String)>,
}

/// A whole answer.
#[derive(Debug, Clone)]
pub struct RawResponse {
    /// Status and headers.
    pub head: Head,
    /// Body, reassembled from its chunks.
    pub body: Vec<u8>,
    /// Trailers that followed the chunks, names in lower case.
    pub trailers: Vec<(String, String)>,
}

/// A request without a body.
#[must_use]
pub fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n")
}

/// A request with a body of JSON.
#[must_use]
pub fn post(path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

/// Sends one request on a connection of its own.
pub async fn ask(address: SocketAddr, request: impl AsRef<[u8]>) -> RawResponse {
    let mut connection = Connection::open(address).await;
    connection.write(request).await.expect("the request is taken");
    connection.answer().await.expect("an answer")
}

impl Connection {
    /// Connects.
    pub async fn open(address: SocketAddr) -> Self {
        Self::reach(address).await.expect("the server accepts")
    }

    /// Connects where there is a server.
    ///
    /// # Errors
    /// There is none.
    pub async fn reach(address: SocketAddr) -> io::Result<Self> {
        let stream = within(SOON, "a TCP connection", TcpStream::connect(address)).await?;
        Ok(Self::over(MaybeTlsStream::Plain(stream)))
    }

    /// Connects within TLS, to whom `trust` names.
    ///
    /// # Errors
    /// There is no server, or the handshake comes to nothing.
    pub async fn secured(address: SocketAddr, trust: &Trust) -> io::Result<Self> {
        let stream = within(SOON, "a TCP connection", TcpStream::connect(address)).await?;
        Ok(Self::over(trust.connect_for(Protocol::Http, stream).await?))
    }

    fn over(stream: MaybeTlsStream<TcpStream>) -> Self {
        Self { stream, came: Vec::new(), trailers: Vec::new() }
    }

    /// Connects with as small a buffer as there is for what comes.
    pub async fn narrow(address: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(1024).expect("a small buffer");
        let stream = within(SOON, "a TCP connection", socket.connect(address)).await;
        Self::over(MaybeTlsStream::Plain(stream.expect("the server accepts")))
    }

    /// Writes bytes.
    ///
    /// # Errors
    /// The server has closed the connection.
    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        within(LONG, "taking a request", self.stream.write_all(bytes.as_ref())).await
    }

    /// The head of the next answer.
    ///
    /// # Errors
    /// The connection ended before.
    pub async fn head(&mut self) -> io::Result<Head> {
        let end = loop {
            if let Some(at) = find(&self.came, b"\r\n\r\n") {
                break at;
            }
            self.more().await?;
        };
        let head: Vec<u8> = self.came.drain(..end + 4).collect();
        let text = String::from_utf8(head).map_err(io::Error::other)?;
        let mut lines = text.trim_end().split("\r\n");
        let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1.")?.get(2..5)?.parse().ok());
        let status = status.ok_or_else(|| io::Error::other(format!("not an HTTP answer: {text:?}")))?;
        let headers = lines.filter_map(|line| line.split_once(": "));
        let headers = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
        Ok(Head { status, headers })
    }

    /// The next chunk of a body in chunks; none at its end.
    ///
    /// # Errors
    /// The connection ended before.
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
        while self.came.len() < size + 2 {
            self.more().await?;
        }
        let mut chunk: Vec<u8> = self.came.drain(..size + 2).collect();
        assert!(chunk.ends_with(b"\r\n"), "a chunk ends with its line");
        chunk.truncate(size);
        Ok(Some(chunk))
    }

    /// The next line, without its end.
    async fn line(&mut self) -> io::Result<String> {
        let end = loop {
            if let Some(at) = find(&self.came, b"\r\n") {
                break at;
            }
            self.more().await?;
        };
        let mut line: Vec<u8> = self.came.drain(..end + 2).collect();
        line.truncate(end);
        String::from_utf8(line).map_err(io::Error::other)
    }

    /// The next answer, whole.
    ///
    /// # Errors
    /// The connection ended before.
    pub async fn answer(&mut self) -> io::Result<RawResponse> {
        let head = self.head().await?;
        let (mut body, mut trailers) = (Vec::new(), Vec::new());
        if head.header("transfer-encoding") == "chunked" {
            while let Some(chunk) = self.chunk().await? {
                body.extend(chunk);
            }
            trailers = std::mem::take(&mut self.trailers);
        } else if let Ok(length) = head.header("content-length").parse() {
            while self.came.len() < length {
                self.more().await?;
            }
            body = self.came.drain(..length).collect();
        }
        Ok(RawResponse { head, body, trailers })
    }

    /// Everything until the server ends the connection, in whatever way.
    pub async fn rest(&mut self) -> Vec<u8> {
        while self.more().await.is_ok() {}
        std::mem::take(&mut self.came)
    }

    async fn more(&mut self) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        match within(LONG, "more of an answer", self.stream.read(&mut buffer)).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.came.extend_from_slice(&buffer[..count]);
                Ok(())
            }
        }
    }
}

impl Head {
    /// A header's value, empty where there is none.
    #[must_use]
    pub fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(header, _)| header == name);
        found.map_or("", |(_, value)| value)
    }
}

impl RawResponse {
    /// The body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("the body is UTF-8")
    }

    /// The body of a 200 as JSON.
    pub fn ok(&self) -> Value {
        assert_eq!(self.head.status, 200, "{}", self.text());
        assert_eq!(self.head.header("content-type"), "application/json");
        serde_json::from_slice(&self.body).expect("the body is JSON")
    }

    /// The fields of an error of this status: all four, and nothing beside them.
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

    /// Asserts a 400 that names `param`.
    pub fn refuses(&self, param: &str) {
        let error = self.error(400);
        assert_eq!(error["param"], param, "{error}");
        assert_eq!(error["type"], "invalid_request_error", "{error}");
    }

    /// The chunks of a stream that came to its proper end, each event framed exactly as it must be.
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
