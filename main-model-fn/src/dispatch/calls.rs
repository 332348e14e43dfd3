//! Totals of the calls to each remote function, for the spans of requests. Kept only while a request is recorded.

use bytes::Bytes;
use remoe_otel::CONTEXT_BYTES;
use std::ops::Range;
use std::time::{Duration, Instant};

/// A traced request of an iteration.
#[derive(Debug, Clone)]
pub(crate) struct TracedRequest {
    /// Which of the requests that run.
    pub(crate) request: usize,
    /// Rows of the request.
    pub(crate) rows: Range<usize>,
    /// Context that names the request's span of each link, in the order of the placement's links.
    pub(crate) contexts: Vec<[u8; CONTEXT_BYTES]>,
    /// When each link was first told its context; `None` if it was not.
    pub(crate) told: Vec<Option<Instant>>,
}

/// Traced requests that one message names, at most.
const MOST_NAMED: usize = 64;

/// Returns the indices of those of `followed` whose spans a message with `slots` names: they have rows among the
/// slots, and a row has `top_k`.
pub(super) fn named(followed: &[TracedRequest], slots: &[u32], top_k: usize) -> Vec<usize> {
    // Slots ascend.
    let has_rows = |request: &TracedRequest| {
        let first = slots.partition_point(|slot| (*slot as usize) < request.rows.start * top_k);
        slots.get(first).is_some_and(|slot| (*slot as usize) < request.rows.end * top_k)
    };
    let named = followed.iter().enumerate().filter(|(_, request)| has_rows(request));
    named.map(|(index, _)| index).take(MOST_NAMED).collect()
}

/// Returns the contexts that name the spans of those `named` of `followed` to `link`.
pub(super) fn contexts(followed: &[TracedRequest], named: &[usize], link: usize) -> Bytes {
    let contexts = named.iter().filter_map(|&request| followed.get(request)?.contexts.get(link).copied());
    contexts.collect::<Vec<_>>().into_flattened().into()
}

/// A message that names those `named` of `followed` left for `link` at `now`. From then on there may be spans below
/// theirs.
pub(super) fn told(followed: &mut [TracedRequest], named: &[usize], link: usize, now: Instant) {
    for &request in named {
        if let Some(told) = followed.get_mut(request).and_then(|request| request.told.get_mut(link)) {
            told.get_or_insert(now);
        }
    }
}

/// One message to a remote function, and what came of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    /// Index of its link in the placement.
    pub(super) link: usize,
    pub(super) sent: Instant,
    pub(super) ended: Instant,
    pub(super) sent_bytes: usize,
    /// Bytes of rows that came back, and how long the function says that it computed them; none where it failed.
    pub(super) answer: Option<(usize, Duration)>,
}

/// Messages to one remote function.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Calls {
    /// Messages that were answered.
    pub(crate) answered: u64,
    /// Messages that were not: refused, spoilt, or lost with their stream.
    pub(crate) failed: u64,
    /// Bytes of rows there and back.
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
    /// (token, expert) pairs.
    pub(crate) pairs: u64,
    /// Time that the function reports to have computed.
    pub(crate) computed: Duration,
    /// When the first message left, and the last was over.
    pub(crate) time: Option<(Instant, Instant)>,
}

impl Calls {
    pub(super) fn add(&mut self, call: &Call) {
        self.sent_bytes += call.sent_bytes as u64;
        match call.answer {
            None => self.failed += 1,
            Some((bytes, computed)) => {
                self.answered += 1;
                self.received_bytes += bytes as u64;
                self.computed += computed;
            }
        }
        self.spans(call.sent, call.ended);
    }

    /// Adds a request's part of `calls`, those of an iteration: messages whole, as requests that share an iteration
    /// share its messages, and of bytes and time what `pairs` are of `all`.
    pub(crate) fn join(&mut self, calls: &Self, pairs: u64, all: u64) {
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
            self.spans(first, last);
        }
    }

    /// Reports if the function was asked anything.
    pub(crate) fn is_any(&self) -> bool {
        self.answered + self.failed > 0
    }

    fn spans(&mut self, first: Instant, last: Instant) {
        let known = self.time.unwrap_or((first, last));
        self.time = Some((known.0.min(first), known.1.max(last)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_whose_rows_it_has() {
        let request = |rows: Range<usize>, name: u8| TracedRequest {
            request: 0,
            rows,
            contexts: vec![[name; CONTEXT_BYTES], [name + 1; CONTEXT_BYTES]],
            told: vec![None; 2],
        };
        let mut followed = [request(0..2, 1), request(4..5, 11)];
        let names = |link, slots: &[u32]| contexts(&followed, &named(&followed, slots, 2), link);
        assert!(names(0, &[4, 5, 6, 7]).is_empty(), "rows 2 and 3 are of others");
        assert_eq!(names(0, &[3]), vec![1; CONTEXT_BYTES]);
        assert_eq!(names(1, &[0, 5, 9]), [[2; CONTEXT_BYTES], [12; CONTEXT_BYTES]].concat());
        assert!(names(2, &[0]).is_empty());
        assert!(contexts(&[], &named(&[], &[0], 2), 0).is_empty());
        let first = Instant::now();
        for later in [0, 5] {
            told(&mut followed, &[1], 0, first + Duration::from_millis(later));
        }
        assert_eq!(
            (&followed[0].told[..], &followed[1].told[..]),
            (&[None; 2][..], &[Some(first), None][..])
        );
    }

    #[test]
    fn a_request_has_its_part_of_what_an_iteration_shares() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let call =
            |sent, ended, answer| Call { link: 0, sent: at(sent), ended: at(ended), sent_bytes: 30, answer };
        let mut iteration = Calls::default();
        assert!(!iteration.is_any());
        iteration.add(&call(5, 9, Some((60, Duration::from_millis(3)))));
        iteration.add(&call(2, 4, None));
        assert_eq!((iteration.answered, iteration.failed, iteration.sent_bytes), (1, 1, 60));
        assert_eq!(iteration.time, Some((at(2), at(9))));
        let mut request = Calls::default();
        request.join(&iteration, 1, 3);
        request.join(&Calls { time: Some((at(20), at(30))), ..Calls::default() }, 4, 4);
        let expected = Calls {
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
