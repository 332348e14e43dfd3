//! Backpressure of a gRPC server: limits on connections, streams, and the bytes of messages that are not complete.
//!
//! A peer can begin a message and never finish it, on as many streams and connections as it likes. Here a
//! message gets its room before it is read, out of one budget for all connections ([`ledger`]); until then
//! its connection is not read at all. Where there is no room, messages of connections that never finished
//! one give way first, then those of connections that have several under way, then those that take too
//! long. A message that lies in what was just read needs no room, so that an exchange of small messages
//! costs nothing more.

mod body;
mod handshake;
mod ledger;
mod listener;
mod messages;
mod peer;
mod service;

pub use handshake::{Refusal, TlsHandshake};
pub use listener::Incoming;
pub use messages::Messages;
pub use peer::{PeerInfo, Socket};
pub use service::IntakeService;

use body::{MessageReader, Ticket};
use ledger::{Ledger, Notices, ReservationOutcome};
use peer::Peer;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tonic::transport::Server;
use tower::Layer;
use tower::layer::util::{Identity, Stack};

/// Streams that every connection may have, however many there are in all.
const SURE_STREAMS: usize = 2;
/// How long those that wait for room go without looking, at least.
const LOOK: Duration = Duration::from_millis(20);

/// How much a server takes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IntakeLimits {
    /// Connections at a time. A newcomer takes the place of one that never brought a message or is idle.
    pub connections: usize,
    /// Requests of all connections that are being read at a time, two of each connection aside.
    pub streams: usize,
    /// Streams of one connection.
    pub connection_streams: u32,
    /// Largest message in bytes.
    pub message_bytes: usize,
    /// Room for unfinished messages in bytes; at least one of the largest fits.
    pub unfinished_bytes: usize,
}

/// The intake of one server; clones are the same.
#[derive(Clone)]
pub struct Intake(Arc<IntakeShared>);

struct IntakeShared {
    limits: IntakeLimits,
    ledger: Mutex<Ledger<Arc<Ticket>>>,
    streams: AtomicUsize,
}

impl Intake {
    /// An intake with these bounds.
    #[must_use]
    pub fn new(limits: IntakeLimits) -> Self {
        let room = limits.unfinished_bytes.max(limits.message_bytes + body::PREFIX);
        let ledger = Mutex::new(Ledger::new(room));
        Self(Arc::new(IntakeShared { limits, ledger, streams: AtomicUsize::new(0) }))
    }

    /// A server whose requests pass this intake. It must be served on [`Self::listen`]'s connections.
    #[must_use]
    pub fn server(&self) -> Server<Stack<Self, Identity>> {
        Server::builder().max_concurrent_streams(self.0.limits.connection_streams).layer(self.clone())
    }

    /// The connections of `listener`, as many as are allowed, from clients that pass the `handshake`; without one from
    /// all, without TLS.
    #[must_use]
    pub fn listen(&self, listener: TcpListener, handshake: Option<TlsHandshake>) -> Incoming {
        Incoming::new(listener, self.0.limits.connections, handshake)
    }

    fn limits(&self) -> &IntakeLimits {
        &self.0.limits
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger<Arc<Ticket>>> {
        // No step of the ledger leaves it half-changed.
        self.0.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, peer: &Peer, bytes: usize, ticket: &Arc<Ticket>) -> (u64, ReservationOutcome) {
        let asked = self.ledger().ask(peer.id, peer.rank(), bytes, ticket.clone(), Instant::now());
        let (entry, answer, notices) = asked;
        tell(notices);
        (entry, answer)
    }

    fn release(&self, entry: u64) {
        let notices = self.ledger().release(entry, Instant::now());
        tell(notices);
    }

    /// Lets time have its effect; returns when it has one again.
    fn look_again(&self, now: Instant) -> Instant {
        let mut ledger = self.ledger();
        let notices = ledger.settle(now);
        let next = ledger.next_change().unwrap_or(now);
        drop(ledger);
        tell(notices);
        next.max(now + LOOK)
    }

    /// Reports if one more request of `peer` is read, and counts it; [`Self::close_stream`] takes that back.
    fn open_stream(&self, peer: &Peer) -> bool {
        let of_peer = peer.open_stream();
        let all = self.0.streams.fetch_add(1, Ordering::AcqRel) + 1;
        let open = of_peer <= SURE_STREAMS || all <= self.0.limits.streams;
        if !open {
            self.close_stream(peer);
        }
        open
    }

    fn close_stream(&self, peer: &Peer) {
        peer.close_stream();
        self.0.streams.fetch_sub(1, Ordering::AcqRel);
    }
}

fn tell(notices: Notices<Arc<Ticket>>) {
    for (ticket, notice) in notices {
        ticket.tell(notice);
    }
}

impl<S> Layer<S> for Intake {
    type Service = IntakeService<S>;

    fn layer(&self, inner: S) -> IntakeService<S> {
        IntakeService::new(self.clone(), inner)
    }
}

/// A request's reader, for tonic or for the service itself through [`Messages`].
struct Inbound {
    reader: Mutex<Option<MessageReader>>,
}

impl Inbound {
    fn new(reader: MessageReader) -> Arc<Self> {
        Arc::new(Self { reader: Mutex::new(Some(reader)) })
    }

    fn reader(&self) -> MutexGuard<'_, Option<MessageReader>> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
