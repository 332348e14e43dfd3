//! Connections: how many there are, and how long each may keep the server waiting.
//!
//! `axum::serve` owns the sockets and knows no deadlines. Each connection has a second handle of its
//! socket here, and a task that ends it when it is the client's turn for too long: to bring a request
//! (its whole head), or to take what it was sent. Ending a connection drops the answer that it was
//! given, and so the engine's work on it.

use super::metrics::HttpMetrics;
use super::state::{ConnectionLimits, HttpState};
use axum::Router;
use axum::body::{Body, BodyDataStream, HttpBody};
use axum::extract::Request;
use axum::response::Response;
use axum::serve::{IncomingStream, Listener};
use bytes::Bytes;
use futures_util::Stream;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::PollSemaphore;
use tower_service::Service;

/// Most of an answer that is handed over at once, so that taking a long one shows as progress.
const PIECE: usize = 64 << 10;

/// Gives every accepted connection its service. Beyond the limit, connections are accepted when
/// others have ended.
pub(crate) struct Connections {
    routes: Router,
    limits: ConnectionLimits,
    metrics: HttpMetrics,
    slots: PollSemaphore,
    /// For the next connection.
    slot: Option<OwnedSemaphorePermit>,
}

impl Connections {
    pub(super) fn new(routes: Router, state: &HttpState) -> Self {
        let limits = state.options.connections;
        Self {
            routes,
            limits,
            metrics: state.metrics.clone(),
            slots: PollSemaphore::new(Arc::new(Semaphore::new(limits.count))),
            slot: None,
        }
    }
}

impl<L: Listener<Io = TcpStream>> Service<IncomingStream<'_, L>> for Connections {
    type Response = Connection;
    type Error = Infallible;
    type Future = Ready<Result<Connection, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.slot.is_none() {
            self.slot = std::task::ready!(self.slots.poll_acquire(context));
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, incoming: IncomingStream<'_, L>) -> Self::Future {
        let line = Line::open(incoming.io(), self.limits, self.metrics.clone(), self.slot.take());
        ready(Ok(Connection { routes: self.routes.clone(), line }))
    }
}

/// The service of one connection.
#[derive(Clone)]
pub(crate) struct Connection {
    routes: Router,
    line: Arc<Line>,
}

impl Service<Request> for Connection {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request>::poll_ready(&mut self.routes, context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let turn = Turn::begin(&self.line);
        let answer = self.routes.call(request);
        Box::pin(async move {
            let response = answer.await?;
            if response.body().is_end_stream() {
                return Ok(response);
            }
            // The router has written the length of a body that has one into the head.
            Ok(response.map(|body| {
                Body::from_stream(Handover { body: body.into_data_stream(), rest: Bytes::new(), turn })
            }))
        })
    }
}

/// Why a connection is ended from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    /// No request came.
    Idle,
    /// What was sent was not taken.
    Stalled,
}

impl Wait {
    fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Stalled => "stalled",
        }
    }
}

/// One connection as its deadlines see it.
struct Line {
    limits: ConnectionLimits,
    metrics: HttpMetrics,
    state: Mutex<LineState>,
    /// Ends the connection when it is late.
    guard: OnceLock<AbortHandle>,
    _slot: Option<OwnedSemaphorePermit>,
}

struct LineState {
    /// Requests so far.
    turns: u64,
    /// Requests whose answers are not handed over, and until when the client must take what it was
    /// given; nothing while the server works. HTTP/2 has several.
    open: BTreeMap<u64, Option<Instant>>,
    /// Until when a request must come while there is none.
    idle: Instant,
    /// The same socket again: ends what `axum::serve` holds.
    socket: Option<std::net::TcpStream>,
}

impl LineState {
    /// What the client must do next, and until when.
    fn waits(&self) -> Option<(Wait, Instant)> {
        if self.open.is_empty() {
            return Some((Wait::Idle, self.idle));
        }
        self.open.values().flatten().min().map(|deadline| (Wait::Stalled, *deadline))
    }
}

impl Line {
    fn open(
        socket: &TcpStream,
        limits: ConnectionLimits,
        metrics: HttpMetrics,
        slot: Option<OwnedSemaphorePermit>,
    ) -> Arc<Self> {
        let socket = socket.as_fd().try_clone_to_owned();
        if let Err(error) = &socket {
            tracing::warn!(%error, "a connection has no deadlines");
        }
        metrics.connections.inc();
        let state = LineState {
            turns: 0,
            open: BTreeMap::new(),
            idle: Instant::now() + limits.idle,
            socket: socket.ok().map(Into::into),
        };
        let line =
            Arc::new(Self { limits, metrics, state: Mutex::new(state), guard: OnceLock::new(), _slot: slot });
        let shortest = limits.idle.min(limits.stall);
        let guard = tokio::spawn(end_when_late(Arc::downgrade(&line), shortest));
        line.guard.get_or_init(|| guard.abort_handle());
        line
    }

    fn state(&self) -> MutexGuard<'_, LineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connection without waiting for what is still to be sent.
    fn end(&self, wait: Wait) {
        let Some(socket) = self.state().socket.take() else {
            return;
        };
        self.metrics.connections_ended.with_label_values(&[wait.as_str()]).inc();
        tracing::debug!(reason = wait.as_str(), "ended a connection that kept the server waiting");
        // Both ways of reading and writing wake up and fail; nothing is kept for a client that may
        // never take it. A socket that refuses is broken already.
        let _broken = socket.shutdown(Shutdown::Both);
        let _broken = TcpStream::from_std(socket).and_then(|socket| socket.set_zero_linger());
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.get() {
            guard.abort();
        }
        self.metrics.connections.dec();
    }
}

/// Looks again when the deadline has come, or when another that is set meanwhile could have.
async fn end_when_late(line: Weak<Line>, shortest: Duration) {
    loop {
        let now = Instant::now();
        let next = match line.upgrade() {
            Some(line) => {
                let waits = line.state().waits();
                match waits {
                    Some((wait, deadline)) if deadline <= now => return line.end(wait),
                    Some((_, deadline)) => deadline.min(now + shortest),
                    None => now + shortest,
                }
            }
            None => return,
        };
        sleep_until(next).await;
    }
}

/// One request of a connection, until its answer has been handed over or given up.
struct Turn {
    line: Arc<Line>,
    number: u64,
}

impl Turn {
    fn begin(line: &Arc<Line>) -> Self {
        let mut state = line.state();
        state.turns += 1;
        let number = state.turns;
        state.open.insert(number, None);
        Self { line: line.clone(), number }
    }

    /// The server has nothing to give at the moment.
    fn works(&self) {
        self.line.state().open.insert(self.number, None);
    }

    /// The client must take what it was given before it gets more.
    fn hands_over(&self) {
        self.line.state().open.insert(self.number, Some(Instant::now() + self.line.limits.stall));
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.line.state();
        state.open.remove(&self.number);
        state.idle = Instant::now() + self.line.limits.idle;
    }
}

/// The body of an answer. It is asked for more once what it gave before is on its way.
struct Handover {
    body: BodyDataStream,
    rest: Bytes,
    turn: Turn,
}

impl Stream for Handover {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.rest.is_empty() {
            match Pin::new(&mut self.body).poll_next(context) {
                Poll::Pending => {
                    self.turn.works();
                    return Poll::Pending;
                }
                Poll::Ready(Some(Ok(bytes))) => self.rest = bytes,
                Poll::Ready(end) => return Poll::Ready(end),
            }
        }
        let piece = self.rest.len().min(PIECE);
        let piece = self.rest.split_to(piece);
        self.turn.hands_over();
        Poll::Ready(Some(Ok(piece)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_open_request_counts() {
        let start = Instant::now();
        let later = |seconds| start + Duration::from_secs(seconds);
        let mut state = LineState { turns: 0, open: BTreeMap::new(), idle: later(9), socket: None };
        assert_eq!(state.waits(), Some((Wait::Idle, later(9))));
        state.open.insert(1, None);
        assert_eq!(state.waits(), None, "the server works");
        state.open.insert(2, Some(later(5)));
        assert_eq!(state.waits(), Some((Wait::Stalled, later(5))), "one of two is not taken");
        state.open.insert(3, Some(later(3)));
        assert_eq!(state.waits(), Some((Wait::Stalled, later(3))));
        state.open.remove(&2);
        state.open.remove(&3);
        assert_eq!(state.waits(), None, "the first is still worked at");
        state.open.remove(&1);
        assert_eq!(state.waits(), Some((Wait::Idle, later(9))));
    }
}
