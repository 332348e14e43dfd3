//! The gRPC service: checks requests, admits them, hands them to the computer.

use crate::admission::Admission;
use crate::compute::{BudgetedReply, Order};
use crate::host::Host;
use crate::metrics::{Metrics, outcome};
use crate::spans::Spans;
use remoe_proto::v1::expert_function_server::ExpertFunction;
use remoe_proto::v1::{
    Code, DescribeRequest, Failure, ForwardReply, ForwardRequest, FunctionDescription, Work,
};
use remoe_proto::v1::{forward_reply::Outcome, forward_request::Body};
use remoe_proto::{MAX_PAYLOAD, Messages};
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt, wrappers::UnboundedReceiverStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

/// A stream whose client lets so many answers lie is closed.
const MAX_UNREAD: usize = 4096;

/// Answers `Forward` and `Describe`.
#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) host: Arc<Host>,
    pub(crate) description: FunctionDescription,
    pub(crate) row_bytes: usize,
    pub(crate) admission: Arc<Admission>,
    /// Unbounded in type only: every order holds a permit.
    pub(crate) orders: mpsc::UnboundedSender<Order>,
    pub(crate) metrics: Metrics,
    pub(crate) spans: Spans,
    /// Ends the streams, once the function has drained.
    pub(crate) closing: CancellationToken,
}

#[tonic::async_trait]
impl ExpertFunction for Service {
    type ForwardStream = Pin<Box<dyn Stream<Item = Result<ForwardReply, Status>> + Send>>;

    async fn forward(
        &self,
        mut request: Request<Streaming<ForwardRequest>>,
    ) -> Result<Response<Self::ForwardStream>, Status> {
        // Unbounded in type only: admission and `MAX_UNREAD` bound what it holds. A bounded channel
        // would make reading wait for writing.
        let (answers, outbox) = mpsc::unbounded_channel::<Result<BudgetedReply, Status>>();
        let unread = Arc::new(AtomicUsize::new(0));
        let reader =
            StreamReader { service: self.clone(), answers, unread: unread.clone(), pending: HashMap::new() };
        tokio::spawn(reader.run(Messages::of(&mut request)?));
        let outbox = UnboundedReceiverStream::new(outbox).map(move |answer| {
            unread.fetch_sub(1, Ordering::AcqRel);
            // The answer's room is free once the connection has taken it.
            answer.map(|(reply, _permit)| reply)
        });
        Ok(Response::new(Box::pin(outbox)))
    }

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<FunctionDescription>, Status> {
        let mut description = self.description.clone();
        description.draining = self.admission.is_draining();
        Ok(Response::new(description))
    }
}

/// The reading half of one stream.
struct StreamReader {
    service: Service,
    answers: mpsc::UnboundedSender<Result<BudgetedReply, Status>>,
    /// Answers that wait for the connection.
    unread: Arc<AtomicUsize>,
    /// Requests that can still be cancelled, with their flags.
    pending: HashMap<u64, Arc<AtomicBool>>,
}

impl StreamReader {
    async fn run(mut self, mut requests: Messages<ForwardRequest>) {
        loop {
            let request = tokio::select! {
                request = requests.next() => request,
                () = self.service.closing.cancelled() => None,
            };
            match request {
                Some(Ok(ForwardRequest { body: Some(body) })) => self.take(body),
                // A request of a kind that this version does not know asks for nothing.
                Some(Ok(ForwardRequest { body: None })) => (),
                Some(Err(status)) => {
                    tracing::debug!(message = status.message(), "stream failed");
                    // What cannot be read, a message that is too large among others, ends the stream
                    // and says so.
                    let _stream_gone = self.answers.send(Err(status));
                    break;
                }
                // A client that has asked everything still waits for answers; a function that closes owes none.
                None => return,
            }
            if self.unread.load(Ordering::Acquire) > MAX_UNREAD {
                let status =
                    Status::resource_exhausted(format!("too many unread answers: limit {MAX_UNREAD}"));
                let _stream_gone = self.answers.send(Err(status));
                break;
            }
            // Flags that only this map holds belong to answered requests.
            if self.pending.len() > 64 {
                self.pending.retain(|_, flag| Arc::strong_count(flag) > 1);
            }
        }
        // The client takes no further answers: cancels what is still pending.
        self.pending.values().for_each(|flag| flag.store(true, Ordering::Release));
    }

    fn take(&mut self, body: Body) {
        match body {
            Body::Cancel(cancel) => {
                if let Some(flag) = self.pending.remove(&cancel.id) {
                    flag.store(true, Ordering::Release);
                }
            }
            Body::Work(work) => {
                let id = work.id;
                self.unread.fetch_add(1, Ordering::AcqRel);
                if let Err(refusal) = self.order(work) {
                    let outcome = outcome(refusal.code());
                    self.service.metrics.answers.with_label_values(&[outcome]).inc();
                    let reply = ForwardReply { id, outcome: Some(Outcome::Failure(refusal)) };
                    let _stream_gone = self.answers.send(Ok((reply, None)));
                }
            }
        }
    }

    /// Checks and admits `work`, or says why not.
    fn order(&mut self, mut work: Work) -> Result<(), Failure> {
        let service = &self.service;
        service.spans.admit(&mut work);
        if service.admission.is_draining() {
            return Err(refusal(Code::Draining, true, "the function is draining".to_owned()));
        }
        check_work(&work, service.row_bytes, |layer, expert| service.host.get(layer, expert).is_some())?;
        let bytes = work.rows.len() + work.experts.len() * service.row_bytes;
        let Some(permit) = service.admission.admit(bytes) else {
            return Err(refusal(
                Code::ResourceExhausted,
                true,
                format!("queue full: {} requests in flight", service.admission.in_flight()),
            ));
        };
        let cancelled = Arc::new(AtomicBool::new(false));
        self.pending.insert(work.id, cancelled.clone());
        let order = Order {
            work,
            arrived: Instant::now(),
            cancelled,
            unread: self.unread.clone(),
            permit,
            answers: self.answers.clone(),
        };
        service
            .orders
            .send(order)
            .map_err(|_| refusal(Code::Internal, true, "the computation has stopped".to_owned()))
    }
}

/// Checks that `work` agrees with itself and with what is hosted, rows being of `row_bytes`.
///
/// # Errors
/// The refusal that the caller gets.
#[doc(hidden)]
pub fn check_work(work: &Work, row_bytes: usize, hosted: impl Fn(u32, u32) -> bool) -> Result<(), Failure> {
    let invalid = |message: String| Err(refusal(Code::InvalidArgument, false, message));
    let rows = work.counts.len();
    if rows == 0 {
        return invalid("expected at least one row, got none".to_owned());
    }
    if work.rows.len() != rows * row_bytes {
        return invalid(format!("expected {rows} rows of {row_bytes} bytes, got {} bytes", work.rows.len()));
    }
    let pairs: u64 = work.counts.iter().map(|&count| u64::from(count)).sum();
    if work.counts.contains(&0) || pairs != work.experts.len() as u64 {
        return invalid(format!(
            "expected counts of at least 1 that sum to {}, the number of expert ids, got a sum of {pairs}",
            work.experts.len()
        ));
    }
    if work.experts.len().saturating_mul(row_bytes) > MAX_PAYLOAD {
        return invalid(format!(
            "answer too large: {} bytes, limit {MAX_PAYLOAD}",
            work.experts.len().saturating_mul(row_bytes)
        ));
    }
    match work.experts.iter().find(|&&expert| !hosted(work.layer, expert)) {
        None => Ok(()),
        Some(expert) => Err(refusal(
            Code::NotFound,
            false,
            format!("expert {expert} of layer {} is not hosted here", work.layer),
        )),
    }
}

fn refusal(code: Code, retryable: bool, message: String) -> Failure {
    Failure { code: code.into(), message, retryable }
}
