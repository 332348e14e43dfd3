//! Deadlines of one connection.

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

/// Time after its start, the first byte of a head or the end of an answer in which a connection is not displaced: a
/// request or the answer may be in transit.
const GRACE_PERIOD: Duration = Duration::from_millis(100);

/// Reason why the server ends a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionEndCause {
    /// No request arrived in time.
    Idle,
    /// The client did not read its answer.
    Stalled,
    /// The connection was idle when a new one needed its slot.
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

/// Deadlines of a connection, and the means to end it.
pub(super) struct ConnectionDeadlines {
    limits: ConnectionLimits,
    metrics: ConnectionMetrics,
    state: Mutex<DeadlineState>,
    /// Task that ends the connection when a deadline passes.
    watchdog: OnceLock<AbortHandle>,
    _slot: Option<OwnedSemaphorePermit>,
}

struct DeadlineState {
    /// Number of requests so far.
    request_count: u64,
    /// Requests whose answers are not complete, each with the time until which the client must read what was sent;
    /// `None` while the server works. HTTP/2 has several.
    open_requests: BTreeMap<u64, Option<Instant>>,
    /// Time when the connection, the wait for the next request, or the head of that request began.
    waiting_since: Instant,
    /// Time until which the complete head of the next request must arrive.
    head_deadline: Instant,
    /// Set if part of a head has arrived.
    is_head_begun: bool,
    /// Set for HTTP/2, where bytes between requests are frames of the connection, not heads.
    is_http2: bool,
    /// Set if the client has proved its identity, or does not need to.
    is_admitted: bool,
    /// Set once the connection was asked to end.
    is_displaced: bool,
    /// Second handle of the socket, which ends the connection that `axum::serve` owns.
    socket: Option<std::net::TcpStream>,
}

impl DeadlineState {
    fn new(
        limits: &ConnectionLimits,
        now: Instant,
        is_admitted: bool,
        socket: Option<std::net::TcpStream>,
    ) -> Self {
        Self {
            request_count: 0,
            open_requests: BTreeMap::new(),
            waiting_since: now,
            head_deadline: now + limits.head,
            is_head_begun: false,
            is_http2: false,
            is_admitted,
            is_displaced: false,
            socket,
        }
    }

    /// Returns the time at which the connection ends unless the client acts, and the reason.
    fn next_end(&self) -> Option<(ConnectionEndCause, Instant)> {
        if self.open_requests.is_empty() {
            return Some((ConnectionEndCause::Idle, self.head_deadline));
        }
        self.open_requests.values().flatten().min().map(|deadline| (ConnectionEndCause::Stalled, *deadline))
    }

    /// Takes the bytes that the client has sent.
    fn bytes_received(&mut self, limits: &ConnectionLimits, now: Instant, bytes: &[u8]) {
        // Some clients send an extra empty line after a body.
        let is_empty = bytes.iter().all(|byte| matches!(byte, b'\r' | b'\n'));
        if self.open_requests.is_empty() && !self.is_head_begun && !self.is_http2 && !is_empty {
            self.is_head_begun = true;
            self.waiting_since = now;
            self.head_deadline = self.head_deadline.min(now + limits.head);
        }
    }

    /// Begins a request. Returns its number.
    fn begin(&mut self, is_http2: bool) -> u64 {
        self.request_count += 1;
        self.is_http2 |= is_http2;
        self.is_head_begun = false;
        self.open_requests.insert(self.request_count, None);
        self.request_count
    }

    fn end(&mut self, number: u64, limits: &ConnectionLimits, now: Instant) {
        self.open_requests.remove(&number);
        self.waiting_since = now;
        self.head_deadline = now + limits.idle;
    }

    /// Returns the rank by which idle connections are displaced, least first: unidentified before admitted clients,
    /// then by idle time. Returns `None` if the connection cannot be displaced now.
    fn displacement_rank(&self, now: Instant) -> Option<(bool, Instant)> {
        let is_past_grace = self.waiting_since + GRACE_PERIOD <= now;
        (self.open_requests.is_empty() && !self.is_displaced && is_past_grace)
            .then_some((self.is_admitted, self.waiting_since))
    }

    /// Admits the client. Its first request may be in transit from now on.
    fn admit(&mut self, now: Instant) {
        self.is_admitted = true;
        self.waiting_since = now;
    }
}

impl ConnectionDeadlines {
    /// Begins the deadlines of a connection. Unless it `is_admitted`, the client must prove its identity first.
    pub(super) fn open(
        socket: &TcpStream,
        is_admitted: bool,
        limits: ConnectionLimits,
        metrics: ConnectionMetrics,
        slot: Option<OwnedSemaphorePermit>,
    ) -> Arc<Self> {
        let socket = socket.as_fd().try_clone_to_owned();
        if let Err(error) = &socket {
            tracing::warn!(%error, "cannot set the deadlines of a connection");
        }
        metrics.open.inc();
        let state = DeadlineState::new(&limits, Instant::now(), is_admitted, socket.ok().map(Into::into));
        let deadlines = Arc::new(Self {
            limits,
            metrics,
            state: Mutex::new(state),
            watchdog: OnceLock::new(),
            _slot: slot,
        });
        let shortest_limit = limits.head.min(limits.idle).min(limits.stall);
        let watchdog = tokio::spawn(end_when_late(Arc::downgrade(&deadlines), shortest_limit));
        deadlines.watchdog.get_or_init(|| watchdog.abort_handle());
        deadlines
    }

    fn state(&self) -> MutexGuard<'_, DeadlineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the bytes that the client has sent.
    pub(super) fn bytes_received(&self, bytes: &[u8]) {
        self.state().bytes_received(&self.limits, Instant::now(), bytes);
    }

    /// Returns [`DeadlineState::displacement_rank`].
    pub(super) fn displacement_rank(&self, now: Instant) -> Option<(bool, Instant)> {
        self.state().displacement_rank(now)
    }

    /// Admits the client, which has proved its identity.
    pub(super) fn admit(&self) {
        self.state().admit(Instant::now());
    }

    /// Ends the connection if it is still idle. Earlier answers still reach the client.
    pub(super) fn displace(&self, now: Instant) {
        let mut state = self.state();
        if state.displacement_rank(now).is_none() {
            return;
        }
        state.is_displaced = true;
        let Some(socket) = &state.socket else {
            return;
        };
        self.count(ConnectionEndCause::Displaced);
        // The server then reads the end of the connection. If this fails, the connection is broken already.
        let _broken = socket.shutdown(Shutdown::Read);
    }

    /// Ends the connection at once. Unsent bytes are dropped.
    fn end(&self, cause: ConnectionEndCause) {
        let Some(socket) = self.state().socket.take() else {
            return;
        };
        self.count(cause);
        // Pending reads and writes fail, and a reset drops unsent bytes. If this fails, the connection is broken
        // already.
        let _broken = socket.shutdown(Shutdown::Both);
        let _broken = TcpStream::from_std(socket).and_then(|socket| socket.set_zero_linger());
    }

    fn count(&self, cause: ConnectionEndCause) {
        self.metrics.ended.with_label_values(&[cause.as_str()]).inc();
        tracing::debug!(reason = cause.as_str(), "connection ended");
    }
}

impl Drop for ConnectionDeadlines {
    fn drop(&mut self) {
        if let Some(watchdog) = self.watchdog.get() {
            watchdog.abort();
        }
        self.metrics.open.dec();
    }
}

/// Ends the connection when a deadline passes. Wakes at least every `shortest_limit`, because an earlier deadline may
/// be set meanwhile.
async fn end_when_late(connection: Weak<ConnectionDeadlines>, shortest_limit: Duration) {
    loop {
        let now = Instant::now();
        let next = match connection.upgrade() {
            Some(deadlines) => {
                let next_end = deadlines.state().next_end();
                match next_end {
                    Some((cause, deadline)) if deadline <= now => return deadlines.end(cause),
                    Some((_, deadline)) => deadline.min(now + shortest_limit),
                    None => now + shortest_limit,
                }
            }
            None => return,
        };
        sleep_until(next).await;
    }
}

/// Request of a connection, until its answer is complete or dropped.
pub(super) struct RequestGuard {
    deadlines: Arc<ConnectionDeadlines>,
    number: u64,
}

impl RequestGuard {
    /// Begins a request.
    pub(super) fn begin(deadlines: &Arc<ConnectionDeadlines>, is_http2: bool) -> Self {
        let number = deadlines.state().begin(is_http2);
        Self { deadlines: deadlines.clone(), number }
    }

    /// Stops the client's deadline: the server has nothing to send now.
    pub(super) fn wait_for_server(&self) {
        self.deadlines.state().open_requests.insert(self.number, None);
    }

    /// Starts the client's deadline: it must read what was sent.
    pub(super) fn wait_for_client(&self) {
        self.deadlines
            .state()
            .open_requests
            .insert(self.number, Some(Instant::now() + self.deadlines.limits.stall));
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.deadlines.state().end(self.number, &self.deadlines.limits, Instant::now());
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

    fn new_state() -> (DeadlineState, impl Fn(f64) -> Instant) {
        let start = Instant::now();
        (DeadlineState::new(&LIMITS, start, true, None), move |seconds| {
            start + Duration::from_secs_f64(seconds)
        })
    }

    #[test]
    fn every_open_request_counts() {
        let (mut state, at) = new_state();
        assert_eq!(state.next_end(), Some((ConnectionEndCause::Idle, at(2.0))));
        state.open_requests.insert(1, None);
        assert_eq!(state.next_end(), None, "the server works");
        state.open_requests.insert(2, Some(at(5.0)));
        assert_eq!(state.next_end(), Some((ConnectionEndCause::Stalled, at(5.0))), "one of two is not read");
        state.open_requests.insert(3, Some(at(3.0)));
        assert_eq!(state.next_end(), Some((ConnectionEndCause::Stalled, at(3.0))));
        state.end(2, &LIMITS, at(3.0));
        state.end(3, &LIMITS, at(3.0));
        assert_eq!(state.next_end(), None, "the server still works for the first");
        state.end(1, &LIMITS, at(4.0));
        assert_eq!(state.next_end(), Some((ConnectionEndCause::Idle, at(13.0))));
    }

    #[test]
    fn begun_head_must_be_complete_in_time() {
        let (mut state, at) = new_state();
        state.bytes_received(&LIMITS, at(1.0), b"GET /");
        assert_eq!(
            state.next_end(),
            Some((ConnectionEndCause::Idle, at(2.0))),
            "from the start of the connection"
        );
        let number = state.begin(false);
        state.bytes_received(&LIMITS, at(1.5), b"a body");
        state.end(number, &LIMITS, at(3.0));
        assert_eq!(
            state.next_end(),
            Some((ConnectionEndCause::Idle, at(12.0))),
            "the idle limit applies between requests"
        );
        state.bytes_received(&LIMITS, at(4.0), b"\r\n");
        assert_eq!(state.next_end(), Some((ConnectionEndCause::Idle, at(12.0))), "an empty line is no head");
        state.bytes_received(&LIMITS, at(5.0), b"G");
        assert_eq!(state.next_end(), Some((ConnectionEndCause::Idle, at(7.0))));
        state.bytes_received(&LIMITS, at(6.0), b"E");
        assert_eq!(
            state.next_end(),
            Some((ConnectionEndCause::Idle, at(7.0))),
            "more of the same head does not extend the deadline"
        );
    }

    #[test]
    fn frames_of_http2_are_no_heads() {
        let (mut state, at) = new_state();
        let number = state.begin(true);
        state.end(number, &LIMITS, at(1.0));
        state.bytes_received(&LIMITS, at(2.0), b"ping");
        assert_eq!(state.next_end(), Some((ConnectionEndCause::Idle, at(10.0))));
    }

    #[test]
    fn unidentified_connection_is_displaced_before_others() {
        let (known, at) = new_state();
        let (mut stranger, _) = new_state();
        (stranger.is_admitted, stranger.waiting_since) = (false, at(5.0));
        assert!(
            stranger.displacement_rank(at(6.0)) < known.displacement_rank(at(6.0)),
            "although it is newer"
        );
        stranger.admit(at(6.0));
        assert_eq!(stranger.displacement_rank(at(6.05)), None, "its request may be on the way");
        assert!(stranger.displacement_rank(at(7.0)) > known.displacement_rank(at(7.0)));
    }

    #[test]
    fn only_idle_connections_are_displaced() {
        let (mut state, at) = new_state();
        assert_eq!(state.displacement_rank(at(0.05)), None, "its request may be on the way");
        assert_eq!(state.displacement_rank(at(0.2)), Some((true, at(0.0))));
        state.bytes_received(&LIMITS, at(1.0), b"GET /");
        assert_eq!(state.displacement_rank(at(1.05)), None, "the rest may be on its way");
        assert_eq!(state.displacement_rank(at(1.3)), Some((true, at(1.0))));
        let number = state.begin(false);
        assert_eq!(state.displacement_rank(at(9.0)), None, "there is a request");
        state.end(number, &LIMITS, at(9.0));
        assert_eq!(state.displacement_rank(at(9.05)), None, "the answer may be on its way");
        assert_eq!(state.displacement_rank(at(9.3)), Some((true, at(9.0))));
        state.is_displaced = true;
        assert_eq!(state.displacement_rank(at(9.3)), None, "once is enough");
    }
}
