//! Tracing spans of a request in the engine: its queue time, prefill and decode.
//!
//! Below prefill and decode there is one span per remote function, with the totals of its calls. A span for every
//! message would be one per layer and token.

use super::request::{ExpertTally, Figures};
use crate::dispatch::CallTotals;
use remoe_otel::{CONTEXT_BYTES, ReservedSpan, Span, SpanRef, SpanRole};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

/// Most remote functions with a span per phase; others are left out.
const MAX_REMOTE_SPANS: usize = 256;

/// Spans of a request that is traced. All of them end when this value is dropped, because remote functions have reported
/// spans below them.
pub(super) struct RequestSpans {
    request: SpanRef,
    /// Span of the current phase.
    phase: Span,
    /// Calls of the phase to remote functions, by address.
    remote: BTreeMap<String, RemoteCalls>,
    /// Numbers of pairs before the phase.
    tally_before: ExpertTally,
}

/// Calls of a phase to one remote function.
struct RemoteCalls {
    totals: CallTotals,
    /// Id of the span, reserved before the span is reported.
    reserved: ReservedSpan,
    /// Time at which a message first named the span; without it, the span is not reported.
    named_at: Option<Instant>,
}

impl RequestSpans {
    /// Begins the spans of a request that was `submitted` earlier; `None` if the request is not traced.
    pub(super) fn begin(request: &SpanRef, submitted: Instant, now: Instant) -> Option<Box<Self>> {
        if !request.is_recording() {
            return None;
        }
        request.child_at("queue", SpanRole::Internal, submitted).end_at(now);
        Some(Box::new(Self {
            phase: request.child_at("prefill", SpanRole::Internal, now),
            request: request.clone(),
            remote: BTreeMap::new(),
            tally_before: ExpertTally::default(),
        }))
    }

    /// Adds the request's share of an iteration's `calls` to the remote function at `address`.
    ///
    /// The function computed `pairs` pairs for the request, and `all` pairs in the iteration.
    pub(super) fn add_calls(&mut self, address: &str, calls: &CallTotals, pairs: u64, all: u64) {
        if let Some(remote) = self.remote.get_mut(address) {
            remote.totals.add_share(calls, pairs, all);
        }
    }

    /// Records that a message to the remote function at `address` named [its span](Self::context) at time `named_at`.
    pub(super) fn record_named(&mut self, address: &str, named_at: Instant) {
        if let Some(remote) = self.remote.get_mut(address) {
            remote.named_at.get_or_insert(named_at);
        }
    }

    /// Returns the context that names the phase's span of the remote function at `address`; zeros if it has none.
    pub(super) fn context(&mut self, address: &str) -> [u8; CONTEXT_BYTES] {
        if let Some(remote) = self.remote.get(address) {
            return remote.reserved.context;
        }
        let has_space = self.remote.len() < MAX_REMOTE_SPANS;
        let Some(reserved) = self.phase.reserve().filter(|_| has_space) else { return [0; CONTEXT_BYTES] };
        let calls = RemoteCalls { totals: CallTotals::default(), reserved, named_at: None };
        self.remote.insert(address.to_owned(), calls);
        reserved.context
    }

    /// Adds an event to the current phase.
    pub(super) fn event(&self, name: &'static str) {
        self.phase.event(name);
    }

    /// Ends prefill and begins decode.
    pub(super) fn record_first_token(&mut self, figures: &Figures, now: Instant) {
        self.finish_phase(figures, now);
        let decode = self.request.child_at("decode", SpanRole::Internal, now);
        std::mem::replace(&mut self.phase, decode).end_at(now);
        self.tally_before = figures.experts;
    }

    /// Ends the spans of a finished request.
    pub(super) fn finish(&mut self, figures: &Figures, now: Instant) {
        self.finish_phase(figures, now);
        std::mem::take(&mut self.phase).end_at(now);
    }

    /// Ends the spans of a request that failed with an error of class `kind`.
    pub(super) fn fail(&mut self, figures: &Figures, kind: String) {
        let now = Instant::now();
        self.finish_phase(figures, now);
        self.phase.fail(kind, "the engine cannot continue the request");
        std::mem::take(&mut self.phase).end_at(now);
    }

    /// Sets the attributes of the current phase, which ends at `now`.
    fn finish_phase(&mut self, figures: &Figures, now: Instant) {
        let (experts, before) = (figures.experts, self.tally_before);
        for (key, sum, before) in [
            ("remoe.pairs.local", experts.local, before.local),
            ("remoe.pairs.remote", experts.remote, before.remote),
            ("remoe.pairs.fallback", experts.fallback, before.fallback),
            ("remoe.retries", experts.retries, before.retries),
        ] {
            // A preemption during prefill restarts the count.
            self.phase.set(key, number(sum.saturating_sub(before)));
        }
        self.finish_remote(now);
    }

    /// Reports the spans of the phase's remote functions, which end by `now`.
    fn finish_remote(&mut self, now: Instant) {
        for (address, RemoteCalls { totals, reserved, named_at }) in std::mem::take(&mut self.remote) {
            let Some(named_at) = named_at else { continue };
            // Calls that were cancelled, because another replica was faster, have no times.
            let (first, last) = totals.time.unwrap_or((named_at, now));
            let name = "remoe.v1.ExpertFunction/Forward";
            let span = self.phase.reserved_child(&reserved, name, SpanRole::Client, first.min(named_at));
            span.set("rpc.system", "grpc");
            span.set("rpc.service", "remoe.v1.ExpertFunction");
            span.set("rpc.method", "Forward");
            match address.parse::<SocketAddr>() {
                Ok(address) => {
                    span.set("server.address", address.ip().to_string());
                    span.set("server.port", i64::from(address.port()));
                }
                Err(_host_name) => span.set("server.address", address),
            }
            span.set("remoe.calls", number(totals.answered));
            span.set("remoe.calls.failed", number(totals.failed));
            span.set("remoe.pairs", number(totals.pairs));
            span.set("remoe.bytes.sent", number(totals.sent_bytes));
            span.set("remoe.bytes.received", number(totals.received_bytes));
            span.set("remoe.busy_seconds", totals.computed.as_secs_f64());
            match (totals.answered, totals.failed) {
                (0, 0) => span.fail("cancelled", "cancelled before an answer"),
                (0, _) => span.fail("unavailable", "no message answered"),
                _ => {}
            }
            span.end_at(last);
        }
    }
}

impl Drop for RequestSpans {
    /// Reports the open spans of a request that was abandoned.
    fn drop(&mut self) {
        self.finish_remote(Instant::now());
    }
}

fn number(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
