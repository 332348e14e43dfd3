//! Compute loop: takes admitted requests in the order of arrival and computes waiting requests of one layer as a
//! batch.
//!
//! Small batches, which are all of decoding, are computed on the thread that drives the connections: two wake-ups of
//! another thread would take longer than the exchange itself. Large batches are computed on another thread, so that
//! messages are read and answers written meanwhile.

use crate::admission::Permit;
use crate::batch::{BatchExecutor, BatchOutput};
use crate::host::HostedExperts;
use crate::metrics::{self, Metrics};
use crate::spans::CallerSpans;
use remoe_kernels::Pool;
use remoe_proto::v1::{Code, Failure, ForwardReply, Rows, Work, forward_reply::Outcome};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::JoinError;
use tonic::Status;

/// Largest small batch, in bytes of packed weights counted once per pair: it takes some milliseconds for every model.
const MAX_SMALL_BATCH_BYTES: usize = 128 << 20;
/// Largest answers of one batch, in bytes: sixteen of the largest. No request is overtaken for longer than such a
/// batch takes.
const MAX_BATCH_BYTES: usize = 64 << 20;
/// Largest number of (token, expert) pairs in one batch, which keeps a list of them.
const MAX_BATCH_PAIRS: usize = 1 << 16;
/// Duration of one poll above which polling stops. A poll without a message takes microseconds; a longer one was
/// interrupted, because another thread needs the core.
const MAX_POLL_TIME: Duration = Duration::from_micros(100);

/// Answer with the permit that it holds until the connection has taken it. Refusals hold none.
pub(crate) type BudgetedReply = (ForwardReply, Option<Permit>);

/// Request that was checked and admitted.
pub(crate) struct AdmittedRequest {
    pub(crate) work: Work,
    pub(crate) arrived: Instant,
    pub(crate) cancelled: Arc<AtomicBool>,
    /// Number of unread answers of the stream, with this one. A cancelled request is subtracted.
    pub(crate) unread_answers: Arc<AtomicUsize>,
    pub(crate) permit: Permit,
    pub(crate) answers: mpsc::UnboundedSender<Result<BudgetedReply, Status>>,
}

/// Loop that computes admitted work until all senders are dropped.
pub(crate) struct ComputeLoop {
    host: Arc<HostedExperts>,
    executor: BatchExecutor,
    row_bytes: usize,
    /// Polling time for the next request before the thread sleeps. While decoding, the request of the next layer
    /// arrives soon, and waking up takes longer than the exchange.
    poll: Duration,
    metrics: Metrics,
    spans: CallerSpans,
}

impl ComputeLoop {
    pub(crate) fn new(
        host: Arc<HostedExperts>,
        pool: Arc<Pool>,
        row_bytes: usize,
        poll: Duration,
        metrics: Metrics,
        spans: CallerSpans,
    ) -> Self {
        Self { host, executor: BatchExecutor::new(pool, row_bytes), row_bytes, poll, metrics, spans }
    }

    /// Runs the loop on the thread that drives the connections.
    ///
    /// # Errors
    /// A computation panicked, and the loop cannot continue.
    pub(crate) async fn run(
        mut self,
        mut requests: mpsc::UnboundedReceiver<AdmittedRequest>,
    ) -> Result<(), JoinError> {
        let mut queue = VecDeque::new();
        loop {
            if queue.is_empty() {
                let Some(request) = next_work(&mut requests, self.poll).await else { return Ok(()) };
                queue.push_back(request);
            } else {
                // Lets answers be written and cancellations be read before the next computation.
                tokio::task::yield_now().await;
            }
            drain(&mut requests, &mut queue);
            if queue.front().is_some_and(|request| !self.is_small(std::slice::from_ref(request))) {
                // A large batch takes long compared with a poll: messages that are arriving join the batch.
                let mut previous_length = 0;
                while queue.len() > previous_length {
                    previous_length = queue.len();
                    tokio::task::yield_now().await;
                    drain(&mut requests, &mut queue);
                }
            }
            let batch = self.next_batch(&mut queue);
            if self.is_small(&batch) {
                self.answer(batch);
            } else {
                let compute_large = move || {
                    self.answer(batch);
                    self
                };
                self = tokio::task::spawn_blocking(compute_large).await?;
            }
        }
    }

    /// Takes the first request of `queue` and those of the same layer that fit into its batch. The routing generation
    /// does not matter: an expert's weights are the same in all.
    fn next_batch(&self, queue: &mut VecDeque<AdmittedRequest>) -> Vec<AdmittedRequest> {
        let Some(first) = queue.pop_front() else { return Vec::new() };
        let layer = first.work.layer;
        let max_pairs = MAX_BATCH_PAIRS.min(MAX_BATCH_BYTES / self.row_bytes);
        let mut pairs = first.work.experts.len();
        let mut batch = vec![first];
        for request in std::mem::take(queue) {
            let added = request.work.experts.len();
            if request.work.layer == layer && pairs + added <= max_pairs {
                pairs += added;
                batch.push(request);
            } else {
                queue.push_back(request);
            }
        }
        batch
    }

    fn is_small(&self, requests: &[AdmittedRequest]) -> bool {
        let bytes = |work: &Work| {
            let expert = work.experts.first().and_then(|&expert| self.host.get(work.layer, expert));
            let expert_bytes = expert.map_or(0, |expert| expert.shape().packed_bytes());
            work.experts.len().saturating_mul(expert_bytes)
        };
        requests.iter().map(|request| bytes(&request.work)).fold(0, usize::saturating_add)
            <= MAX_SMALL_BATCH_BYTES
    }

    /// Computes a batch and answers each request, in the order of arrival.
    fn answer(&mut self, mut batch: Vec<AdmittedRequest>) {
        batch.retain(|request| !self.count_cancelled(request));
        let mut refusals: Vec<Option<Outcome>> =
            batch.iter().map(|request| self.deadline_refusal(request)).collect();
        let live: Vec<&AdmittedRequest> = batch
            .iter()
            .zip(&refusals)
            .filter(|(_, refusal)| refusal.is_none())
            .map(|(request, _)| request)
            .collect();
        let compute_start = Instant::now();
        let mut computed = self.compute(&live).into_iter();
        for (request, refusal) in batch.into_iter().zip(&mut refusals) {
            let Some(outcome) = refusal.take().or_else(|| computed.next()) else { continue };
            // A request cancelled meanwhile needs no answer, and its rows may be incomplete.
            if self.count_cancelled(&request) {
                continue;
            }
            let label = match &outcome {
                Outcome::Rows(rows) => {
                    self.metrics.compute.observe(f64::from(rows.compute_us) * 1e-6);
                    self.metrics.pairs.inc_by(request.work.experts.len() as u64);
                    "ok"
                }
                Outcome::Failure(failure) => metrics::outcome_label(failure.code()),
            };
            self.metrics.answers.with_label_values(&[label]).inc();
            let compute_time = match &outcome {
                Outcome::Rows(rows) => Some(Duration::from_micros(rows.compute_us.into())),
                Outcome::Failure(_) => None,
            };
            let reply = ForwardReply { id: request.work.id, outcome: Some(outcome) };
            // Ignores a closed stream.
            let _stream_gone = request.answers.send(Ok((reply, Some(request.permit))));
            // Records the span after the answer was sent.
            self.spans.record(&request.work, request.arrived, compute_start, compute_time);
        }
    }

    /// Returns true if the request was cancelled, after counting it as such.
    fn count_cancelled(&self, request: &AdmittedRequest) -> bool {
        let is_cancelled = request.cancelled.load(Ordering::Acquire);
        if is_cancelled {
            request.unread_answers.fetch_sub(1, Ordering::AcqRel);
            self.metrics.answers.with_label_values(&["cancelled"]).inc();
        }
        is_cancelled
    }

    /// Returns the refusal of a request that waited for longer than its queue deadline.
    fn deadline_refusal(&self, request: &AdmittedRequest) -> Option<Outcome> {
        let waited = request.arrived.elapsed();
        self.metrics.queued.observe(waited.as_secs_f64());
        let budget = Duration::from_micros(request.work.budget_us.into());
        (request.work.budget_us > 0 && waited > budget).then(|| {
            Outcome::Failure(Failure {
                code: Code::DeadlineExceeded.into(),
                message: format!("queue deadline exceeded: waited {waited:?}, budget {budget:?}"),
                retryable: true,
            })
        })
    }

    /// Computes the outcomes of all requests as one batch. Each reports its share of the time.
    fn compute(&mut self, requests: &[&AdmittedRequest]) -> Vec<Outcome> {
        if requests.is_empty() {
            return Vec::new();
        }
        let started = Instant::now();
        let works: Vec<&Work> = requests.iter().map(|request| &request.work).collect();
        let is_cancelled = |position: usize| requests[position].cancelled.load(Ordering::Acquire);
        match self.executor.compute(&self.host, &works, is_cancelled) {
            Ok(BatchOutput { answers, reads }) => {
                let elapsed = started.elapsed();
                self.metrics.reads.inc_by(reads);
                let total_pairs: usize = works.iter().map(|work| work.experts.len()).sum();
                let share =
                    |work: &Work| elapsed.as_micros() as u64 * work.experts.len() as u64 / total_pairs as u64;
                let rows = works.iter().zip(answers).map(|(work, rows)| Rows {
                    rows,
                    compute_us: u32::try_from(share(work)).unwrap_or(u32::MAX),
                });
                rows.map(Outcome::Rows).collect()
            }
            Err(message) => {
                let ids: Vec<u64> = works.iter().map(|work| work.id).collect();
                tracing::error!(?ids, layer = works[0].layer, %message, "computation failed");
                let failure = Failure { code: Code::Internal.into(), message, retryable: true };
                works.iter().map(|_| Outcome::Failure(failure.clone())).collect()
            }
        }
    }
}

/// Moves arrived requests into `queue`.
fn drain(requests: &mut mpsc::UnboundedReceiver<AdmittedRequest>, queue: &mut VecDeque<AdmittedRequest>) {
    while let Ok(request) = requests.try_recv() {
        queue.push_back(request);
    }
}

/// Waits for the next request, at first by polling, which also drives the connections.
async fn next_work(
    requests: &mut mpsc::UnboundedReceiver<AdmittedRequest>,
    poll: Duration,
) -> Option<AdmittedRequest> {
    let poll_until = Instant::now() + poll;
    let mut last_poll = Instant::now();
    while last_poll < poll_until {
        tokio::task::yield_now().await;
        match requests.try_recv() {
            Ok(request) => return Some(request),
            Err(mpsc::error::TryRecvError::Disconnected) => return None,
            Err(mpsc::error::TryRecvError::Empty) => (),
        }
        let now = Instant::now();
        if now - last_poll > MAX_POLL_TIME {
            break;
        }
        last_poll = now;
    }
    requests.recv().await
}
