//! Spans on their way to a collector: a bounded queue, and a thread that empties it.
//!
//! The SDK's own batch processor neither counts what it drops where it can be seen nor ends while a collector keeps
//! silent; and the exporter needs a runtime, which must be none that requests are served by.

use crate::settings::ExportSettings;
use opentelemetry::Context;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter, SpanProcessor};
use prometheus::{IntCounterVec, Opts};
use std::convert::Infallible;
use std::io;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::mpsc::{Receiver as Done, RecvTimeoutError, channel as until};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Number of spans by outcome.
#[derive(Debug, Clone)]
pub(crate) struct SpanCounts(pub(crate) IntCounterVec);

impl SpanCounts {
    pub(crate) fn new() -> Result<Self, prometheus::Error> {
        let help = "Spans by outcome: exported, dropped (queue full), failed (at the collector).";
        let counts = Self(IntCounterVec::new(Opts::new("remoe_trace_spans_total", help), &["outcome"])?);
        // There from the beginning: an increase is only seen of what was there.
        ["exported", "dropped", "failed"].iter().for_each(|outcome| counts.add(outcome, 0));
        Ok(counts)
    }

    fn add(&self, outcome: &str, spans: usize) {
        self.0.with_label_values(&[outcome]).inc_by(spans as u64);
    }
}

/// The end of the queue where spans come in. Nothing here waits but [`SpanProcessor::shutdown_with_timeout`].
#[derive(Debug)]
pub(crate) struct Queue {
    spans: Sender<SpanData>,
    stop: CancellationToken,
    /// Closes when the last span has left, so that later callers, too, learn of it.
    done: Mutex<Done<Infallible>>,
    counts: SpanCounts,
}

impl Queue {
    /// Has `exporter`, made on `runtime`, export by a thread of its own.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub(crate) fn start(
        runtime: Runtime,
        exporter: impl SpanExporter + 'static,
        settings: &ExportSettings,
        counts: SpanCounts,
    ) -> io::Result<Self> {
        let (spans, waiting) = channel(settings.queue);
        let (running, done) = until();
        let stop = CancellationToken::new();
        let export = Export {
            exporter,
            waiting,
            stop: stop.clone(),
            batch: settings.batch,
            delay: settings.delay,
            counts: counts.clone(),
            is_failing: false,
        };
        std::thread::Builder::new().name("traces".to_owned()).spawn(move || {
            runtime.block_on(export.run());
            drop(running);
            runtime.shutdown_background();
        })?;
        Ok(Self { spans, stop, done: Mutex::new(done), counts })
    }
}

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if let Err(TrySendError::Full(_) | TrySendError::Closed(_)) = self.spans.try_send(span) {
            self.counts.add("dropped", 1);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        // Spans leave within the delay of a batch, or at the end.
        Ok(())
    }

    fn shutdown_with_timeout(&self, limit: Duration) -> OTelSdkResult {
        self.stop.cancel();
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        match done.recv_timeout(limit) {
            Err(RecvTimeoutError::Disconnected) => Ok(()),
            Err(RecvTimeoutError::Timeout) => Err(OTelSdkError::Timeout(limit)),
        }
    }
}

/// The other end.
struct Export<E> {
    exporter: E,
    waiting: Receiver<SpanData>,
    stop: CancellationToken,
    batch: usize,
    delay: Duration,
    counts: SpanCounts,
    /// Set if the collector did not take the last export.
    is_failing: bool,
}

impl<E: SpanExporter> Export<E> {
    /// Exports what comes, until it is told to stop and all that waited by then has left.
    async fn run(mut self) {
        let mut batch = Vec::new();
        while !self.stop.is_cancelled() {
            tokio::select! {
                came = self.waiting.recv_many(&mut batch, self.batch) => match came {
                    0 => return,
                    _ => self.fill(&mut batch).await,
                },
                () = self.stop.cancelled() => {}
            }
            self.export(&mut batch).await;
        }
        self.waiting.close();
        while self.waiting.recv_many(&mut batch, self.batch).await > 0 {
            self.export(&mut batch).await;
        }
    }

    /// Waits for more of a batch.
    async fn fill(&mut self, batch: &mut Vec<SpanData>) {
        let full = async {
            while batch.len() < self.batch {
                let room = self.batch - batch.len();
                if self.waiting.recv_many(batch, room).await == 0 {
                    return;
                }
            }
        };
        tokio::select! {
            () = full => {}
            () = sleep(self.delay) => {}
            () = self.stop.cancelled() => {}
        }
    }

    async fn export(&mut self, batch: &mut Vec<SpanData>) {
        /// The exporter has a limit of its own (OTEL_EXPORTER_OTLP_TIMEOUT), which may be any.
        const LONGEST: Duration = Duration::from_secs(60);
        if batch.is_empty() {
            return;
        }
        let spans = batch.len();
        let exported = timeout(LONGEST, self.exporter.export(std::mem::take(batch))).await;
        let problem = match exported {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_late) => Some(format!("no answer within {LONGEST:?}")),
        };
        self.counts.add(if problem.is_none() { "exported" } else { "failed" }, spans);
        // Once, not for every batch.
        let was_failing = std::mem::replace(&mut self.is_failing, problem.is_some());
        match problem {
            Some(problem) if !was_failing => tracing::warn!(problem, "trace export failed"),
            None if was_failing => tracing::info!("trace export recovered"),
            _ => {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status};
    use opentelemetry_sdk::trace::{Sampler, SpanEvents, SpanLinks};
    use std::sync::Arc;
    use std::time::{Instant, SystemTime};

    /// Takes batches while it has permits.
    #[derive(Debug, Clone)]
    struct Collector {
        permits: Arc<tokio::sync::Semaphore>,
        taken: Arc<Mutex<Vec<usize>>>,
    }

    impl SpanExporter for Collector {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            self.permits.acquire().await.unwrap().forget();
            self.taken.lock().unwrap().push(batch.len());
            Ok(())
        }
    }

    fn span() -> SpanData {
        SpanData {
            span_context: SpanContext::empty_context(),
            parent_span_id: SpanId::INVALID,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: "s".into(),
            start_time: SystemTime::UNIX_EPOCH,
            end_time: SystemTime::UNIX_EPOCH,
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: opentelemetry::InstrumentationScope::default(),
        }
    }

    fn queue(permits: usize, delay: Duration) -> (Queue, Collector) {
        let collector =
            Collector { permits: Arc::new(tokio::sync::Semaphore::new(permits)), taken: Arc::default() };
        let settings = ExportSettings {
            endpoint: String::new(),
            sampler: Sampler::AlwaysOn,
            queue: 8,
            batch: 4,
            delay,
            is_named: false,
            is_numbered: false,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        (Queue::start(runtime, collector.clone(), &settings, SpanCounts::new().unwrap()).unwrap(), collector)
    }

    fn counted(queue: &Queue, outcome: &str) -> u64 {
        queue.counts.0.with_label_values(&[outcome]).get()
    }

    #[test]
    fn the_end_waits_for_what_is_there() {
        let (queue, collector) = queue(100, Duration::from_secs(3600));
        for _ in 0..7 {
            queue.on_end(span());
        }
        queue.shutdown_with_timeout(Duration::from_secs(60)).unwrap();
        let taken = collector.taken.lock().unwrap().clone();
        assert_eq!(taken.iter().sum::<usize>(), 7, "{taken:?}");
        assert!(taken.iter().all(|batch| *batch <= 4), "{taken:?}");
        assert_eq!((counted(&queue, "exported"), counted(&queue, "dropped")), (7, 0));
        // A later span has no thread that takes it.
        queue.on_end(span());
        assert_eq!(counted(&queue, "dropped"), 1);
        queue.shutdown_with_timeout(Duration::ZERO).unwrap();
    }

    #[test]
    fn a_batch_leaves_when_it_is_full_or_late() {
        let (queue, collector) = queue(100, Duration::from_millis(20));
        queue.on_end(span());
        let begun = Instant::now();
        while collector.taken.lock().unwrap().is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_collector_that_hangs_costs_spans_and_no_time() {
        let (queue, collector) = queue(0, Duration::from_millis(1));
        for _ in 0..1000 {
            queue.on_end(span());
        }
        // One batch on its way, a queue of eight.
        assert!((1000 - 4 - 8..1000).contains(&counted(&queue, "dropped")), "{}", counted(&queue, "dropped"));
        assert!(queue.shutdown_with_timeout(Duration::from_millis(10)).is_err());
        assert!(collector.taken.lock().unwrap().is_empty());
    }
}
