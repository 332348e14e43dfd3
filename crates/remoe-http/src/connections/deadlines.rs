//! One connection as its deadlines see it.

use super::limits::ConnectionLimits;
use super::metrics::ConnectionMetrics;
use std::collections::BTreeMap;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

/// So long after it was accepted, a head has begun or an answer was handed over, a connection does not
/// give way: its request may be on the way, or the answer.
const RECENT: Duration = Duration::from_millis(100);

/// Why a connection is ended from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionEndCause {
    /// No request came.
    Idle,
    /// The client did not take what was sent.
    Stalled,
    /// It had no request when another connection needed its place.
    Displaced,
}

impl ConnectionEndCause {
    fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Stalled => "stalled",
            Self::Displaced => "displaced",
        }
    }
}

/// A connection: what it waits for, and until when.
pub(super) struct ConnectionDeadlines {
    limits: ConnectionLimits,
    metrics: ConnectionMetrics,
    state: Mutex<DeadlineState>,
    /// Ends the connection when it is late.
    guard: OnceLock<AbortHandle>,
    _slot: Option<OwnedSemaphorePermit>,
}

struct DeadlineState {
    /// Requests so far.
    turns: u64,
    /// Requests whose answers are not handed over, and until when the client must take what it was
    /// given; nothing while the server works. HTTP/2 has several.
    open: BTreeMap<u64, Option<Instant>>,
    /// When the connection, the wait for the next request, or that request's head began.
    since: Instant,
    /// Until when the whole head of a request must be there while there is none.
    due: Instant,
    /// Set if part of a head is there.
    begun: bool,
    /// Set if bytes between requests are frames of the connection (HTTP/2), and no heads.
    http2: bool,
    /// Set if the identity of the other end is known, or does not matter.
    let_in: bool,
    /// Set if it was asked to give way.
    leaving: bool,
    /// Second handle of the socket: ends what `axum::serve` holds.
    socket: Option<std::net::TcpStream>,
}

impl DeadlineState {
    fn new(
        limits: &ConnectionLimits,
        now: Instant,
        let_in: bool,
        socket: Option<std::net::TcpStream>,
    ) -> Self {
        Self {
            turns: 0,
            open: BTreeMap::new(),
            since: now,
            due: now + limits.head,
            begun: false,
            http2: false,
            let_in,
            leaving: false,
            socket,
        }
    }

    /// Returns what the client must do next, and until when.
    fn waits(&self) -> Option<(ConnectionEndCause, Instant)> {
        if self.open.is_empty() {
            return Some((ConnectionEndCause::Idle, self.due));
        }
        self.open.values().flatten().min().map(|deadline| (ConnectionEndCause::Stalled, *deadline))
    }

    /// Bytes have come from the client.
    fn came(&mut self, limits: &ConnectionLimits, now: Instant, bytes: &[u8]) {
        // Some clients end a body with an empty line more than it has.
        let empty = bytes.iter().all(|byte| matches!(byte, b'\r' | b'\n'));
        if self.open.is_empty() && !self.begun && !self.http2 && !empty {
            self.begun = true;
            self.since = now;
            self.due = self.due.min(now + limits.head);
        }
    }

    fn begin(&mut self, http2: bool) -> u64 {
        self.turns += 1;
        self.http2 |= http2;
        self.begun = false;
        self.open.insert(self.turns, None);
        self.turns
    }

    fn end(&mut self, turn: u64, limits: &ConnectionLimits, now: Instant) {
        self.open.remove(&turn);
        self.since = now;
        self.due = now + limits.idle;
    }

    /// Returns if it is let in, and since when it has been without a request, if it can give way now.
    fn can_leave(&self, now: Instant) -> Option<(bool, Instant)> {
        let settled = self.since + RECENT <= now;
        (self.open.is_empty() && !self.leaving && settled).then_some((self.let_in, self.since))
    }

    /// Lets the client in: its first request may be on the way from now on.
    fn enter(&mut self, now: Instant) {
        self.let_in = true;
        self.since = now;
    }
}

impl ConnectionDeadlines {
    /// Opens a line that is `let_in`, or whose other end must prove its identity first.
    pub(super) fn open(
        socket: &TcpStream,
        let_in: bool,
        limits: ConnectionLimits,
        metrics: ConnectionMetrics,
        slot: Option<OwnedSemaphorePermit>,
    ) -> Arc<Self> {
        let socket = socket.as_fd().try_clone_to_owned();
        if let Err(error) = &socket {
            tracing::warn!(%error, "cannot set the deadlines of a connection");
        }
        metrics.open.inc();
        let state = DeadlineState::new(&limits, Instant::now(), let_in, socket.ok().map(Into::into));
        let line =
            Arc::new(Self { limits, metrics, state: Mutex::new(state), guard: OnceLock::new(), _slot: slot });
        let shortest = limits.head.min(limits.idle).min(limits.stall);
        let guard = tokio::spawn(end_when_late(Arc::downgrade(&line), shortest));
        line.guard.get_or_init(|| guard.abort_handle());
        line
    }

    fn state(&self) -> MutexGuard<'_, DeadlineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes have come from the client.
    pub(super) fn came(&self, bytes: &[u8]) {
        self.state().came(&self.limits, Instant::now(), bytes);
    }

    /// As [`DeadlineState::can_leave`]: the least value gives way first.
    pub(super) fn can_leave(&self, now: Instant) -> Option<(bool, Instant)> {
        self.state().can_leave(now)
    }

    /// Lets in the other end, which has proved its identity.
    pub(super) fn enter(&self) {
        self.state().enter(Instant::now());
    }

    /// Takes no further request, if it still has none: what was answered before reaches the client.
    pub(super) fn give_way(&self, now: Instant) {
        let mut state = self.state();
        if state.can_leave(now).is_none() {
            return;
        }
        state.leaving = true;
        let Some(socket) = &state.socket else {
            return;
        };
        self.count(ConnectionEndCause::Displaced);
        // The server reads the end of the connection. A socket that refuses is broken already.
        let _broken = socket.shutdown(Shutdown::Read);
    }

    /// Ends the connection without waiting for what is still to be sent.
    fn end(&self, wait: ConnectionEndCause) {
        let Some(socket) = self.state().socket.take() else {
            return;
        };
        self.count(wait);
        // Both ways of reading and writing wake up and fail; nothing is kept for a client that may
        // never take it. A socket that refuses is broken already.
        let _broken = socket.shutdown(Shutdown::Both);
        let _broken = TcpStream::from_std(socket).and_then(|socket| socket.set_zero_linger());
    }

    fn count(&self, wait: ConnectionEndCause) {
        self.metrics.ended.with_label_values(&[wait.as_str()]).inc();
        tracing::debug!(reason = wait.as_str(), "connection ended");
    }
}

impl Drop for ConnectionDeadlines {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.get() {
            guard.abort();
        }
        self.metrics.open.dec();
    }
}

/// Looks again when the deadline has come, or when another that is set meanwhile could have.
async fn end_when_late(line: Weak<ConnectionDeadlines>, shortest: Duration) {
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
pub(super) struct RequestGuard {
    line: Arc<ConnectionDeadlines>,
    number: u64,
}

impl RequestGuard {
    pub(super) fn begin(line: &Arc<ConnectionDeadlines>, http2: bool) -> Self {
        let number = line.state().begin(http2);
        Self { line: line.clone(), number }
    }

    /// The server has nothing to give at the moment.
    pub(super) fn works(&self) {
        self.line.state().open.insert(self.number, None);
    }

    /// The client must take what it was given before it gets more.
    pub(super) fn hands_over(&self) {
        self.line.state().open.insert(self.number, Some(Instant::now() + self.line.limits.stall));
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.line.state().end(self.number, &self.line.limits, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ConnectionLimits = ConnectionLimits {
        count: 1,
        head: Duration::from_secs(2),
        idle: Duration::from_secs(9),
        stall: Duration::from_secs(5),
    };

    fn line() -> (DeadlineState, impl Fn(f64) -> Instant) {
        let start = Instant::now();
        (DeadlineState::new(&LIMITS, start, true, None), move |seconds| {
            start + Duration::from_secs_f64(seconds)
        })
    }

    #[test]
    fn every_open_request_counts() {
        let (mut state, at) = line();
        assert_eq!(state.waits(), Some((ConnectionEndCause::Idle, at(2.0))));
        state.open.insert(1, None);
        assert_eq!(state.waits(), None, "the server works");
        state.open.insert(2, Some(at(5.0)));
        assert_eq!(state.waits(), Some((ConnectionEndCause::Stalled, at(5.0))), "one of two is not taken");
        state.open.insert(3, Some(at(3.0)));
        assert_eq!(state.waits(), Some((ConnectionEndCause::Stalled, at(3.0))));
        state.end(2, &LIMITS, at(3.0));
        state.end(3, &LIMITS, at(3.0));
        assert_eq!(state.waits(), None, "the first is still worked at");
        state.end(1, &LIMITS, at(4.0));
        assert_eq!(state.waits(), Some((ConnectionEndCause::Idle, at(13.0))));
    }

    #[test]
    fn a_head_that_has_begun_must_be_whole_soon() {
        let (mut state, at) = line();
        state.came(&LIMITS, at(1.0), b"GET /");
        assert_eq!(
            state.waits(),
            Some((ConnectionEndCause::Idle, at(2.0))),
            "from the begin of the connection"
        );
        let turn = state.begin(false);
        state.came(&LIMITS, at(1.5), b"a body");
        state.end(turn, &LIMITS, at(3.0));
        assert_eq!(
            state.waits(),
            Some((ConnectionEndCause::Idle, at(12.0))),
            "between requests there is time"
        );
        state.came(&LIMITS, at(4.0), b"\r\n");
        assert_eq!(state.waits(), Some((ConnectionEndCause::Idle, at(12.0))), "an empty line is no head");
        state.came(&LIMITS, at(5.0), b"G");
        assert_eq!(state.waits(), Some((ConnectionEndCause::Idle, at(7.0))));
        state.came(&LIMITS, at(6.0), b"E");
        assert_eq!(
            state.waits(),
            Some((ConnectionEndCause::Idle, at(7.0))),
            "more of the head is no new one"
        );
    }

    #[test]
    fn frames_of_http2_are_no_heads() {
        let (mut state, at) = line();
        let turn = state.begin(true);
        state.end(turn, &LIMITS, at(1.0));
        state.came(&LIMITS, at(2.0), b"ping");
        assert_eq!(state.waits(), Some((ConnectionEndCause::Idle, at(10.0))));
    }

    #[test]
    fn who_has_not_said_who_it_is_gives_way_before_others() {
        let (known, at) = line();
        let (mut stranger, _) = line();
        (stranger.let_in, stranger.since) = (false, at(5.0));
        assert!(stranger.can_leave(at(6.0)) < known.can_leave(at(6.0)), "although it came later");
        stranger.enter(at(6.0));
        assert_eq!(stranger.can_leave(at(6.05)), None, "its request may be on the way");
        assert!(stranger.can_leave(at(7.0)) > known.can_leave(at(7.0)));
    }

    #[test]
    fn only_connections_without_a_request_give_way() {
        let (mut state, at) = line();
        assert_eq!(state.can_leave(at(0.05)), None, "its request may be on the way");
        assert_eq!(state.can_leave(at(0.2)), Some((true, at(0.0))));
        state.came(&LIMITS, at(1.0), b"GET /");
        assert_eq!(state.can_leave(at(1.05)), None, "the rest may be on its way");
        assert_eq!(state.can_leave(at(1.3)), Some((true, at(1.0))));
        let turn = state.begin(false);
        assert_eq!(state.can_leave(at(9.0)), None, "there is a request");
        state.end(turn, &LIMITS, at(9.0));
        assert_eq!(state.can_leave(at(9.05)), None, "the answer may be on its way");
        assert_eq!(state.can_leave(at(9.3)), Some((true, at(9.0))));
        state.leaving = true;
        assert_eq!(state.can_leave(at(9.3)), None, "once is enough");
    }
}
