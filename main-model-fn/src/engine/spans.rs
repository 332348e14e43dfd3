//! The spans of a request in the engine: its wait, its prompt, its answer, and in each of the latter two what was asked of
//! each remote function. A span for every message would be one per layer and token.

use super::request::{ExpertTally, Figures};
use crate::experts::Calls;
use remoe_traces::{CONTEXT_BYTES, Kind, Reserved, Span, SpanRef};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

/// Remote functions that a phase has spans for; what further ones did is left out.
const MOST_REMOTE: usize = 256;

/// The spans of a request that is recorded.
pub(super) struct Spans {
    request: SpanRef,
    /// The present phase.
    phase: Span,
    /// What the phase has asked of remote functions, by their addresses, and the numbers that its spans of it will have.
    remote: BTreeMap<String, (Calls, Reserved)>,
    /// Where experts were computed before the phase.
    before: ExpertTally,
}

impl Spans {
    /// A request that was `submitted` begins; none where nothing of it is recorded.
    pub(super) fn begin(request: &SpanRef, submitted: Instant, now: Instant) -> Option<Box<Self>> {
        if !request.is_recording() {
            return None;
        }
        request.child_at("queue", Kind::Internal, submitted).end_at(now);
        Some(Box::new(Self {
            phase: request.child_at("prefill", Kind::Internal, now),
            request: request.clone(),
            remote: BTreeMap::new(),
            before: ExpertTally::default(),
        }))
    }

    /// In an iteration in which the remote function at `address` computed `pairs` for the request, and `all` for anybody,
    /// so much was asked of it.
    pub(super) fn asked(&mut self, address: &str, calls: &Calls, pairs: u64, all: u64) {
        if let Some((known, _)) = self.remote.get_mut(address) {
            known.join(calls, pairs, all);
        }
    }

    /// What names to the remote function at `address` the span of what it is asked in this phase; zeros, which name none,
    /// where there is none.
    pub(super) fn context(&mut self, address: &str) -> [u8; CONTEXT_BYTES] {
        if let Some((_, reserved)) = self.remote.get(address) {
            return reserved.context;
        }
        let room = self.remote.len() < MOST_REMOTE;
        let Some(reserved) = self.phase.reserve().filter(|_| room) else { return [0; CONTEXT_BYTES] };
        self.remote.insert(address.to_owned(), (Calls::default(), reserved));
        reserved.context
    }

    /// Something happened in the phase.
    pub(super) fn event(&self, name: &'static str) {
        self.phase.event(name);
    }

    /// The first token is there: the prompt is over.
    pub(super) fn first_token(&mut self, figures: &Figures, now: Instant) {
        self.close(figures);
        let answer = self.request.child_at("decode", Kind::Internal, now);
        std::mem::replace(&mut self.phase, answer).end_at(now);
        self.before = figures.experts;
    }

    /// The request is over.
    pub(super) fn finish(&mut self, figures: &Figures, now: Instant) {
        self.close(figures);
        std::mem::take(&mut self.phase).end_at(now);
    }

    /// The request failed by an error of the class `kind`.
    pub(super) fn fail(&mut self, figures: &Figures, kind: String) {
        self.close(figures);
        self.phase.fail(kind, "the engine could not go on with the request");
        std::mem::take(&mut self.phase).end();
    }

    /// Says what the phase did.
    fn close(&mut self, figures: &Figures) {
        let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let (experts, before) = (figures.experts, self.before);
        for (key, now, before) in [
            ("remoe.pairs.local", experts.local, before.local),
            ("remoe.pairs.remote", experts.remote, before.remote),
            ("remoe.pairs.fallback", experts.fallback, before.fallback),
            ("remoe.retries", experts.retries, before.retries),
        ] {
            // A pause in the middle of a prompt begins the count anew.
            self.phase.set(key, number(now.saturating_sub(before)));
        }
        for (address, (calls, reserved)) in std::mem::take(&mut self.remote) {
            let Some((first, last)) = calls.time else { continue };
            let name = "remoe.v1.ExpertFunction/Forward";
            let span = self.phase.reserved_child(&reserved, name, Kind::Client, first);
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
            if calls.answered == 0 {
                span.fail("unavailable", "no message was answered");
            }
            span.end_at(last);
        }
    }
}
