//! A remote function that passes everything on to a real one, records what arrives, and
//! misbehaves where it is told to.

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

/// A message that arrived.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// When.
    pub at: SystemTime,
    /// The message.
    pub work: Work,
}

/// Reaction to a message.
#[derive(Debug, Clone)]
pub enum MessageFault {
    /// The real function's answer.
    Pass,
    /// The real function's answer, later.
    Delay(Duration),
    /// The real function's answer, without its last byte.
    Shorten,
    /// As many rows as the real function's answer has, which are no numbers.
    Spoil,
    /// The real function's answer, twice, after an answer to an id that was never sent.
    Repeat,
    /// A failure.
    Fail(Code),
    /// An answer without content.
    Empty,
    /// The stream is closed.
    Close,
}

/// Chooses by the number of messages that arrived before, and the message.
pub type Behaviour = Arc<dyn Fn(usize, &Work) -> MessageFault + Send + Sync>;

/// Changes what the real function says about itself.
pub type Disguise = Arc<dyn Fn(&mut FunctionDescription) + Send + Sync>;

/// The running server.
pub struct Recorder {
    address: SocketAddr,
    arrivals: Arc<Mutex<Vec<Arrival>>>,
    server: tokio::task::JoinHandle<()>,
}

impl Recorder {
    /// Stands before the real function at `backend`.
    pub async fn start(backend: SocketAddr, behaviour: Behaviour, disguise: Disguise) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("there is a free port");
        let address = listener.local_addr().expect("the listener has an address");
        let arrivals = Arc::<Mutex<Vec<Arrival>>>::default();
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

    /// One that only records.
    pub async fn honest(backend: SocketAddr) -> Self {
        Self::start(backend, Arc::new(|_, _| MessageFault::Pass), Arc::new(|_| ())).await
    }

    /// One that does `act` about the first message, and passes the others on.
    pub async fn once(backend: SocketAddr, act: MessageFault) -> Self {
        let behaviour = move |index, _: &Work| if index == 0 { act.clone() } else { MessageFault::Pass };
        Self::start(backend, Arc::new(behaviour), Arc::new(|_| ())).await
    }

    /// Where it speaks gRPC.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the messages that have arrived since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<Arrival> {
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
    arrivals: Arc<Mutex<Vec<Arrival>>>,
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
        let mut acts = HashMap::new();
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
                            act => {
                                acts.insert(id, act);
                                let _backend_gone = to_backend.send(request);
                            }
                        }
                    }
                }
                answer = answers.message() => {
                    let Ok(Some(answer)) = answer else { return };
                    answer_as(acts.remove(&answer.id).unwrap_or(MessageFault::Pass), answer, &replies);
                }
            }
        }
    }

    fn record(&self, work: &Work) -> MessageFault {
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let act = (self.behaviour)(arrivals.len(), work);
        arrivals.push(Arrival { at: SystemTime::now(), work: work.clone() });
        act
    }
}

fn answer_as(act: MessageFault, answer: ForwardReply, replies: &Replies) {
    let (id, outcome) = (answer.id, answer.outcome);
    match act {
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
        // All ones: NaN in every dtype.
        MessageFault::Spoil => send(replies, id, with_rows(outcome, |rows| vec![0xff; rows.len()].into())),
        MessageFault::Repeat => {
            send(replies, u64::MAX, outcome.clone());
            send(replies, id, outcome.clone());
            send(replies, id, outcome);
        }
        _ => send(replies, id, outcome),
    }
}

/// The outcome with other rows, if it has some.
fn with_rows(outcome: Option<Outcome>, change: impl Fn(Bytes) -> Bytes) -> Option<Outcome> {
    outcome.map(|outcome| match outcome {
        Outcome::Rows(rows) => Outcome::Rows(Rows { rows: change(rows.rows), ..rows }),
        failure @ Outcome::Failure(_) => failure,
    })
}

fn send(replies: &Replies, id: u64, outcome: Option<Outcome>) {
    let _stream_gone = replies.send(Ok(ForwardReply { id, outcome }));
}

/// As a remote function says it.
fn failure(code: Code) -> Outcome {
    let retryable = !matches!(code, Code::InvalidArgument | Code::NotFound);
    Outcome::Failure(Failure { code: code.into(), message: "as the test wants it".to_owned(), retryable })
}
