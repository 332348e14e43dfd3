//! Accepting: as many connections as there may be, the oldest idle one giving way to a new one.

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

/// How long one that was asked to give way is waited for before another is asked.
const LEAVES_WITHIN: Duration = Duration::from_millis(20);

/// A listener whose connections have deadlines and are bounded in number.
pub(super) struct LimitedListener {
    listener: TcpListener,
    /// TLS and admission of clients; absent: every client is let in, without TLS.
    handshake: Option<TlsHandshake>,
    limits: ConnectionLimits,
    metrics: ConnectionMetrics,
    slots: Arc<Semaphore>,
    lines: Vec<Weak<ConnectionDeadlines>>,
}

impl LimitedListener {
    pub(super) fn new(
        listener: TcpListener,
        handshake: Option<TlsHandshake>,
        limits: ConnectionLimits,
        metrics: ConnectionMetrics,
    ) -> Self {
        let slots = Arc::new(Semaphore::new(limits.count));
        Self { listener, handshake, limits, metrics, slots, lines: Vec::new() }
    }

    /// A place for one more connection: a free one, else that of the connection which has been without a
    /// request for longest, those first that have not said who they are. While all of them have requests, the new one
    /// waits.
    async fn slot(&mut self) -> Option<OwnedSemaphorePermit> {
        loop {
            if let Ok(slot) = self.slots.clone().try_acquire_owned() {
                return Some(slot);
            }
            self.lines.retain(|line| line.strong_count() > 0);
            let now = Instant::now();
            let lines = self.lines.iter().filter_map(Weak::upgrade);
            let idle = lines.filter_map(|line| Some((line.can_leave(now)?, line)));
            if let Some((_, oldest)) = idle.min_by_key(|(order, _)| *order) {
                oldest.give_way(now);
            }
            if let Ok(slot) = timeout(LEAVES_WITHIN, self.slots.clone().acquire_owned()).await {
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
        // Single tokens are small packets; they must not wait for each other.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        let slot = self.slot().await;
        let line = ConnectionDeadlines::open(
            &stream,
            self.handshake.is_none(),
            self.limits,
            self.metrics.clone(),
            slot,
        );
        if self.lines.len() >= 2 * self.limits.count {
            self.lines.retain(|line| line.strong_count() > 0);
        }
        self.lines.push(Arc::downgrade(&line));
        let stream = ConnectionStream::new(stream, self.handshake.clone());
        // A client that comes by IPv4 has that address, whatever the socket listens for.
        (Socket { stream, line }, SocketAddr::new(address.ip().to_canonical(), address.port()))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Ends with the connection, and whether its other end is let in; with none where it comes to nothing.
type Handshake = dyn Future<Output = Option<(identity::MaybeTlsStream<TcpStream>, bool)>> + Send;

/// Byte stream of a connection, by its state of admission.
enum ConnectionStream {
    /// The other end has to say who it is first. That is part of the time that it has for its first head, and until
    /// then it may be asked to give way as any other without a request.
    Entering(Pin<Box<Handshake>>),
    /// It is let in.
    Open(identity::MaybeTlsStream<TcpStream>),
    /// It is not.
    Refused,
}

impl ConnectionStream {
    fn new(stream: TcpStream, handshake: Option<TlsHandshake>) -> Self {
        match handshake {
            None => Self::Open(identity::MaybeTlsStream::Plain(stream)),
            Some(handshake) => Self::Entering(Box::pin(handshake.accept(Protocol::Http, stream))),
        }
    }

    /// It, once it is known who is at the other end.
    fn poll_open(
        &mut self,
        line: &ConnectionDeadlines,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Pin<&mut identity::MaybeTlsStream<TcpStream>>>> {
        if let Self::Entering(entering) = self {
            *self = match ready!(entering.as_mut().poll(context)) {
                Some((stream, true)) => {
                    line.enter();
                    Self::Open(stream)
                }
                Some((_, false)) | None => Self::Refused,
            };
        }
        Poll::Ready(match self {
            Self::Open(line) => Ok(Pin::new(line)),
            Self::Entering(_) | Self::Refused => Err(io::ErrorKind::PermissionDenied.into()),
        })
    }
}

/// An accepted connection that tells its line what comes.
pub(super) struct Socket {
    stream: ConnectionStream,
    line: Arc<ConnectionDeadlines>,
}

impl Socket {
    pub(super) fn line(&self) -> &Arc<ConnectionDeadlines> {
        &self.line
    }

    fn poll_open(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Pin<&mut identity::MaybeTlsStream<TcpStream>>>> {
        let Self { stream, line } = self;
        stream.poll_open(line, context)
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
            // The end of a connection within TLS that was not announced, as when it gives way: requests say how long
            // they are.
            Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Poll::Ready(Ok(())),
            read => read,
        };
        if let Some(bytes) = buffer.filled().get(before..).filter(|bytes| !bytes.is_empty()) {
            self.line.came(bytes);
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
            ConnectionStream::Open(line) => Pin::new(line).poll_shutdown(context),
            // Nothing was said.
            ConnectionStream::Entering(_) | ConnectionStream::Refused => Poll::Ready(Ok(())),
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
        // Sockets do, and so do sessions of TLS.
        true
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    #[tokio::test]
    async fn who_comes_by_ipv4_has_that_address_at_a_socket_for_both() {
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
