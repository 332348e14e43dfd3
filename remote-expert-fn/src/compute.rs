//! Computing: one request at a time, in the order of arrival.
//!
//! Small work, all of decoding, is computed on the thread that drives the connections: handing it to
//! another thread and back costs two wake-ups, which is more than the exchange itself. Large work
//! goes to a thread of its own, so that messages are read and answers written meanwhile.

use crate::admission::Permit;
use crate::host::Host;
use crate::metrics::{Metrics, outcome};
use bytes::Bytes;
use remoe_kernels::{Job, Pool};
use remoe_wire::v1::{Code, Failure, ForwardReply, Rows, Work, forward_reply::Outcome};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::JoinError;
use tonic::Status;

/// Work is small while its experts' packed weights, counted once per pair, are below this: some
/// milliseconds, whatever the model.
const SMALL_BYTES: usize = 128 << 20;
/// A look at the connections that brings nothing takes microseconds. One that took longer than this
/// was interrupted: another thread wants the core, and polling would only delay both.
const CONTENDED: Duration = Duration::from_micros(100);

/// An answer with the room that it holds until it has been handed to the connection; refusals hold
/// none.
pub(crate) type Answer = (ForwardReply, Option<Permit>);

/// A request that has been checked and admitted.
pub(crate) struct Order {
    pub(crate) work: Work,
    pub(crate) arrived: Instant,
    pub(crate) cancelled: Arc<AtomicBool>,
    /// Answers that the stream still owes; a cancelled request needs none.
    pub(crate) unread: Arc<AtomicUsize>,
    pub(crate) permit: Permit,
    pub(crate) answers: mpsc::UnboundedSender<Result<Answer, Status>>,
}

/// Computes orders until every sender is gone.
pub(crate) struct Computer {
    host: Arc<Host>,
    pool: Pool,
    row_bytes: usize,
    /// How long after a request the thread polls for the next one before it sleeps: in a decoding
    /// sequence the next layer's request is close, and waking up costs more than the exchange.
    poll: Duration,
    metrics: Metrics,
    /// Rows in the order of the jobs, before they are put into the order of the answer.
    scratch: Vec<u8>,
}

impl Computer {
    pub(crate) fn new(
        host: Arc<Host>,
        pool: Pool,
        row_bytes: usize,
        poll: Duration,
        metrics: Metrics,
    ) -> Self {
        Self { host, pool, row_bytes, poll, metrics, scratch: Vec::new() }
    }

    /// Runs on the thread that drives the connections.
    ///
    /// # Errors
    /// A computation panicked; nothing can be computed any more.
    pub(crate) async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>) -> Result<(), JoinError> {
        // The answer is written, and cancellations are read, before the next computation.
        while let Some(order) = next(&mut orders, self.poll).await {
            if self.is_small(&order.work) {
                self.answer(order);
            } else {
                let large = move || {
                    self.answer(order);
                    self
                };
                self = tokio::task::spawn_blocking(large).await?;
            }
        }
        Ok(())
    }

    fn is_small(&self, work: &Work) -> bool {
        let expert = work.experts.first().and_then(|&expert| self.host.get(work.layer, expert));
        let expert_bytes = expert.map_or(0, |expert| expert.shape().packed_bytes());
        work.experts.len().saturating_mul(expert_bytes) <= SMALL_BYTES
    }

    fn answer(&mut self, order: Order) {
        let id = order.work.id;
        if order.cancelled.load(Ordering::Acquire) {
            order.unread.fetch_sub(1, Ordering::AcqRel);
            self.metrics.answers.with_label_values(&["cancelled"]).inc();
            return;
        }
        let waited = order.arrived.elapsed();
        self.metrics.queued.observe(waited.as_secs_f64());
        let budget = Duration::from_micros(order.work.budget_us.into());
        let outcome = if order.work.budget_us > 0 && waited > budget {
            self.metrics.answers.with_label_values(&[outcome(Code::DeadlineExceeded)]).inc();
            Outcome::Failure(Failure {
                code: Code::DeadlineExceeded.into(),
                message: format!("the request waited {waited:?}, its budget was {budget:?}"),
                retryable: true,
            })
        } else {
            self.compute(&order.work)
        };
        let reply = ForwardReply { id, outcome: Some(outcome) };
        // A stream that is gone needs no answer.
        let _stream_gone = order.answers.send(Ok((reply, Some(order.permit))));
    }

    fn compute(&mut self, work: &Work) -> Outcome {
        let started = Instant::now();
        match self.rows(work) {
            Ok(rows) => {
                let elapsed = started.elapsed();
                self.metrics.compute.observe(elapsed.as_secs_f64());
                self.metrics.pairs.inc_by(work.experts.len() as u64);
                self.metrics.answers.with_label_values(&["ok"]).inc();
                Outcome::Rows(Rows {
                    rows,
                    compute_us: u32::try_from(elapsed.as_micros()).unwrap_or(u32::MAX),
                })
            }
            Err(message) => {
                tracing::error!(id = work.id, layer = work.layer, %message, "computation failed");
                self.metrics.answers.with_label_values(&[outcome(Code::Internal)]).inc();
                Outcome::Failure(Failure { code: Code::Internal.into(), message, retryable: true })
            }
        }
    }

    fn rows(&mut self, work: &Work) -> Result<Bytes, String> {
        let row_bytes = self.row_bytes;
        let pairs = by_expert(work);
        let rows: Vec<u32> = pairs.iter().map(|pair| pair.row).collect();
        let mut answer = vec![0; pairs.len() * row_bytes];
        // One token's experts are in the order of the answer already: nothing needs to be moved.
        let in_place = pairs.is_sorted_by_key(|pair| pair.slot);
        let mut output = if in_place {
            answer.as_mut_slice()
        } else {
            self.scratch.resize(answer.len(), 0);
            self.scratch.as_mut_slice()
        };
        let mut jobs = Vec::new();
        let mut rest = rows.as_slice();
        for group in pairs.chunk_by(|a, b| a.expert == b.expert) {
            let expert = group[0].expert;
            let packed = self
                .host
                .get(work.layer, expert)
                .ok_or_else(|| format!("expert {expert} of layer {} is not hosted", work.layer))?;
            let (row_index, other_rows) = rest.split_at(group.len());
            let (this, other_output) = output.split_at_mut(group.len() * row_bytes);
            jobs.push(Job { expert: packed, inputs: &work.rows, row_index, output: this });
            (rest, output) = (other_rows, other_output);
        }
        self.pool.forward(&mut jobs).map_err(|error| error.to_string())?;
        if !in_place {
            for (pair, row) in pairs.iter().zip(self.scratch.chunks_exact(row_bytes)) {
                answer[pair.slot * row_bytes..][..row_bytes].copy_from_slice(row);
            }
        }
        Ok(answer.into())
    }
}

/// One token row for one expert.
struct Pair {
    expert: u32,
    row: u32,
    /// Its place in the answer.
    slot: usize,
}

/// The pairs of `work`, those of an expert together.
fn by_expert(work: &Work) -> Vec<Pair> {
    let rows = (0..).zip(&work.counts).flat_map(|(row, &count)| std::iter::repeat_n(row, count as usize));
    let pairs = rows.zip(&work.experts).enumerate();
    let mut pairs: Vec<Pair> = pairs.map(|(slot, (row, &expert))| Pair { expert, row, slot }).collect();
    // Stable: an expert's rows stay in the order of the request.
    pairs.sort_by_key(|pair| pair.expert);
    pairs
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
