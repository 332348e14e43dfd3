//! Accepts connections, up to the limit and only from peers that are let in.
//!
//! Each handshake is a task of its own, so that a slow one delays no other connection; a connection in its handshake
//! counts as any other, and is the first to give way.

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

/// A connection without streams that brought nothing for so long may be closed for another.
const IDLE: Duration = Duration::from_secs(60);
/// The system asks the other end after so long without a byte whether it is still there.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// After a failure to accept, most likely for want of descriptors, the next attempt waits so long.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepted connections.
pub struct Incoming {
    listener: TcpIncoming,
    pause: Option<Pin<Box<Sleep>>>,
    limit: usize,
    next: u64,
    peers: Vec<Arc<Peer>>,
    /// Admission by identity. Absent to let in every peer.
    handshake: Option<TlsHandshake>,
    /// Handshakes in progress; `None` is the result of a failed one.
    handshakes: JoinSet<Option<MaybeTlsStream<Socket>>>,
}

impl Incoming {
    pub(super) fn new(listener: TcpListener, limit: usize, handshake: Option<TlsHandshake>) -> Self {
        let listener = TcpIncoming::from(listener).with_nodelay(Some(true)).with_keepalive(Some(KEEPALIVE));
        let handshakes = JoinSet::new();
        Self { listener, pause: None, limit, next: 0, peers: Vec::new(), handshake, handshakes }
    }

    /// Reports if there is a place for one more connection, and closes the least useful one for it if need be.
    fn make_place(&mut self) -> bool {
        self.peers.retain(|peer| !peer.is_closed());
        self.peers.len() < self.limit || self.close_one()
    }

    /// Closes the least useful connection, if any may be closed.
    fn close_one(&self) -> bool {
        let useless = self.peers.iter().filter_map(|peer| Some((peer.uselessness(IDLE)?, peer)));
        match useless.max_by_key(|(uselessness, _)| *uselessness) {
            Some((_, peer)) => {
                peer.close();
                true
            }
            None => false,
        }
    }
}

impl Incoming {
    /// The next connection whose handshake is over.
    fn poll_entered(&mut self, context: &mut Context<'_>) -> Poll<MaybeTlsStream<Socket>> {
        while let Poll::Ready(Some(ended)) = self.handshakes.poll_join_next(context) {
            if let Ok(Some(line)) = ended {
                return Poll::Ready(line);
            }
        }
        Poll::Pending
    }
}

impl Stream for Incoming {
    type Item = io::Result<MaybeTlsStream<Socket>>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Poll::Ready(line) = self.poll_entered(context) {
            return Poll::Ready(Some(Ok(line)));
        }
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(context));
            self.pause = None;
        }
        loop {
            let stream = match ready!(Pin::new(&mut self.listener).poll_next(context)) {
                Some(Ok(stream)) => stream,
                Some(Err(error)) => {
                    self.close_one();
                    self.pause = Some(Box::pin(sleep(PAUSE)));
                    return Poll::Ready(Some(Err(error)));
                }
                None => return Poll::Ready(None),
            };
            if self.make_place() {
                let peer = Peer::new(self.next);
                self.next += 1;
                self.peers.push(peer.clone());
                let socket = Socket::new(stream, peer.clone());
                let Some(handshake) = self.handshake.clone() else {
                    peer.known(true);
                    return Poll::Ready(Some(Ok(MaybeTlsStream::Plain(socket))));
                };
                self.handshakes.spawn(async move {
                    let (line, is_welcome) = handshake.enter(Protocol::Grpc, socket).await?;
                    peer.known(is_welcome);
                    Some(line)
                });
                // Asks to be woken at its end.
                if let Poll::Ready(line) = self.poll_entered(context) {
                    return Poll::Ready(Some(Ok(line)));
                }
            }
        }
    }
}
