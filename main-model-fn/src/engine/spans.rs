//! The spans of a request in the engine: its wait, its prompt, its answer, and in each of the latter two what was
//! asked of each remote function. A span for every message would be one per layer and token.

use super::request::{ExpertTally, Figures};
use crate::dispatch::Calls;
use remoe_otel::{CONTEXT_BYTES, ReservedSpan, Span, SpanRef, SpanRole};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

/// Remote functions that a phase has spans for; what further ones did is left out.
const MOST_REMOTE: usize = 256;

/// The spans of a request that is recorded. All of them end with this value: below those of remote functions there are
/// others, in processes that know nothing of what becomes of the request.
pub(super) struct Spans {
    request: SpanRef,
    /// The present phase.
    phase: Span,
    /// Calls of the phase to remote functions, by their addresses.
    remote: BTreeMap<String, Remote>,
    /// Where experts were computed before the phase.
    before: ExpertTally,
}

/// Calls of a phase to one remote function.
struct Remote {
    calls: Calls,
    /// The number that the phase's span of it will have.
    reserved: ReservedSpan,
    /// When that was first told the function; without that there is no span.
    told: Option<Instant>,
}

impl Spans {
    /// A request that was `submitted` begins; none where nothing of it is recorded.
    pub(super) fn begin(request: &SpanRef, submitted: Instant, now: Instant) -> Option<Box<Self>> {
        if !request.is_recording() {
            return None;
        }
        request.child_at("queue", SpanRole::Internal, submitted).end_at(now);
        Some(Box::new(Self {
            phase: request.child_at("prefill", SpanRole::Internal, now),
            request: request.clone(),
            remote: BTreeMap::new(),
            before: ExpertTally::default(),
        }))
    }

    /// In an iteration in which the remote function at `address` computed `pairs` for the request, and `all` for any
    /// request, so much was asked of it.
    pub(super) fn asked(&mut self, address: &str, calls: &Calls, pairs: u64, all: u64) {
        if let Some(remote) = self.remote.get_mut(address) {
            remote.calls.join(calls, pairs, all);
        }
    }

    /// At `at` a message left for the remote function at `address` that names [its span](Self::context).
    pub(super) fn told(&mut self, address: &str, at: Instant) {
        if let Some(remote) = self.remote.get_mut(address) {
            remote.told.get_or_insert(at);
        }
    }

    /// Returns the context that names, to the remote function at `address`, the span of its calls in this phase;
    /// zeros, which name no span, if there is none.
    pub(super) fn context(&mut self, address: &str) -> [u8; CONTEXT_BYTES] {
        if let Some(remote) = self.remote.get(address) {
            return remote.reserved.context;
        }
        let room = self.remote.len() < MOST_REMOTE;
        let Some(reserved) = self.phase.reserve().filter(|_| room) else { return [0; CONTEXT_BYTES] };
        self.remote.insert(address.to_owned(), Remote { calls: Calls::default(), reserved, told: None });
        reserved.context
    }

    /// Something happened in the phase.
    pub(super) fn event(&self, name: &'static str) {
        self.phase.event(name);
    }

    /// The first token is there: the prompt is over.
    pub(super) fn first_token(&mut self, figures: &Figures, now: Instant) {
        self.close(figures, now);
        let answer = self.request.child_at("decode", SpanRole::Internal, now);
        std::mem::replace(&mut self.phase, answer).end_at(now);
        self.before = figures.experts;
    }

    /// The request is over.
    pub(super) fn finish(&mut self, figures: &Figures, now: Instant) {
        self.close(figures, now);
        std::mem::take(&mut self.phase).end_at(now);
    }

    /// The request failed by an error of the class `kind`.
    pub(super) fn fail(&mut self, figures: &Figures, kind: String) {
        let now = Instant::now();
        self.close(figures, now);
        self.phase.fail(kind, "the engine cannot continue the request");
        std::mem::take(&mut self.phase).end_at(now);
    }

    /// Says what the phase did, which is over at `now`.
    fn close(&mut self, figures: &Figures, now: Instant) {
        let (experts, before) = (figures.experts, self.before);
        for (key, sum, before) in [
            ("remoe.pairs.local", experts.local, before.local),
            ("remoe.pairs.remote", experts.remote, before.remote),
            ("remoe.pairs.fallback", experts.fallback, before.fallback),
            ("remoe.retries", experts.retries, before.retries),
        ] {
            // A pause in the middle of a prompt restarts the count.
            self.phase.set(key, number(sum.saturating_sub(before)));
        }
        self.close_remote(now);
    }

    /// Ends the spans of what the phase has asked of remote functions, by `now`.
    fn close_remote(&mut self, now: Instant) {
        for (address, Remote { calls, reserved, told }) in std::mem::take(&mut self.remote) {
            let Some(told) = told else { continue };
            // Nothing was over of what was given up because another one was faster.
            let (first, last) = calls.time.unwrap_or((told, now));
            let name = "remoe.v1.ExpertFunction/Forward";
            let span = self.phase.reserved_child(&reserved, name, SpanRole::Client, first.min(told));
            span.set("rpc.system", "grpc");
            span.set("rpc.service", "remoe.v1.ExpertFunction");
            span.set("rpc.method", "Forward");
            match address.parse::<SocketAddr>() {
                Ok(address) => {
                    span.set("server.address", address.ip().to_string());
                    span.set("server.port", i64::from(address.port()));
                }
                Err(_name) => span.set("server.address", address),
            }
            span.set("remoe.calls", number(calls.answered));
            span.set("remoe.calls.failed", number(calls.failed));
            span.set("remoe.pairs", number(calls.pairs));
            span.set("remoe.bytes.sent", number(calls.sent_bytes));
            span.set("remoe.bytes.received", number(calls.received_bytes));
            span.set("remoe.busy_seconds", calls.computed.as_secs_f64());
            match (calls.answered, calls.failed) {
                (0, 0) => span.fail("cancelled", "cancelled before an answer"),
                (0, _) => span.fail("unavailable", "no message answered"),
                _ => {}
            }
            span.end_at(last);
        }
    }
}

impl Drop for Spans {
    /// Ends the spans that are open: a request that neither finished nor failed was given up.
    fn drop(&mut self) {
        self.close_remote(Instant::now());
    }
}

fn number(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
