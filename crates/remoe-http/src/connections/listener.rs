//! Listener that bounds the number of connections: a new one displaces the one that has been idle for longest.

use super::deadlines::ConnectionDeadlines;
use super::limits::ConnectionLimits;
use super::metrics::ConnectionMetrics;
use axum::serve::Listener;
use remoe_proto::TlsHandshake;
use remoe_proto::identity::{self, Protocol};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

/// Time that a displaced connection has to end before another one is displaced.
const DISPLACEMENT_WAIT: Duration = Duration::from_millis(20);

/// Listener whose connections have deadlines and are bounded in number.
pub(super) struct LimitedListener {
    listener: TcpListener,
    /// TLS and identity check of clients; `None`: plaintext, every client is admitted.
    handshake: Option<TlsHandshake>,
    limits: ConnectionLimits,
    metrics: ConnectionMetrics,
    slots: Arc<Semaphore>,
    connections: Vec<Weak<ConnectionDeadlines>>,
}

impl LimitedListener {
    pub(super) fn new(
        listener: TcpListener,
        handshake: Option<TlsHandshake>,
        limits: ConnectionLimits,
        metrics: ConnectionMetrics,
    ) -> Self {
        let slots = Arc::new(Semaphore::new(limits.count));
        Self { listener, handshake, limits, metrics, slots, connections: Vec::new() }
    }

    /// Returns a slot for one more connection. If none is free, displaces the connection that has been idle for
    /// longest, unidentified ones first. While none is idle, waits.
    async fn slot(&mut self) -> Option<OwnedSemaphorePermit> {
        loop {
            if let Ok(slot) = self.slots.clone().try_acquire_owned() {
                return Some(slot);
            }
            self.connections.retain(|line| line.strong_count() > 0);
            let now = Instant::now();
            let connections = self.connections.iter().filter_map(Weak::upgrade);
            let idle = connections.filter_map(|line| Some((line.displacement_rank(now)?, line)));
            if let Some((_, oldest)) = idle.min_by_key(|(rank, _)| *rank) {
                oldest.displace(now);
            }
            if let Ok(slot) = timeout(DISPLACEMENT_WAIT, self.slots.clone().acquire_owned()).await {
                return slot.ok();
            }
        }
    }
}

impl Listener for LimitedListener {
    type Io = Socket;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Socket, SocketAddr) {
        let (stream, address) = Listener::accept(&mut self.listener).await;
        // Tokens are small packets, which must not wait for each other.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        let slot = self.slot().await;
        let deadlines = ConnectionDeadlines::open(
            &stream,
            self.handshake.is_none(),
            self.limits,
            self.metrics.clone(),
            slot,
        );
        if self.connections.len() >= 2 * self.limits.count {
            self.connections.retain(|line| line.strong_count() > 0);
        }
        self.connections.push(Arc::downgrade(&deadlines));
        let stream = ConnectionStream::new(stream, self.handshake.clone());
        // An IPv4 client of a dual-stack socket gets its IPv4 address.
        (Socket { stream, deadlines }, SocketAddr::new(address.ip().to_canonical(), address.port()))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Handshake of a connection. Returns the stream and whether the client is admitted, or `None` if it failed.
type Handshake = dyn Future<Output = Option<(identity::MaybeTlsStream<TcpStream>, bool)>> + Send;

/// Byte stream of a connection, by the state of its handshake.
enum ConnectionStream {
    /// The handshake runs. It counts towards the deadline of the first head, and the connection may be displaced.
    Handshaking(Pin<Box<Handshake>>),
    /// The client is admitted.
    Open(identity::MaybeTlsStream<TcpStream>),
    /// The client is refused.
    Refused,
}

impl ConnectionStream {
    fn new(stream: TcpStream, handshake: Option<TlsHandshake>) -> Self {
        match handshake {
            None => Self::Open(identity::MaybeTlsStream::Plain(stream)),
            Some(handshake) => Self::Handshaking(Box::pin(handshake.accept(Protocol::Http, stream))),
        }
    }

    /// Returns the stream once the handshake is complete.
    fn poll_open(
        &mut self,
        deadlines: &ConnectionDeadlines,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Pin<&mut identity::MaybeTlsStream<TcpStream>>>> {
        if let Self::Handshaking(handshake_future) = self {
            *self = match ready!(handshake_future.as_mut().poll(context)) {
                Some((stream, true)) => {
                    deadlines.admit();
                    Self::Open(stream)
                }
                Some((_, false)) | None => Self::Refused,
            };
        }
        Poll::Ready(match self {
            Self::Open(stream) => Ok(Pin::new(stream)),
            Self::Handshaking(_) | Self::Refused => Err(io::ErrorKind::PermissionDenied.into()),
        })
    }
}

/// Accepted connection, which reports received bytes to its deadlines.
pub(super) struct Socket {
    stream: ConnectionStream,
    deadlines: Arc<ConnectionDeadlines>,
}

impl Socket {
    pub(super) fn deadlines(&self) -> &Arc<ConnectionDeadlines> {
        &self.deadlines
    }

    fn poll_open(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Pin<&mut identity::MaybeTlsStream<TcpStream>>>> {
        let Self { stream, deadlines } = self;
        stream.poll_open(deadlines, context)
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = match ready!(self.poll_open(context))?.poll_read(context, buffer) {
            // A TLS connection that ends without close_notify, for example when displaced, is a normal end: the
            // length of requests is known.
            Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Poll::Ready(Ok(())),
            read => read,
        };
        if let Some(bytes) = buffer.filled().get(before..).filter(|bytes| !bytes.is_empty()) {
            self.deadlines.bytes_received(bytes);
        }
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_open(context))?.poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_open(context))?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            ConnectionStream::Open(stream) => Pin::new(stream).poll_shutdown(context),
            // Nothing was sent.
            ConnectionStream::Handshaking(_) | ConnectionStream::Refused => Poll::Ready(Ok(())),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_open(context))?.poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        // Plain sockets and TLS sessions both support it.
        true
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    #[tokio::test]
    async fn ipv4_client_of_dual_stack_socket_has_its_ipv4_address() {
        // Machines without IPv6 have no such socket.
        let Ok(listener) = TcpListener::bind("[::]:0").await else { return };
        let port = listener.local_addr().unwrap().port();
        let mut listener =
            LimitedListener::new(listener, None, ConnectionLimits::PROBES, ConnectionMetrics::new().unwrap());
        let client = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        let (_socket, address) = listener.accept().await;
        assert_eq!(address, client.local_addr().unwrap());
        assert_eq!(address.ip(), IpAddr::from(Ipv4Addr::LOCALHOST));
    }
}
