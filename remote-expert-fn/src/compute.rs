//! The thread that computes: one request at a time, in the order of arrival.

use crate::admission::Permit;
use crate::host::Host;
use crate::metrics::{Metrics, outcome};
use bytes::Bytes;
use remoe_kernels::{Job, Pool};
use remoe_wire::v1::{Code, Failure, ForwardReply, Rows, Work, forward_reply::Outcome};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc as blocking;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tonic::Status;

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
    pub(crate) host: Arc<Host>,
    pub(crate) pool: Pool,
    pub(crate) row_bytes: usize,
    pub(crate) metrics: Metrics,
}

impl Computer {
    pub(crate) fn run(self, orders: &blocking::Receiver<Order>) {
        // Rows in the order of the jobs, before they are put into the order of the answer.
        let mut scratch = Vec::new();
        while let Ok(order) = orders.recv() {
            let id = order.work.id;
            if order.cancelled.load(Ordering::Acquire) {
                order.unread.fetch_sub(1, Ordering::AcqRel);
                self.metrics.answers.with_label_values(&["cancelled"]).inc();
                continue;
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
                self.compute(&order.work, &mut scratch)
            };
            let reply = ForwardReply { id, outcome: Some(outcome) };
            // A stream that is gone needs no answer.
            let _stream_gone = order.answers.send(Ok((reply, Some(order.permit))));
        }
    }

    fn compute(&self, work: &Work, scratch: &mut Vec<u8>) -> Outcome {
        let started = Instant::now();
        match self.rows(work, scratch) {
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

    fn rows(&self, work: &Work, scratch: &mut Vec<u8>) -> Result<Bytes, String> {
        // Per expert: the token rows that it processes and where its results belong.
        let mut by_expert: BTreeMap<u32, (Vec<u32>, Vec<usize>)> = BTreeMap::new();
        let mut slot = 0;
        for (row, &count) in (0..).zip(&work.counts) {
            for _ in 0..count {
                let (rows, slots) = by_expert.entry(work.experts[slot]).or_default();
                rows.push(row);
                slots.push(slot);
                slot += 1;
            }
        }
        let mut answer = vec![0; slot * self.row_bytes];
        scratch.resize(answer.len(), 0);
        let mut jobs = Vec::with_capacity(by_expert.len());
        let mut output = scratch.as_mut_slice();
        for (&expert, (rows, _)) in &by_expert {
            let packed = self
                .host
                .get(work.layer, expert)
                .ok_or_else(|| format!("expert {expert} of layer {} is not hosted", work.layer))?;
            let (this, rest) = output.split_at_mut(rows.len() * self.row_bytes);
            jobs.push(Job { expert: packed, inputs: &work.rows, row_index: rows, output: this });
            output = rest;
        }
        self.pool.forward(&mut jobs).map_err(|error| error.to_string())?;
        let slots = by_expert.values().flat_map(|(_, slots)| slots);
        for (&slot, row) in slots.zip(scratch.chunks_exact(self.row_bytes)) {
            answer[slot * self.row_bytes..][..self.row_bytes].copy_from_slice(row);
        }
        Ok(answer.into())
    }
}
