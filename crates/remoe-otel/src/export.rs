//! Export of spans to a collector: a bounded queue, and a thread that empties it.
//!
//! The SDK's batch processor has no metric of dropped spans, and does not shut down while the collector does not
//! answer. The exporter needs a Tokio runtime, which must not be the one that serves requests.

use crate::settings::ExportSettings;
use opentelemetry::Context;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter, SpanProcessor};
use prometheus::{IntCounterVec, Opts};
use std::convert::Infallible;
use std::io;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::mpsc::{self, RecvTimeoutError};
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
        // Exposes 0, so that the first span shows as an increase.
        ["exported", "dropped", "failed"].iter().for_each(|outcome| counts.add(outcome, 0));
        Ok(counts)
    }

    fn add(&self, outcome: &str, spans: usize) {
        self.0.with_label_values(&[outcome]).inc_by(spans as u64);
    }
}

/// Sending end of the queue. Only [`SpanProcessor::shutdown_with_timeout`] blocks.
#[derive(Debug)]
pub(crate) struct SpanQueue {
    spans: Sender<SpanData>,
    stop: CancellationToken,
    /// Disconnected when the last span was exported, so that every later shutdown returns at once, too.
    done: Mutex<mpsc::Receiver<Infallible>>,
    counts: SpanCounts,
}

impl SpanQueue {
    /// Starts a thread that exports spans with `exporter`, which belongs to `runtime`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start(
        runtime: Runtime,
        exporter: impl SpanExporter + 'static,
        settings: &ExportSettings,
        counts: SpanCounts,
    ) -> io::Result<Self> {
        let (spans, queue_end) = channel(settings.queue);
        let (running, done) = mpsc::channel();
        let stop = CancellationToken::new();
        let export = ExportThread {
            exporter,
            queue_end,
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

impl SpanProcessor for SpanQueue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if let Err(TrySendError::Full(_) | TrySendError::Closed(_)) = self.spans.try_send(span) {
            self.counts.add("dropped", 1);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        // Spans are exported within the delay of a batch, or at shutdown.
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

/// Receiving end of the queue, in the export thread.
struct ExportThread<E> {
    exporter: E,
    queue_end: Receiver<SpanData>,
    stop: CancellationToken,
    batch: usize,
    delay: Duration,
    counts: SpanCounts,
    /// Set if the last export failed.
    is_failing: bool,
}

impl<E: SpanExporter> ExportThread<E> {
    /// Exports spans in batches until `stop` is cancelled and the queue is empty.
    async fn run(mut self) {
        let mut batch = Vec::new();
        while !self.stop.is_cancelled() {
            tokio::select! {
                received = self.queue_end.recv_many(&mut batch, self.batch) => match received {
                    0 => return,
                    _ => self.fill(&mut batch).await,
                },
                () = self.stop.cancelled() => {}
            }
            self.export(&mut batch).await;
        }
        self.queue_end.close();
        while self.queue_end.recv_many(&mut batch, self.batch).await > 0 {
            self.export(&mut batch).await;
        }
    }

    /// Waits until `batch` is full, the delay has passed or `stop` is cancelled.
    async fn fill(&mut self, batch: &mut Vec<SpanData>) {
        let full = async {
            while batch.len() < self.batch {
                let missing = self.batch - batch.len();
                if self.queue_end.recv_many(batch, missing).await == 0 {
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

    /// Exports `batch`, which is empty afterwards.
    async fn export(&mut self, batch: &mut Vec<SpanData>) {
        /// Bound beside the exporter's own timeout (OTEL_EXPORTER_OTLP_TIMEOUT), which may be of any length.
        const EXPORT_TIMEOUT: Duration = Duration::from_secs(60);
        if batch.is_empty() {
            return;
        }
        let spans = batch.len();
        let exported = timeout(EXPORT_TIMEOUT, self.exporter.export(std::mem::take(batch))).await;
        let problem = match exported {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_late) => Some(format!("no answer within {EXPORT_TIMEOUT:?}")),
        };
        self.counts.add(if problem.is_none() { "exported" } else { "failed" }, spans);
        // Logged when the state changes, not for every batch.
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

    /// Accepts a batch for each permit, and then blocks.
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

    fn queue(permits: usize, delay: Duration) -> (SpanQueue, Collector) {
        let collector =
            Collector { permits: Arc::new(tokio::sync::Semaphore::new(permits)), taken: Arc::default() };
        let settings = ExportSettings {
            endpoint: String::new(),
            sampler: Sampler::AlwaysOn,
            queue: 8,
            batch: 4,
            delay,
            has_service_name: false,
            has_instance_id: false,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        (
            SpanQueue::start(runtime, collector.clone(), &settings, SpanCounts::new().unwrap()).unwrap(),
            collector,
        )
    }

    fn counted(queue: &SpanQueue, outcome: &str) -> u64 {
        queue.counts.0.with_label_values(&[outcome]).get()
    }

    #[test]
    fn shutdown_exports_queued_spans() {
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
    fn batch_is_exported_when_full_or_late() {
        let (queue, collector) = queue(100, Duration::from_millis(20));
        queue.on_end(span());
        let started = Instant::now();
        while collector.taken.lock().unwrap().is_empty() {
            assert!(started.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn unresponsive_collector_costs_spans_and_no_time() {
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
