//! Computing: in the order of arrival, requests of one layer that wait at the same time together.
//!
//! Small work, all of decoding, is computed on the thread that drives the connections: handing it to
//! another thread and back costs two wake-ups, which is more than the exchange itself. Large work
//! goes to a thread of its own, so that messages are read and answers written meanwhile.

use crate::admission::Permit;
use crate::host::Host;
use crate::metrics::{self, Metrics};
use crate::pass::{Computed, Pass};
use crate::spans::Spans;
use remoe_kernels::Pool;
use remoe_proto::v1::{Code, Failure, ForwardReply, Rows, Work, forward_reply::Outcome};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::JoinError;
use tonic::Status;

/// Work is small while its experts' packed weights, counted once per pair, are below this: some
/// milliseconds, whatever the model.
const SMALL_BYTES: usize = 128 << 20;
/// Requests are computed together while their answers are not larger than this: sixteen of the largest.
/// No request is overtaken for longer than that takes.
const PASS_BYTES: usize = 64 << 20;
/// As [`PASS_BYTES`], in (token, expert) pairs, of which a pass keeps a list.
const PASS_PAIRS: usize = 1 << 16;
/// A look at the connections that brings nothing takes microseconds. One that took longer than this
/// was interrupted: another thread wants the core, and polling would only delay both.
const CONTENDED: Duration = Duration::from_micros(100);

/// An answer with the room that it holds until it has been handed to the connection; refusals hold
/// none.
pub(crate) type BudgetedReply = (ForwardReply, Option<Permit>);

/// A request that has been checked and admitted.
pub(crate) struct Order {
    pub(crate) work: Work,
    pub(crate) arrived: Instant,
    pub(crate) cancelled: Arc<AtomicBool>,
    /// Answers that the stream still owes; a cancelled request needs none.
    pub(crate) unread: Arc<AtomicUsize>,
    pub(crate) permit: Permit,
    pub(crate) answers: mpsc::UnboundedSender<Result<BudgetedReply, Status>>,
}

/// Computes orders until every sender is gone.
pub(crate) struct Computer {
    host: Arc<Host>,
    pass: Pass,
    row_bytes: usize,
    /// How long after a request the thread polls for the next one before it sleeps: in a decoding
    /// sequence the next layer's request is close, and waking up costs more than the exchange.
    poll: Duration,
    metrics: Metrics,
    spans: Spans,
}

impl Computer {
    pub(crate) fn new(
        host: Arc<Host>,
        pool: Arc<Pool>,
        row_bytes: usize,
        poll: Duration,
        metrics: Metrics,
        spans: Spans,
    ) -> Self {
        Self { host, pass: Pass::new(pool, row_bytes), row_bytes, poll, metrics, spans }
    }

    /// Runs on the thread that drives the connections.
    ///
    /// # Errors
    /// A computation panicked; nothing can be computed any more.
    pub(crate) async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>) -> Result<(), JoinError> {
        let mut queue = VecDeque::new();
        loop {
            if queue.is_empty() {
                let Some(order) = next(&mut orders, self.poll).await else { return Ok(()) };
                queue.push_back(order);
            } else {
                // The answers are written, and cancellations are read, before the next computation.
                tokio::task::yield_now().await;
            }
            drain(&mut orders, &mut queue);
            if queue.front().is_some_and(|order| !self.is_small(std::slice::from_ref(order))) {
                // What large work takes is long compared with a look at the connections: messages that
                // are on their way here belong to the same pass.
                let mut known = 0;
                while queue.len() > known {
                    known = queue.len();
                    tokio::task::yield_now().await;
                    drain(&mut orders, &mut queue);
                }
            }
            let pass = self.next_pass(&mut queue);
            if self.is_small(&pass) {
                self.answer(pass);
            } else {
                let large = move || {
                    self.answer(pass);
                    self
                };
                self = tokio::task::spawn_blocking(large).await?;
            }
        }
    }

    /// The first order of `queue`, and those of the same layer that are computed with it. Routing
    /// generations do not matter: an expert's weights are the same in all of them.
    fn next_pass(&self, queue: &mut VecDeque<Order>) -> Vec<Order> {
        let Some(first) = queue.pop_front() else { return Vec::new() };
        let layer = first.work.layer;
        let most = PASS_PAIRS.min(PASS_BYTES / self.row_bytes);
        let mut pairs = first.work.experts.len();
        let mut pass = vec![first];
        for order in std::mem::take(queue) {
            let more = order.work.experts.len();
            if order.work.layer == layer && pairs + more <= most {
                pairs += more;
                pass.push(order);
            } else {
                queue.push_back(order);
            }
        }
        pass
    }

    fn is_small(&self, orders: &[Order]) -> bool {
        let bytes = |work: &Work| {
            let expert = work.experts.first().and_then(|&expert| self.host.get(work.layer, expert));
            let expert_bytes = expert.map_or(0, |expert| expert.shape().packed_bytes());
            work.experts.len().saturating_mul(expert_bytes)
        };
        orders.iter().map(|order| bytes(&order.work)).fold(0, usize::saturating_add) <= SMALL_BYTES
    }

    /// Computes the orders of a pass and answers each by itself, in the order of arrival.
    fn answer(&mut self, mut pass: Vec<Order>) {
        pass.retain(|order| !self.drop_cancelled(order));
        let mut refusals: Vec<Option<Outcome>> = pass.iter().map(|order| self.too_late(order)).collect();
        let live: Vec<&Order> = pass
            .iter()
            .zip(&refusals)
            .filter(|(_, refusal)| refusal.is_none())
            .map(|(order, _)| order)
            .collect();
        let begun = Instant::now();
        let mut computed = self.compute(&live).into_iter();
        for (order, refusal) in pass.into_iter().zip(&mut refusals) {
            let Some(outcome) = refusal.take().or_else(|| computed.next()) else { continue };
            // An order that was cancelled meanwhile needs no answer; its rows may be incomplete.
            if self.drop_cancelled(&order) {
                continue;
            }
            let label = match &outcome {
                Outcome::Rows(rows) => {
                    self.metrics.compute.observe(f64::from(rows.compute_us) * 1e-6);
                    self.metrics.pairs.inc_by(order.work.experts.len() as u64);
                    "ok"
                }
                Outcome::Failure(failure) => metrics::outcome(failure.code()),
            };
            self.metrics.answers.with_label_values(&[label]).inc();
            let took = match &outcome {
                Outcome::Rows(rows) => Some(Duration::from_micros(rows.compute_us.into())),
                Outcome::Failure(_) => None,
            };
            let reply = ForwardReply { id: order.work.id, outcome: Some(outcome) };
            // A stream that is gone needs no answer.
            let _stream_gone = order.answers.send(Ok((reply, Some(order.permit))));
            // The answer is on its way already.
            self.spans.answered(&order.work, order.arrived, begun, took);
        }
    }

    /// Reports if `order` was cancelled, so that it needs no answer.
    fn drop_cancelled(&self, order: &Order) -> bool {
        let cancelled = order.cancelled.load(Ordering::Acquire);
        if cancelled {
            order.unread.fetch_sub(1, Ordering::AcqRel);
            self.metrics.answers.with_label_values(&["cancelled"]).inc();
        }
        cancelled
    }

    /// The refusal of an order that has waited for longer than its budget.
    fn too_late(&self, order: &Order) -> Option<Outcome> {
        let waited = order.arrived.elapsed();
        self.metrics.queued.observe(waited.as_secs_f64());
        let budget = Duration::from_micros(order.work.budget_us.into());
        (order.work.budget_us > 0 && waited > budget).then(|| {
            Outcome::Failure(Failure {
                code: Code::DeadlineExceeded.into(),
                message: format!("queue deadline exceeded: waited {waited:?}, budget {budget:?}"),
                retryable: true,
            })
        })
    }

    /// The outcome of each order, computed in one pass. Each says its share of the time.
    fn compute(&mut self, orders: &[&Order]) -> Vec<Outcome> {
        if orders.is_empty() {
            return Vec::new();
        }
        let started = Instant::now();
        let works: Vec<&Work> = orders.iter().map(|order| &order.work).collect();
        let is_cancelled = |position: usize| orders[position].cancelled.load(Ordering::Acquire);
        match self.pass.compute(&self.host, &works, is_cancelled) {
            Ok(Computed { answers, reads }) => {
                let elapsed = started.elapsed();
                self.metrics.reads.inc_by(reads);
                let all: usize = works.iter().map(|work| work.experts.len()).sum();
                let share = |work: &Work| elapsed.as_micros() as u64 * work.experts.len() as u64 / all as u64;
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

/// Moves what has arrived into `queue`.
fn drain(orders: &mut mpsc::UnboundedReceiver<Order>, queue: &mut VecDeque<Order>) {
    while let Ok(order) = orders.try_recv() {
        queue.push_back(order);
    }
}

/// The next order, polled for at first. Polling drives the connections.
async fn next(orders: &mut mpsc::UnboundedReceiver<Order>, poll: Duration) -> Option<Order> {
    let poll_until = Instant::now() + poll;
    let mut looked = Instant::now();
    while looked < poll_until {
        tokio::task::yield_now().await;
        match orders.try_recv() {
            Ok(order) => return Some(order),
            Err(mpsc::error::TryRecvError::Disconnected) => return None,
            Err(mpsc::error::TryRecvError::Empty) => (),
        }
        let now = Instant::now();
        if now - looked > CONTENDED {
            break;
        }
        looked = now;
    }
    orders.recv().await
}
