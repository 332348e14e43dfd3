//! Peer: one connection, its socket, which is read in portions, and the standing of the other end.

use super::message_budget::PeerStanding;
use crate::identity::MaybeTlsStream;
use futures_util::task::AtomicWaker;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};
use tonic::transport::server::Connected;

/// Bytes read from a socket before the tasks of its streams run and account for them.
const MAX_PORTION_BYTES: usize = 32 << 10;
/// Longest wait for the other end to close after this end has closed.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);

/// Flag: the socket is not read while a message waits for bytes of the budget.
const PAUSED: u8 = 1;
/// Flag: the connection must end.
const CLOSED: u8 = 2;

/// Admission: the identity of the other end is not known yet.
const UNIDENTIFIED: u8 = 0;
/// Admission: the identity of the other end is allowed.
const ALLOWED: u8 = 1;
/// Admission: the identity of the other end is not allowed.
const FORBIDDEN: u8 = 2;

/// Class of a connection that may be closed for a new one, the most dispensable last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EvictionClass {
    /// No stream, and no message for the idle timeout.
    Idle,
    /// Never completed a message.
    Unproven,
    /// Not identified, or not allowed.
    Unknown,
}

/// State of a connection that its streams and the listener share.
pub(super) struct Peer {
    pub(super) id: u64,
    since: Instant,
    /// [`UNIDENTIFIED`], [`ALLOWED`] or [`FORBIDDEN`].
    admission: AtomicU8,
    /// Microseconds from `since` to the last complete message.
    last_message_micros: AtomicU64,
    proven: AtomicBool,
    dropped_messages: AtomicU32,
    streams: AtomicUsize,
    /// Bit set of [`PAUSED`] and [`CLOSED`].
    flags: AtomicU8,
    /// Waker of the task that reads the socket.
    reader: AtomicWaker,
}

impl Peer {
    pub(super) fn new(id: u64) -> Arc<Self> {
        Arc::new(Self {
            id,
            since: Instant::now(),
            admission: AtomicU8::new(UNIDENTIFIED),
            last_message_micros: AtomicU64::new(0),
            proven: AtomicBool::new(false),
            dropped_messages: AtomicU32::new(0),
            streams: AtomicUsize::new(0),
            flags: AtomicU8::new(0),
            reader: AtomicWaker::new(),
        })
    }

    /// Sets whether the identity of the other end is allowed.
    pub(super) fn set_allowed(&self, is_allowed: bool) {
        self.admission.store(if is_allowed { ALLOWED } else { FORBIDDEN }, Ordering::Relaxed);
    }

    /// Returns true if its requests are accepted.
    pub(super) fn is_allowed(&self) -> bool {
        self.admission.load(Ordering::Relaxed) == ALLOWED
    }

    pub(super) fn standing(&self) -> PeerStanding {
        PeerStanding {
            dropped_messages: self.dropped_messages.load(Ordering::Relaxed),
            is_unproven: !self.proven.load(Ordering::Relaxed),
        }
    }

    /// Records a complete message.
    pub(super) fn record_completed_message(&self) {
        self.proven.store(true, Ordering::Relaxed);
        let micros = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.last_message_micros.store(micros, Ordering::Relaxed);
    }

    /// Records a dropped message.
    pub(super) fn record_dropped_message(&self) {
        self.dropped_messages.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a new stream and returns the number of streams that are being read, including it.
    pub(super) fn open_stream(&self) -> usize {
        self.streams.fetch_add(1, Ordering::AcqRel) + 1
    }

    pub(super) fn close_stream(&self) {
        self.streams.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns the eviction class and the quiet time of the connection, or `None` if it must not be closed. Closed
    /// first are connections that are not identified or not allowed, then those that never completed a message, then
    /// those without streams and without a message for `idle`.
    pub(super) fn eviction_priority(&self, idle: Duration) -> Option<(EvictionClass, Duration)> {
        let quiet = self
            .since
            .elapsed()
            .saturating_sub(Duration::from_micros(self.last_message_micros.load(Ordering::Relaxed)));
        let class = if !self.is_allowed() {
            EvictionClass::Unknown
        } else if !self.proven.load(Ordering::Relaxed) {
            EvictionClass::Unproven
        } else if self.streams.load(Ordering::Acquire) == 0 && quiet >= idle {
            EvictionClass::Idle
        } else {
            return None;
        };
        Some((class, quiet))
    }

    pub(super) fn pause(&self) {
        self.flags.fetch_or(PAUSED, Ordering::AcqRel);
    }

    pub(super) fn resume(&self) {
        self.flags.fetch_and(!PAUSED, Ordering::AcqRel);
        self.reader.wake();
    }

    pub(super) fn close(&self) {
        self.flags.fetch_or(CLOSED, Ordering::AcqRel);
        self.reader.wake();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.flags.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Waits for the end of the connection while nothing is to be read.
    fn poll_closed(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        self.reader.register(context.waker());
        if self.is_closed() { Poll::Ready(Err(closed())) } else { Poll::Pending }
    }

    /// Returns ready once the socket may be read.
    fn poll_open(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.flags.load(Ordering::Acquire) == 0 {
            return Poll::Ready(Ok(()));
        }
        self.reader.register(context.waker());
        match self.flags.load(Ordering::Acquire) {
            0 => Poll::Ready(Ok(())),
            flags if flags & CLOSED != 0 => Poll::Ready(Err(closed())),
            _ => Poll::Pending,
        }
    }
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "connection closed in favour of another one")
}

/// Connection of a request, as an extension of the request.
#[derive(Clone)]
pub struct PeerInfo(pub(super) Arc<Peer>);

/// Socket of an accepted connection.
pub struct Socket {
    stream: TcpStream,
    peer: Arc<Peer>,
    /// Bytes read since other tasks ran.
    portion_bytes: usize,
    /// Deadline for the other end to close, once this end has closed.
    lingering: Option<Pin<Box<Sleep>>>,
}

impl Socket {
    pub(super) fn new(stream: TcpStream, peer: Arc<Peer>) -> Self {
        Self { stream, peer, portion_bytes: 0, lingering: None }
    }

    /// Reads and discards data until the other end closes. Dropping a socket with unread data would reset it, and the
    /// other end would lose what it has not read yet.
    fn poll_linger(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let deadline = self.lingering.get_or_insert_with(|| Box::pin(sleep(LINGER_TIMEOUT)));
        if deadline.as_mut().poll(context).is_ready() || self.peer.poll_closed(context).is_ready() {
            return Poll::Ready(());
        }
        let mut discarded = [MaybeUninit::uninit(); 4 << 10];
        for _ in 0..MAX_PORTION_BYTES / size_of_val(&discarded) {
            let mut buffer = ReadBuf::uninit(&mut discarded);
            match ready!(Pin::new(&mut self.stream).poll_read(context, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => (),
                Ok(()) | Err(_) => return Poll::Ready(()),
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.peer.close();
    }
}

impl Connected for MaybeTlsStream<Socket> {
    type ConnectInfo = PeerInfo;

    fn connect_info(&self) -> PeerInfo {
        PeerInfo(self.carrier().peer.clone())
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.portion_bytes >= MAX_PORTION_BYTES {
            self.portion_bytes = 0;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        ready!(self.peer.poll_open(context))?;
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(context, buffer);
        match outcome {
            Poll::Ready(outcome) => {
                self.portion_bytes += buffer.filled().len() - before;
                Poll::Ready(outcome)
            }
            Poll::Pending => {
                self.portion_bytes = 0;
                self.peer.poll_closed(context)
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.lingering.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
        }
        self.poll_linger(context).map(Ok)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{Peer, Socket};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    /// Returns both ends of a connection.
    async fn connection() -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (Socket::new(listener.accept().await.unwrap().0, Peer::new(0)), client)
    }

    #[tokio::test]
    async fn written_data_arrives_despite_unread_input() {
        const BYTES: usize = 8 << 20;
        let (mut socket, mut client) = connection().await;
        client.write_all(&[1; 1000]).await.unwrap();
        let server = tokio::spawn(async move {
            socket.write_all(&vec![7; BYTES]).await.unwrap();
            socket.shutdown().await.unwrap();
        });
        let mut portion_bytes = Vec::new();
        client.read_to_end(&mut portion_bytes).await.unwrap();
        assert_eq!(portion_bytes.len(), BYTES);
        drop(client);
        server.await.unwrap();
    }

    #[tokio::test]
    async fn lingering_ends_at_its_timeout() {
        let (mut socket, _client) = connection().await;
        socket.shutdown().await.unwrap();
    }

    #[tokio::test]
    async fn evicted_connection_does_not_linger() {
        let (mut socket, _client) = connection().await;
        socket.peer.close();
        socket.shutdown().await.unwrap();
    }
}
