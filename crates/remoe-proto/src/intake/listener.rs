//! Listener that accepts connections up to the limit, only from allowed peers.
//!
//! Each handshake is its own task, so that a slow one delays no other connection. A connection in its handshake
//! counts against the limit and is the first to be closed.

use super::handshake::TlsHandshake;
use super::peer::{Peer, Socket};
use crate::identity::{MaybeTlsStream, Protocol};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep};
use tokio_stream::Stream;
use tonic::transport::server::TcpIncoming;

/// Time without a message after which a connection without streams may be closed for another.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Idle time before TCP keepalive probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);

/// Pause after a failure to accept, most likely for lack of file descriptors.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Stream of accepted connections.
pub struct Incoming {
    listener: TcpIncoming,
    pause: Option<Pin<Box<Sleep>>>,
    limit: usize,
    next_peer_id: u64,
    peers: Vec<Arc<Peer>>,
    /// TLS handshake. Without one, every peer is allowed.
    handshake: Option<TlsHandshake>,
    /// Handshakes in progress. A failed one returns `None`.
    handshakes: JoinSet<Option<MaybeTlsStream<Socket>>>,
}

impl Incoming {
    pub(super) fn new(listener: TcpListener, limit: usize, handshake: Option<TlsHandshake>) -> Self {
        let listener =
            TcpIncoming::from(listener).with_nodelay(Some(true)).with_keepalive(Some(KEEPALIVE_IDLE));
        let handshakes = JoinSet::new();
        Self { listener, pause: None, limit, next_peer_id: 0, peers: Vec::new(), handshake, handshakes }
    }

    /// Makes room for one more connection, if necessary by closing the most dispensable one. Returns false if none
    /// may be closed.
    fn make_room(&mut self) -> bool {
        self.peers.retain(|peer| !peer.is_closed());
        self.peers.len() < self.limit || self.close_most_dispensable()
    }

    /// Closes the most dispensable connection, if any may be closed.
    fn close_most_dispensable(&self) -> bool {
        let dispensable =
            self.peers.iter().filter_map(|peer| Some((peer.eviction_priority(IDLE_TIMEOUT)?, peer)));
        match dispensable.max_by_key(|(priority, _)| *priority) {
            Some((_, peer)) => {
                peer.close();
                true
            }
            None => false,
        }
    }

    /// Returns the next connection with a completed handshake.
    fn poll_handshakes(&mut self, context: &mut Context<'_>) -> Poll<MaybeTlsStream<Socket>> {
        while let Poll::Ready(Some(finished)) = self.handshakes.poll_join_next(context) {
            if let Ok(Some(connection)) = finished {
                return Poll::Ready(connection);
            }
        }
        Poll::Pending
    }
}

impl Stream for Incoming {
    type Item = io::Result<MaybeTlsStream<Socket>>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Poll::Ready(connection) = self.poll_handshakes(context) {
            return Poll::Ready(Some(Ok(connection)));
        }
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(context));
            self.pause = None;
        }
        loop {
            let stream = match ready!(Pin::new(&mut self.listener).poll_next(context)) {
                Some(Ok(stream)) => stream,
                Some(Err(error)) => {
                    self.close_most_dispensable();
                    self.pause = Some(Box::pin(sleep(ACCEPT_RETRY_PAUSE)));
                    return Poll::Ready(Some(Err(error)));
                }
                None => return Poll::Ready(None),
            };
            if self.make_room() {
                let peer = Peer::new(self.next_peer_id);
                self.next_peer_id += 1;
                self.peers.push(peer.clone());
                let socket = Socket::new(stream, peer.clone());
                let Some(handshake) = self.handshake.clone() else {
                    peer.set_allowed(true);
                    return Poll::Ready(Some(Ok(MaybeTlsStream::Plain(socket))));
                };
                self.handshakes.spawn(async move {
                    let (connection, is_allowed) = handshake.accept(Protocol::Grpc, socket).await?;
                    peer.set_allowed(is_allowed);
                    Some(connection)
                });
                // Registers the waker for its end.
                if let Poll::Ready(connection) = self.poll_handshakes(context) {
                    return Poll::Ready(Some(Ok(connection)));
                }
            }
        }
    }
}
