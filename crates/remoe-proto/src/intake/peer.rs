//! One connection: its socket, read in portions, and what is known of the other end.

use super::ledger::Rank;
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

/// Bytes that are read from a socket before the tasks of its streams have their turn: what is read is
/// theirs to account for.
const PORTION: usize = 32 << 10;
/// A connection that is over here stays for so long at most, until the other end has closed it too.
const LINGER: Duration = Duration::from_secs(1);

/// Nothing is read: a message waits for room.
const PAUSED: u8 = 1;
/// The connection is to end.
const CLOSED: u8 = 2;

/// The identity of the other end is not known yet.
const STRANGER: u8 = 0;
/// The other end has an identity that is let in.
const WELCOME: u8 = 1;
/// The other end has another identity.
const REFUSED: u8 = 2;

/// How useless a connection is, the least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EvictionClass {
    Idle,
    Unproven,
    Unknown,
}

/// A connection as its streams and the listener see it.
pub(super) struct Peer {
    pub(super) id: u64,
    since: Instant,
    /// [`STRANGER`], [`WELCOME`] or [`REFUSED`].
    standing: AtomicU8,
    /// Microseconds from `since` to the last whole message.
    last: AtomicU64,
    proven: AtomicBool,
    ended: AtomicU32,
    streams: AtomicUsize,
    /// Bit set of [`PAUSED`] and [`CLOSED`].
    flags: AtomicU8,
    /// The task that reads the socket.
    reader: AtomicWaker,
}

impl Peer {
    pub(super) fn new(id: u64) -> Arc<Self> {
        Arc::new(Self {
            id,
            since: Instant::now(),
            standing: AtomicU8::new(STRANGER),
            last: AtomicU64::new(0),
            proven: AtomicBool::new(false),
            ended: AtomicU32::new(0),
            streams: AtomicUsize::new(0),
            flags: AtomicU8::new(0),
            reader: AtomicWaker::new(),
        })
    }

    /// Notes if the other end has an identity that is let in.
    pub(super) fn known(&self, welcome: bool) {
        self.standing.store(if welcome { WELCOME } else { REFUSED }, Ordering::Relaxed);
    }

    /// Reports if its requests are taken.
    pub(super) fn is_welcome(&self) -> bool {
        self.standing.load(Ordering::Relaxed) == WELCOME
    }

    pub(super) fn rank(&self) -> Rank {
        Rank { ended: self.ended.load(Ordering::Relaxed), unproven: !self.proven.load(Ordering::Relaxed) }
    }

    /// A whole message has come.
    pub(super) fn finished_message(&self) {
        self.proven.store(true, Ordering::Relaxed);
        let micros = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.last.store(micros, Ordering::Relaxed);
    }

    /// A message of it had to be ended.
    pub(super) fn lost_message(&self) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    /// The streams whose requests are still read, this one included.
    pub(super) fn open_stream(&self) -> usize {
        self.streams.fetch_add(1, Ordering::AcqRel) + 1
    }

    pub(super) fn close_stream(&self) {
        self.streams.fetch_sub(1, Ordering::AcqRel);
    }

    /// How useless it is, and for how long: what may be closed for a newcomer is first what did not say who
    /// it is, or may not be here, then what never brought a message, then what brought none for `idle` and
    /// has no stream.
    pub(super) fn uselessness(&self, idle: Duration) -> Option<(EvictionClass, Duration)> {
        let quiet =
            self.since.elapsed().saturating_sub(Duration::from_micros(self.last.load(Ordering::Relaxed)));
        let uselessness = if !self.is_welcome() {
            EvictionClass::Unknown
        } else if !self.proven.load(Ordering::Relaxed) {
            EvictionClass::Unproven
        } else if self.streams.load(Ordering::Acquire) == 0 && quiet >= idle {
            EvictionClass::Idle
        } else {
            return None;
        };
        Some((uselessness, quiet))
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

    /// Nothing is to be read: waits for the end of the connection as well.
    fn listen(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
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

/// A request's view of its connection.
#[derive(Clone)]
pub struct PeerInfo(pub(super) Arc<Peer>);

/// An accepted connection.
pub struct Socket {
    stream: TcpStream,
    peer: Arc<Peer>,
    /// Bytes read since others had their turn.
    read: usize,
    /// The end of waiting for the other end, once nothing is written any more.
    lingering: Option<Pin<Box<Sleep>>>,
}

impl Socket {
    pub(super) fn new(stream: TcpStream, peer: Arc<Peer>) -> Self {
        Self { stream, peer, read: 0, lingering: None }
    }

    /// Reads and discards data that still arrives until the other end closes. If a socket is dropped with unread data,
    /// it is reset, and the other end loses what it has not read yet.
    fn poll_linger(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let deadline = self.lingering.get_or_insert_with(|| Box::pin(sleep(LINGER)));
        if deadline.as_mut().poll(context).is_ready() || self.peer.listen(context).is_ready() {
            return Poll::Ready(());
        }
        let mut room = [MaybeUninit::uninit(); 4 << 10];
        for _ in 0..PORTION / size_of_val(&room) {
            let mut buffer = ReadBuf::uninit(&mut room);
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
        if self.read >= PORTION {
            self.read = 0;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        ready!(self.peer.poll_open(context))?;
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(context, buffer);
        match outcome {
            Poll::Ready(outcome) => {
                self.read += buffer.filled().len() - before;
                Poll::Ready(outcome)
            }
            Poll::Pending => {
                self.read = 0;
                self.peer.listen(context)
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

    /// Both ends of a connection.
    async fn connection() -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (Socket::new(listener.accept().await.unwrap().0, Peer::new(0)), client)
    }

    #[tokio::test]
    async fn what_was_written_arrives_though_something_lies_unread() {
        const BYTES: usize = 8 << 20;
        let (mut socket, mut client) = connection().await;
        client.write_all(&[1; 1000]).await.unwrap();
        let server = tokio::spawn(async move {
            socket.write_all(&vec![7; BYTES]).await.unwrap();
            socket.shutdown().await.unwrap();
        });
        let mut read = Vec::new();
        client.read_to_end(&mut read).await.unwrap();
        assert_eq!(read.len(), BYTES);
        drop(client);
        server.await.unwrap();
    }

    #[tokio::test]
    async fn an_end_that_never_closes_is_not_waited_for_without_end() {
        let (mut socket, _client) = connection().await;
        socket.shutdown().await.unwrap();
    }

    #[tokio::test]
    async fn who_makes_place_for_another_does_not_linger() {
        let (mut socket, _client) = connection().await;
        socket.peer.close();
        socket.shutdown().await.unwrap();
    }
}
