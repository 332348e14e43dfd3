//! Totals of the calls to each remote function, for the tracing spans of requests. Kept only while a request is traced.

use bytes::Bytes;
use remoe_otel::CONTEXT_BYTES;
use std::ops::Range;
use std::time::{Duration, Instant};

/// A traced request of an iteration.
#[derive(Debug, Clone)]
pub(crate) struct TracedRequest {
    /// Index among the running requests.
    pub(crate) request: usize,
    /// Range of the request's rows in the iteration.
    pub(crate) rows: Range<usize>,
    /// Context of the request's span for each link, in the order of the placement's links.
    pub(crate) contexts: Vec<[u8; CONTEXT_BYTES]>,
    /// Time at which a message first named the span to each link; `None` if no message did.
    pub(crate) named_at: Vec<Option<Instant>>,
}

/// Most traced requests that one message names.
const MAX_NAMED: usize = 64;

/// Returns the indices of the `traced` requests that a message with `slots` names: those with rows among the slots.
/// Each row has `top_k` slots, and `slots` ascend.
pub(super) fn requests_in_message(traced: &[TracedRequest], slots: &[u32], top_k: usize) -> Vec<usize> {
    let has_rows = |request: &TracedRequest| {
        let first = slots.partition_point(|slot| (*slot as usize) < request.rows.start * top_k);
        slots.get(first).is_some_and(|slot| (*slot as usize) < request.rows.end * top_k)
    };
    let named = traced.iter().enumerate().filter(|(_, request)| has_rows(request));
    named.map(|(index, _)| index).take(MAX_NAMED).collect()
}

/// Returns the contexts for `link` of the `traced` requests with the indices `named`, concatenated.
pub(super) fn span_contexts(traced: &[TracedRequest], named: &[usize], link: usize) -> Bytes {
    let contexts = named.iter().filter_map(|&request| traced.get(request)?.contexts.get(link).copied());
    contexts.collect::<Vec<_>>().into_flattened().into()
}

/// Records that a message to `link` named the `traced` requests with the indices `named`. From then on, the remote
/// function may report spans below theirs.
pub(super) fn record_named(traced: &mut [TracedRequest], named: &[usize], link: usize, now: Instant) {
    for &request in named {
        if let Some(named_at) = traced.get_mut(request).and_then(|request| request.named_at.get_mut(link)) {
            named_at.get_or_insert(now);
        }
    }
}

/// One message to a remote function, answered or failed.
#[derive(Debug, Clone, Copy)]
pub(super) struct CompletedCall {
    /// Index of the link in the placement.
    pub(super) link: usize,
    pub(super) sent: Instant,
    pub(super) ended: Instant,
    pub(super) sent_bytes: usize,
    /// Bytes of the answer's rows and the compute time that the function reports; `None` if the call failed.
    pub(super) answer: Option<(usize, Duration)>,
}

/// Totals of the messages to one remote function.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct CallTotals {
    /// Number of messages that were answered.
    pub(crate) answered: u64,
    /// Number of messages that were refused, answered wrongly, or lost with their stream.
    pub(crate) failed: u64,
    /// Bytes of rows that were sent.
    pub(crate) sent_bytes: u64,
    /// Bytes of rows that were received.
    pub(crate) received_bytes: u64,
    /// Number of (token, expert) pairs.
    pub(crate) pairs: u64,
    /// Compute time that the function reports.
    pub(crate) computed: Duration,
    /// Times at which the first message left and the last one was over.
    pub(crate) time: Option<(Instant, Instant)>,
}

impl CallTotals {
    pub(super) fn add(&mut self, call: &CompletedCall) {
        self.sent_bytes += call.sent_bytes as u64;
        match call.answer {
            None => self.failed += 1,
            Some((bytes, computed)) => {
                self.answered += 1;
                self.received_bytes += bytes as u64;
                self.computed += computed;
            }
        }
        self.extend_time(call.sent, call.ended);
    }

    /// Adds a request's share of an iteration's totals. The request has `pairs` of the iteration's `all` pairs.
    ///
    /// Messages count whole for each request. Bytes and compute time are divided by pairs.
    pub(crate) fn add_share(&mut self, calls: &Self, pairs: u64, all: u64) {
        let part = |whole: u64| match all {
            0 => whole,
            all => (u128::from(whole) * u128::from(pairs) / u128::from(all)) as u64,
        };
        self.answered += calls.answered;
        self.failed += calls.failed;
        self.sent_bytes += part(calls.sent_bytes);
        self.received_bytes += part(calls.received_bytes);
        self.pairs += pairs;
        self.computed += Duration::from_nanos(part(calls.computed.as_nanos() as u64));
        if let Some((first, last)) = calls.time {
            self.extend_time(first, last);
        }
    }

    /// Reports if any message was sent.
    pub(crate) fn has_calls(&self) -> bool {
        self.answered + self.failed > 0
    }

    fn extend_time(&mut self, first: Instant, last: Instant) {
        let time = self.time.unwrap_or((first, last));
        self.time = Some((time.0.min(first), time.1.max(last)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_the_requests_of_its_rows() {
        let request = |rows: Range<usize>, name: u8| TracedRequest {
            request: 0,
            rows,
            contexts: vec![[name; CONTEXT_BYTES], [name + 1; CONTEXT_BYTES]],
            named_at: vec![None; 2],
        };
        let mut traced = [request(0..2, 1), request(4..5, 11)];
        let names =
            |link, slots: &[u32]| span_contexts(&traced, &requests_in_message(&traced, slots, 2), link);
        assert!(names(0, &[4, 5, 6, 7]).is_empty(), "rows 2 and 3 belong to other requests");
        assert_eq!(names(0, &[3]), vec![1; CONTEXT_BYTES]);
        assert_eq!(names(1, &[0, 5, 9]), [[2; CONTEXT_BYTES], [12; CONTEXT_BYTES]].concat());
        assert!(names(2, &[0]).is_empty());
        assert!(span_contexts(&[], &requests_in_message(&[], &[0], 2), 0).is_empty());
        let first = Instant::now();
        for later in [0, 5] {
            record_named(&mut traced, &[1], 0, first + Duration::from_millis(later));
        }
        assert_eq!(
            (&traced[0].named_at[..], &traced[1].named_at[..]),
            (&[None; 2][..], &[Some(first), None][..])
        );
    }

    #[test]
    fn request_gets_its_share_of_an_iterations_calls() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let call = |sent, ended, answer| CompletedCall {
            link: 0,
            sent: at(sent),
            ended: at(ended),
            sent_bytes: 30,
            answer,
        };
        let mut iteration = CallTotals::default();
        assert!(!iteration.has_calls());
        iteration.add(&call(5, 9, Some((60, Duration::from_millis(3)))));
        iteration.add(&call(2, 4, None));
        assert_eq!((iteration.answered, iteration.failed, iteration.sent_bytes), (1, 1, 60));
        assert_eq!(iteration.time, Some((at(2), at(9))));
        let mut request = CallTotals::default();
        request.add_share(&iteration, 1, 3);
        request.add_share(&CallTotals { time: Some((at(20), at(30))), ..CallTotals::default() }, 4, 4);
        let expected = CallTotals {
            answered: 1,
            failed: 1,
            sent_bytes: 20,
            received_bytes: 20,
            pairs: 5,
            computed: Duration::from_millis(1),
            time: Some((at(2), at(30))),
        };
        assert_eq!(request, expected);
    }
}
