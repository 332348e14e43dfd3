//! Backpressure of a gRPC server: limits on connections, streams, and bytes of incomplete messages.
//!
//! A peer can start messages on many streams and connections and never finish them. Here, each message reserves its
//! bytes from one budget of all connections before it is read ([`message_budget`]); until then, its connection is not read.
//! If the budget is exhausted, messages are dropped in this order: those of connections that never completed one, of
//! connections with several in progress, and those that take too long. A message that has already arrived in full
//! needs no reservation, so that small messages cost nothing extra.

mod body;
mod handshake;
mod listener;
mod message_budget;
mod messages;
mod peer;
mod service;

pub use handshake::{ConnectionRefusal, TlsHandshake};
pub use listener::Incoming;
pub use messages::MessageStream;
pub use peer::{PeerInfo, Socket};
pub use service::IntakeService;

use body::{MessageReader, Reservation};
use message_budget::{MessageBudget, Notices, ReservationOutcome};
use peer::Peer;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tonic::transport::Server;
use tower::Layer;
use tower::layer::util::{Identity, Stack};

/// Streams that every connection may have regardless of the common limit.
const GUARANTEED_STREAMS: usize = 2;
/// Least interval between checks of a waiting message.
const RECHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Limits of a server's intake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IntakeLimits {
    /// Largest number of connections. A new one replaces one that never completed a message or is idle.
    pub connections: usize,
    /// Largest number of open requests over all connections, besides two of each connection.
    pub streams: usize,
    /// Largest number of streams of one connection.
    pub connection_streams: u32,
    /// Largest message, in bytes.
    pub message_bytes: usize,
    /// Budget for incomplete messages, in bytes. Raised to the largest message if it is smaller.
    pub unfinished_bytes: usize,
}

/// Intake of one server. Clones share it.
#[derive(Clone)]
pub struct Intake(Arc<IntakeShared>);

struct IntakeShared {
    limits: IntakeLimits,
    message_budget: Mutex<MessageBudget<Arc<Reservation>>>,
    streams: AtomicUsize,
}

impl Intake {
    /// Creates an intake with these limits.
    #[must_use]
    pub fn new(limits: IntakeLimits) -> Self {
        let budget = limits.unfinished_bytes.max(limits.message_bytes + body::PREFIX_BYTES);
        let message_budget = Mutex::new(MessageBudget::new(budget));
        Self(Arc::new(IntakeShared { limits, message_budget, streams: AtomicUsize::new(0) }))
    }

    /// Creates a server whose requests pass this intake. It must serve the connections of [`Self::listen`].
    #[must_use]
    pub fn server(&self) -> Server<Stack<Self, Identity>> {
        Server::builder().max_concurrent_streams(self.0.limits.connection_streams).layer(self.clone())
    }

    /// Accepts connections of `listener` up to the limit. With a `handshake`, accepts only clients that pass it;
    /// without one, all clients and no TLS.
    #[must_use]
    pub fn listen(&self, listener: TcpListener, handshake: Option<TlsHandshake>) -> Incoming {
        Incoming::new(listener, self.0.limits.connections, handshake)
    }

    fn limits(&self) -> &IntakeLimits {
        &self.0.limits
    }

    fn message_budget(&self) -> MutexGuard<'_, MessageBudget<Arc<Reservation>>> {
        // A panic cannot leave the budget half changed.
        self.0.message_budget.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reserve(&self, peer: &Peer, bytes: usize, ticket: &Arc<Reservation>) -> (u64, ReservationOutcome) {
        let reserved =
            self.message_budget().reserve(peer.id, peer.standing(), bytes, ticket.clone(), Instant::now());
        let (entry, outcome, notices) = reserved;
        deliver(notices);
        (entry, outcome)
    }

    fn release(&self, entry: u64) {
        let notices = self.message_budget().release(entry, Instant::now());
        deliver(notices);
    }

    /// Applies expired deadlines and returns the time of the next check.
    fn recheck(&self, now: Instant) -> Instant {
        let mut message_budget = self.message_budget();
        let notices = message_budget.update(now);
        let next = message_budget.next_change().unwrap_or(now);
        drop(message_budget);
        deliver(notices);
        next.max(now + RECHECK_INTERVAL)
    }

    /// Counts a new request of `peer` and returns true if it is within the limits. [`Self::close_stream`] reverts the
    /// count.
    fn open_stream(&self, peer: &Peer) -> bool {
        let peer_streams = peer.open_stream();
        let all_streams = self.0.streams.fetch_add(1, Ordering::AcqRel) + 1;
        let is_allowed = peer_streams <= GUARANTEED_STREAMS || all_streams <= self.0.limits.streams;
        if !is_allowed {
            self.close_stream(peer);
        }
        is_allowed
    }

    fn close_stream(&self, peer: &Peer) {
        peer.close_stream();
        self.0.streams.fetch_sub(1, Ordering::AcqRel);
    }
}

fn deliver(notices: Notices<Arc<Reservation>>) {
    for (ticket, notice) in notices {
        ticket.deliver(notice);
    }
}

impl<S> Layer<S> for Intake {
    type Service = IntakeService<S>;

    fn layer(&self, inner: S) -> IntakeService<S> {
        IntakeService::new(self.clone(), inner)
    }
}

/// Message reader of a request, for tonic or for the service itself through [`MessageStream`].
struct RequestReader {
    reader: Mutex<Option<MessageReader>>,
}

impl RequestReader {
    fn new(reader: MessageReader) -> Arc<Self> {
        Arc::new(Self { reader: Mutex::new(Some(reader)) })
    }

    fn reader(&self) -> MutexGuard<'_, Option<MessageReader>> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
