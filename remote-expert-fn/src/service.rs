//! gRPC service: checks requests, admits them, and passes them to the compute loop.

use crate::admission::Admission;
use crate::compute::{AdmittedRequest, BudgetedReply};
use crate::host::HostedExperts;
use crate::metrics::{Metrics, outcome_label};
use crate::spans::CallerSpans;
use remoe_proto::v1::expert_function_server::ExpertFunction;
use remoe_proto::v1::{
    Code, DescribeRequest, Failure, ForwardReply, ForwardRequest, FunctionDescription, Work,
};
use remoe_proto::v1::{forward_reply::Outcome, forward_request::Body};
use remoe_proto::{MAX_PAYLOAD, MessageStream};
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt, wrappers::UnboundedReceiverStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

/// Number of unread answers above which a stream is closed.
const MAX_UNREAD: usize = 4096;

/// Service for `Forward` and `Describe`.
#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) host: Arc<HostedExperts>,
    pub(crate) description: FunctionDescription,
    pub(crate) row_bytes: usize,
    pub(crate) admission: Arc<Admission>,
    /// Unbounded in type only: every request in it holds a permit.
    pub(crate) admitted_requests: mpsc::UnboundedSender<AdmittedRequest>,
    pub(crate) metrics: Metrics,
    pub(crate) spans: CallerSpans,
    /// Ends the streams once the function has drained.
    pub(crate) closing: CancellationToken,
}

#[tonic::async_trait]
impl ExpertFunction for Service {
    type ForwardStream = Pin<Box<dyn Stream<Item = Result<ForwardReply, Status>> + Send>>;

    async fn forward(
        &self,
        mut request: Request<Streaming<ForwardRequest>>,
    ) -> Result<Response<Self::ForwardStream>, Status> {
        // Unbounded in type only: admission and `MAX_UNREAD` bound it. With a bounded channel, reading would wait for
        // writing.
        let (answers, outbox) = mpsc::unbounded_channel::<Result<BudgetedReply, Status>>();
        let unread_answers = Arc::new(AtomicUsize::new(0));
        let reader = StreamReader {
            service: self.clone(),
            answers,
            unread_answers: unread_answers.clone(),
            pending: HashMap::new(),
        };
        tokio::spawn(reader.run(MessageStream::take_from(&mut request)?));
        let outbox = UnboundedReceiverStream::new(outbox).map(move |answer| {
            unread_answers.fetch_sub(1, Ordering::AcqRel);
            // Drops the permit once the connection has taken the answer.
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

/// Reader of one stream.
struct StreamReader {
    service: Service,
    answers: mpsc::UnboundedSender<Result<BudgetedReply, Status>>,
    /// Number of answers that wait for the connection.
    unread_answers: Arc<AtomicUsize>,
    /// Cancellation flags of unanswered requests.
    pending: HashMap<u64, Arc<AtomicBool>>,
}

impl StreamReader {
    async fn run(mut self, mut requests: MessageStream<ForwardRequest>) {
        loop {
            let request = tokio::select! {
                request = requests.next() => request,
                () = self.service.closing.cancelled() => None,
            };
            match request {
                Some(Ok(ForwardRequest { body: Some(body) })) => self.handle(body),
                // Ignores request kinds of newer versions.
                Some(Ok(ForwardRequest { body: None })) => (),
                Some(Err(status)) => {
                    tracing::debug!(message = status.message(), "stream failed");
                    // An unreadable message, such as one that is too large, ends the stream with an error.
                    let _stream_gone = self.answers.send(Err(status));
                    break;
                }
                // A client that has sent all requests still waits for answers. A closing function has answered all.
                None => return,
            }
            if self.unread_answers.load(Ordering::Acquire) > MAX_UNREAD {
                let status =
                    Status::resource_exhausted(format!("too many unread answers: limit {MAX_UNREAD}"));
                let _stream_gone = self.answers.send(Err(status));
                break;
            }
            // Removes flags that only this map holds: their requests were answered.
            if self.pending.len() > 64 {
                self.pending.retain(|_, flag| Arc::strong_count(flag) > 1);
            }
        }
        // Cancels all pending requests: the client takes no further answers.
        self.pending.values().for_each(|flag| flag.store(true, Ordering::Release));
    }

    fn handle(&mut self, body: Body) {
        match body {
            Body::Cancel(cancel) => {
                if let Some(flag) = self.pending.remove(&cancel.id) {
                    flag.store(true, Ordering::Release);
                }
            }
            Body::Work(work) => {
                let id = work.id;
                self.unread_answers.fetch_add(1, Ordering::AcqRel);
                if let Err(refusal) = self.admit(work) {
                    let outcome = outcome_label(refusal.code());
                    self.service.metrics.answers.with_label_values(&[outcome]).inc();
                    let reply = ForwardReply { id, outcome: Some(Outcome::Failure(refusal)) };
                    let _stream_gone = self.answers.send(Ok((reply, None)));
                }
            }
        }
    }

    /// Checks and admits `work`. Returns the refusal otherwise.
    fn admit(&mut self, mut work: Work) -> Result<(), Failure> {
        let service = &self.service;
        service.spans.drop_invalid_contexts(&mut work);
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
        let admitted = AdmittedRequest {
            work,
            arrived: Instant::now(),
            cancelled,
            unread_answers: self.unread_answers.clone(),
            permit,
            answers: self.answers.clone(),
        };
        service
            .admitted_requests
            .send(admitted)
            .map_err(|_| refusal(Code::Internal, true, "the computation has stopped".to_owned()))
    }
}

/// Checks that `work` is consistent and that its experts are hosted, for rows of `row_bytes`.
///
/// # Errors
/// The refusal for the caller.
#[doc(hidden)]
pub fn check_work(
    work: &Work,
    row_bytes: usize,
    is_hosted: impl Fn(u32, u32) -> bool,
) -> Result<(), Failure> {
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
    match work.experts.iter().find(|&&expert| !is_hosted(work.layer, expert)) {
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
