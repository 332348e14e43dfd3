//! The spans of callers' requests that computations are parts of: one for each span of a caller, however many messages
//! it sends, over when it has sent nothing for a while. A caller does not tell when it has sent all; one that goes on
//! after it was silent has another span.

use remoe_otel::{CONTEXT_BYTES, Span, Traces};
use remoe_proto::v1::Work;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Spans of callers that one message may be for.
const MOST_CALLERS: usize = 64;
/// Spans that are open at the same time; further ones are left out.
const MOST_OPEN: usize = 4096;
/// A caller that has sent nothing for so long has sent all.
const SILENCE: Duration = Duration::from_secs(2);
/// Between two looks for those.
const LOOK: Duration = Duration::from_millis(500);

/// All of them. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Spans(Option<Arc<OpenSpans>>);

struct OpenSpans {
    traces: Traces,
    open: Mutex<HashMap<[u8; CONTEXT_BYTES], Served>>,
}

/// Work that was done for a span of a caller.
struct Served {
    span: Span,
    calls: i64,
    failed: i64,
    pairs: i64,
    waited: Duration,
    computed: Duration,
    last: Instant,
}

impl Spans {
    /// Makes the spans of callers; none if `traces` are off.
    pub(crate) fn new(traces: Traces) -> Self {
        Self(traces.is_on().then(|| Arc::new(OpenSpans { traces, open: Mutex::default() })))
    }

    /// Removes the callers' spans from `work` if traces are off, or if the spans are invalid.
    pub(crate) fn admit(&self, work: &mut Work) {
        let is_fine = work.trace.len() <= MOST_CALLERS * CONTEXT_BYTES
            && work.trace.len().is_multiple_of(CONTEXT_BYTES);
        if self.0.is_none() || !is_fine {
            work.trace.clear();
        }
    }

    /// `work`, which came at `arrived`, began to be computed at `begun` and is over; `computed` is its share of the
    /// time, none where it failed.
    pub(crate) fn answered(&self, work: &Work, arrived: Instant, begun: Instant, computed: Option<Duration>) {
        let Some(shared) = self.0.as_ref().filter(|_| !work.trace.is_empty()) else { return };
        let now = Instant::now();
        let mut open = shared.open();
        for context in work.trace.as_chunks::<CONTEXT_BYTES>().0 {
            if open.len() >= MOST_OPEN && !open.contains_key(context) {
                continue;
            }
            let served = open.entry(*context).or_insert_with(|| Served {
                span: shared.traces.server_of(context, "remoe.v1.ExpertFunction/Forward", arrived),
                calls: 0,
                failed: 0,
                pairs: 0,
                waited: Duration::ZERO,
                computed: Duration::ZERO,
                last: now,
            });
            served.last = now;
            match computed {
                None => served.failed += 1,
                Some(computed) => {
                    served.calls += 1;
                    served.pairs += work.experts.len() as i64;
                    served.waited += begun.saturating_duration_since(arrived);
                    served.computed += computed;
                }
            }
        }
    }

    /// Ends spans of callers that have sent all, for ever.
    pub(crate) async fn keep(self) {
        let Some(shared) = self.0 else { return std::future::pending().await };
        loop {
            sleep(LOOK).await;
            shared.end(SILENCE);
        }
    }

    /// Ends all of them.
    pub(crate) fn end(&self) {
        if let Some(shared) = &self.0 {
            shared.end(Duration::ZERO);
        }
    }
}

impl OpenSpans {
    fn open(&self) -> MutexGuard<'_, HashMap<[u8; CONTEXT_BYTES], Served>> {
        // Every change of it is whole.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, silence: Duration) {
        let over: Vec<Served> =
            self.open().extract_if(|_, served| served.last.elapsed() >= silence).map(|(_, it)| it).collect();
        for Served { span, calls, failed, pairs, waited, computed, last } in over {
            span.set("rpc.system", "grpc");
            span.set("rpc.service", "remoe.v1.ExpertFunction");
            span.set("rpc.method", "Forward");
            span.set("remoe.calls", calls);
            span.set("remoe.calls.failed", failed);
            span.set("remoe.pairs", pairs);
            span.set("remoe.queued_seconds", waited.as_secs_f64());
            span.set("remoe.busy_seconds", computed.as_secs_f64());
            if calls == 0 {
                span.fail("unavailable", "no message answered");
            }
            span.end_at(last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording() -> Spans {
        let endpoint =
            |name: &str| (name == "OTEL_EXPORTER_OTLP_ENDPOINT").then(|| "http://127.0.0.1:9".to_owned());
        Spans::new(Traces::from_variables("test", endpoint).unwrap_or_default())
    }

    #[test]
    fn what_is_no_context_is_taken_out() {
        let admitted = |spans: &Spans, bytes: usize| {
            let mut work = Work { trace: vec![1; bytes].into(), ..Work::default() };
            spans.admit(&mut work);
            work.trace.len()
        };
        assert_eq!(admitted(&Spans::new(Traces::off()), 24), 0, "tracing is off");
        let spans = recording();
        for (bytes, left) in
            [(0, 0), (24, 24), (48, 48), (25, 0), (64 * 24, 64 * 24), (65 * 24, 0), (1 << 20, 0)]
        {
            assert_eq!(admitted(&spans, bytes), left, "{bytes}");
        }
    }

    #[test]
    fn who_goes_on_after_a_silence_has_another_span() {
        let spans = recording();
        let now = Instant::now();
        let work = Work { trace: vec![1; CONTEXT_BYTES].into(), experts: vec![1, 2], ..Work::default() };
        let counted = || -> Vec<(i64, i64)> {
            let open = spans.0.as_ref().map(|shared| shared.open());
            open.iter().flat_map(|open| open.values()).map(|served| (served.calls, served.pairs)).collect()
        };
        let keep = |silence| spans.0.iter().for_each(|shared| shared.end(silence));
        spans.answered(&work, now, now, Some(Duration::ZERO));
        spans.answered(&work, now, now, Some(Duration::ZERO));
        keep(Duration::from_secs(3600));
        assert_eq!(counted(), [(2, 4)], "all messages are one span");
        keep(Duration::ZERO);
        assert_eq!(counted(), []);
        spans.answered(&work, now, now, Some(Duration::ZERO));
        assert_eq!(counted(), [(1, 2)], "what was told is not told again");
    }
}
