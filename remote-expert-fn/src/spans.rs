//! Tracing spans of callers: one span for each request context that messages carry, over all messages of that context.
//! Callers do not announce their last message, so a span ends after a silence. A caller that continues later gets another
//! span.

use remoe_otel::{CONTEXT_BYTES, Span, Traces};
use remoe_proto::v1::Work;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Largest number of caller contexts in one message.
const MAX_CONTEXTS: usize = 64;
/// Largest number of open spans; further ones are dropped.
const MAX_OPEN_SPANS: usize = 4096;
/// Silence after which a span ends.
const SILENCE: Duration = Duration::from_secs(2);
/// Interval between checks for silent spans.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Open spans of all callers, if tracing is on. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct CallerSpans(Option<Arc<OpenSpans>>);

struct OpenSpans {
    traces: Traces,
    open: Mutex<HashMap<[u8; CONTEXT_BYTES], CallerSpan>>,
}

/// Span of a caller with its counts.
struct CallerSpan {
    span: Span,
    calls: i64,
    failed_calls: i64,
    pairs: i64,
    queue_time: Duration,
    compute_total: Duration,
    last_message: Instant,
}

impl CallerSpans {
    /// Creates the spans, which record nothing if `traces` are off.
    pub(crate) fn new(traces: Traces) -> Self {
        Self(traces.is_on().then(|| Arc::new(OpenSpans { traces, open: Mutex::default() })))
    }

    /// Removes the caller contexts from `work` if tracing is off or they are invalid.
    pub(crate) fn drop_invalid_contexts(&self, work: &mut Work) {
        let is_valid = work.trace.len() <= MAX_CONTEXTS * CONTEXT_BYTES
            && work.trace.len().is_multiple_of(CONTEXT_BYTES);
        if self.0.is_none() || !is_valid {
            work.trace.clear();
        }
    }

    /// Records `work`, which arrived at `arrived` and whose computation started at `compute_start`. `compute_time` is
    /// its share of the computation, or `None` if it failed.
    pub(crate) fn record(
        &self,
        work: &Work,
        arrived: Instant,
        compute_start: Instant,
        compute_time: Option<Duration>,
    ) {
        let Some(shared) = self.0.as_ref().filter(|_| !work.trace.is_empty()) else { return };
        let now = Instant::now();
        let mut open = shared.open();
        for context in work.trace.as_chunks::<CONTEXT_BYTES>().0 {
            if open.len() >= MAX_OPEN_SPANS && !open.contains_key(context) {
                continue;
            }
            let caller = open.entry(*context).or_insert_with(|| CallerSpan {
                span: shared.traces.server_of(context, "remoe.v1.ExpertFunction/Forward", arrived),
                calls: 0,
                failed_calls: 0,
                pairs: 0,
                queue_time: Duration::ZERO,
                compute_total: Duration::ZERO,
                last_message: now,
            });
            caller.last_message = now;
            match compute_time {
                None => caller.failed_calls += 1,
                Some(compute_time) => {
                    caller.calls += 1;
                    caller.pairs += work.experts.len() as i64;
                    caller.queue_time += compute_start.saturating_duration_since(arrived);
                    caller.compute_total += compute_time;
                }
            }
        }
    }

    /// Ends silent spans, in a loop without end.
    pub(crate) async fn end_silent_spans(self) {
        let Some(shared) = self.0 else { return std::future::pending().await };
        loop {
            sleep(CHECK_INTERVAL).await;
            shared.end_silent(SILENCE);
        }
    }

    /// Ends all spans.
    pub(crate) fn end_all(&self) {
        if let Some(shared) = &self.0 {
            shared.end_silent(Duration::ZERO);
        }
    }
}

impl OpenSpans {
    fn open(&self) -> MutexGuard<'_, HashMap<[u8; CONTEXT_BYTES], CallerSpan>> {
        // A panic cannot leave a change half done.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end_silent(&self, silence: Duration) {
        let silent: Vec<CallerSpan> = self
            .open()
            .extract_if(|_, caller| caller.last_message.elapsed() >= silence)
            .map(|(_, span)| span)
            .collect();
        for CallerSpan { span, calls, failed_calls, pairs, queue_time, compute_total, last_message } in silent
        {
            span.set("rpc.system", "grpc");
            span.set("rpc.service", "remoe.v1.ExpertFunction");
            span.set("rpc.method", "Forward");
            span.set("remoe.calls", calls);
            span.set("remoe.calls.failed", failed_calls);
            span.set("remoe.pairs", pairs);
            span.set("remoe.queued_seconds", queue_time.as_secs_f64());
            span.set("remoe.busy_seconds", compute_total.as_secs_f64());
            if calls == 0 {
                span.fail("unavailable", "no message answered");
            }
            span.end_at(last_message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording() -> CallerSpans {
        let endpoint =
            |name: &str| (name == "OTEL_EXPORTER_OTLP_ENDPOINT").then(|| "http://127.0.0.1:9".to_owned());
        CallerSpans::new(Traces::from_variables("test", endpoint).unwrap_or_default())
    }

    #[test]
    fn invalid_contexts_are_removed() {
        let kept_bytes = |spans: &CallerSpans, bytes: usize| {
            let mut work = Work { trace: vec![1; bytes].into(), ..Work::default() };
            spans.drop_invalid_contexts(&mut work);
            work.trace.len()
        };
        assert_eq!(kept_bytes(&CallerSpans::new(Traces::off()), 24), 0, "tracing is off");
        let spans = recording();
        for (bytes, left) in
            [(0, 0), (24, 24), (48, 48), (25, 0), (64 * 24, 64 * 24), (65 * 24, 0), (1 << 20, 0)]
        {
            assert_eq!(kept_bytes(&spans, bytes), left, "{bytes}");
        }
    }

    #[test]
    fn caller_that_continues_after_silence_gets_another_span() {
        let spans = recording();
        let now = Instant::now();
        let work = Work { trace: vec![1; CONTEXT_BYTES].into(), experts: vec![1, 2], ..Work::default() };
        let counts = || -> Vec<(i64, i64)> {
            let open = spans.0.as_ref().map(|shared| shared.open());
            open.iter().flat_map(|open| open.values()).map(|caller| (caller.calls, caller.pairs)).collect()
        };
        let end_silent = |silence| spans.0.iter().for_each(|shared| shared.end_silent(silence));
        spans.record(&work, now, now, Some(Duration::ZERO));
        spans.record(&work, now, now, Some(Duration::ZERO));
        end_silent(Duration::from_secs(3600));
        assert_eq!(counts(), [(2, 4)], "all messages are one span");
        end_silent(Duration::ZERO);
        assert_eq!(counts(), []);
        spans.record(&work, now, now, Some(Duration::ZERO));
        assert_eq!(counts(), [(1, 2)], "what was told is not told again");
    }
}
