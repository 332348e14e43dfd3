//! Proxy of a remote function that records messages and injects faults.

use crate::expert_stream::client;
use bytes::Bytes;
use remoe_proto::MAX_MESSAGE;
use remoe_proto::v1::expert_function_server::{ExpertFunction, ExpertFunctionServer};
use remoe_proto::v1::forward_reply::Outcome;
use remoe_proto::v1::forward_request::Body;
use remoe_proto::v1::{
    Code, DescribeRequest, Failure, ForwardReply, ForwardRequest, FunctionDescription, Rows, Work,
};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming};

/// Recorded message.
#[derive(Debug, Clone)]
pub struct RecordedMessage {
    /// Time of arrival.
    pub arrived_at: SystemTime,
    /// Message.
    pub work: Work,
}

/// Fault injected for a message.
#[derive(Debug, Clone)]
pub enum MessageFault {
    /// No fault: the answer of the real function.
    Pass,
    /// The answer of the real function, delayed.
    Delay(Duration),
    /// The answer without its last byte.
    Shorten,
    /// The rows of the answer replaced by NaN.
    Spoil,
    /// The answer twice, after an answer to an unknown id.
    Repeat,
    /// A failure with this code.
    Fail(Code),
    /// An answer without an outcome.
    Empty,
    /// The stream is closed.
    Close,
}

/// Chooses the fault by the number of earlier messages and the message.
pub type Behaviour = Arc<dyn Fn(usize, &Work) -> MessageFault + Send + Sync>;

/// Changes the description of the real function.
pub type Disguise = Arc<dyn Fn(&mut FunctionDescription) + Send + Sync>;

/// Running proxy.
pub struct Recorder {
    address: SocketAddr,
    arrivals: Arc<Mutex<Vec<RecordedMessage>>>,
    server: tokio::task::JoinHandle<()>,
}

impl Recorder {
    /// Starts a proxy of the real function at `backend`.
    pub async fn start(backend: SocketAddr, behaviour: Behaviour, disguise: Disguise) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("there is a free port");
        let address = listener.local_addr().expect("the listener has an address");
        let arrivals = Arc::<Mutex<Vec<RecordedMessage>>>::default();
        let proxy = Proxy { backend, behaviour, disguise, arrivals: arrivals.clone() };
        let service = ExpertFunctionServer::new(proxy)
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        let server = tonic::transport::Server::builder()
            .tcp_nodelay(true)
            .add_service(service)
            .serve_with_incoming(TcpListenerStream::new(listener));
        let server = tokio::spawn(async move { server.await.expect("the recorder serves") });
        Self { address, arrivals, server }
    }

    /// Starts a proxy that only records.
    pub async fn honest(backend: SocketAddr) -> Self {
        Self::start(backend, Arc::new(|_, _| MessageFault::Pass), Arc::new(|_| ())).await
    }

    /// Starts a proxy that injects `fault` for the first message only.
    pub async fn once(backend: SocketAddr, fault: MessageFault) -> Self {
        let behaviour = move |index, _: &Work| if index == 0 { fault.clone() } else { MessageFault::Pass };
        Self::start(backend, Arc::new(behaviour), Arc::new(|_| ())).await
    }

    /// Returns its gRPC address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the messages since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<RecordedMessage> {
        std::mem::take(&mut *self.arrivals.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.server.abort();
    }
}

#[derive(Clone)]
struct Proxy {
    backend: SocketAddr,
    behaviour: Behaviour,
    disguise: Disguise,
    arrivals: Arc<Mutex<Vec<RecordedMessage>>>,
}

type Replies = mpsc::UnboundedSender<Result<ForwardReply, Status>>;

#[tonic::async_trait]
impl ExpertFunction for Proxy {
    type ForwardStream = UnboundedReceiverStream<Result<ForwardReply, Status>>;

    async fn forward(
        &self,
        request: Request<Streaming<ForwardRequest>>,
    ) -> Result<Response<Self::ForwardStream>, Status> {
        let (to_backend, outbound) = mpsc::unbounded_channel();
        let answers = client(self.backend).forward(UnboundedReceiverStream::new(outbound)).await?;
        let (replies, stream) = mpsc::unbounded_channel();
        tokio::spawn(self.clone().relay(request.into_inner(), to_backend, answers.into_inner(), replies));
        Ok(Response::new(UnboundedReceiverStream::new(stream)))
    }

    async fn describe(
        &self,
        request: Request<DescribeRequest>,
    ) -> Result<Response<FunctionDescription>, Status> {
        let mut description = client(self.backend).describe(request).await?.into_inner();
        (self.disguise)(&mut description);
        Ok(Response::new(description))
    }
}

impl Proxy {
    async fn relay(
        self,
        mut requests: Streaming<ForwardRequest>,
        to_backend: mpsc::UnboundedSender<ForwardRequest>,
        mut answers: Streaming<ForwardReply>,
        replies: Replies,
    ) {
        let mut faults = HashMap::new();
        loop {
            tokio::select! {
                request = requests.message() => {
                    let Ok(Some(request)) = request else { return };
                    if let Some(Body::Work(work)) = &request.body {
                        let id = work.id;
                        match self.record(work) {
                            MessageFault::Close => return,
                            MessageFault::Fail(code) => send(&replies, id, Some(failure(code))),
                            MessageFault::Empty => send(&replies, id, None),
                            fault => {
                                faults.insert(id, fault);
                                let _backend_gone = to_backend.send(request);
                            }
                        }
                    }
                }
                answer = answers.message() => {
                    let Ok(Some(answer)) = answer else { return };
                    answer_with_fault(faults.remove(&answer.id).unwrap_or(MessageFault::Pass), answer, &replies);
                }
            }
        }
    }

    fn record(&self, work: &Work) -> MessageFault {
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let fault = (self.behaviour)(arrivals.len(), work);
        arrivals.push(RecordedMessage { arrived_at: SystemTime::now(), work: work.clone() });
        fault
    }
}

fn answer_with_fault(fault: MessageFault, answer: ForwardReply, replies: &Replies) {
    let (id, outcome) = (answer.id, answer.outcome);
    match fault {
        MessageFault::Delay(time) => {
            let replies = replies.clone();
            tokio::spawn(async move {
                tokio::time::sleep(time).await;
                send(&replies, id, outcome);
            });
        }
        MessageFault::Shorten => {
            let shortened = |mut rows: Bytes| {
                rows.truncate(rows.len() - 1);
                rows
            };
            send(replies, id, with_rows(outcome, shortened));
        }
        // All ones, which are NaN in every dtype.
        MessageFault::Spoil => send(replies, id, with_rows(outcome, |rows| vec![0xff; rows.len()].into())),
        MessageFault::Repeat => {
            send(replies, u64::MAX, outcome.clone());
            send(replies, id, outcome.clone());
            send(replies, id, outcome);
        }
        _ => send(replies, id, outcome),
    }
}

/// Changes the rows of an outcome, if it has rows.
fn with_rows(outcome: Option<Outcome>, change: impl Fn(Bytes) -> Bytes) -> Option<Outcome> {
    outcome.map(|outcome| match outcome {
        Outcome::Rows(rows) => Outcome::Rows(Rows { rows: change(rows.rows), ..rows }),
        failure @ Outcome::Failure(_) => failure,
    })
}

fn send(replies: &Replies, id: u64, outcome: Option<Outcome>) {
    let _stream_gone = replies.send(Ok(ForwardReply { id, outcome }));
}

/// Returns a failure as a remote function reports it.
fn failure(code: Code) -> Outcome {
    let retryable = !matches!(code, Code::InvalidArgument | Code::NotFound);
    Outcome::Failure(Failure { code: code.into(), message: "as the test wants it".to_owned(), retryable })
}
