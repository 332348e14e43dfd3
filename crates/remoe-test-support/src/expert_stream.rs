//! Client of a remote-expert function.

use crate::deadline::{SOON, within};
use remoe_proto::MAX_MESSAGE;
use remoe_proto::identity::{Connector, Trust};
use remoe_proto::v1::expert_function_client::ExpertFunctionClient;
use remoe_proto::v1::forward_reply::Outcome;
use remoe_proto::v1::forward_request::Body;
use remoe_proto::v1::{
    Cancel, Code, DescribeRequest, ForwardReply, ForwardRequest, FunctionDescription, Work,
};
use std::net::SocketAddr;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

/// Returns a client of the remote function at `address` that connects on first use.
#[must_use]
pub fn client(address: SocketAddr) -> ExpertFunctionClient<Channel> {
    client_within(address, None)
}

/// Returns a client as [`client()`] does, with TLS if there is a `trust`.
#[must_use]
pub fn client_within(address: SocketAddr, trust: Option<Trust>) -> ExpertFunctionClient<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address makes a URI");
    ExpertFunctionClient::new(endpoint.connect_with_connector_lazy(Connector::new(trust)))
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE)
}

/// Returns the description of the function at `address`.
pub async fn describe(address: SocketAddr) -> FunctionDescription {
    let answer = within(SOON, "Describe", client(address).describe(DescribeRequest {})).await;
    answer.expect("Describe is answered").into_inner()
}

/// `Forward` stream.
pub struct ExpertStream {
    requests: mpsc::UnboundedSender<ForwardRequest>,
    replies: Streaming<ForwardReply>,
}

impl ExpertStream {
    /// Opens a stream to the function at `address`.
    pub async fn open(address: SocketAddr) -> Self {
        let (requests, outbound) = mpsc::unbounded_channel();
        let stream = UnboundedReceiverStream::new(outbound);
        let replies = within(SOON, "Forward", client(address).forward(stream)).await;
        Self { requests, replies: replies.expect("the stream opens").into_inner() }
    }

    /// Sends `work`.
    pub fn send(&self, work: Work) {
        self.requests.send(ForwardRequest { body: Some(Body::Work(work)) }).expect("the stream is open");
    }

    /// Cancels the request `id`.
    pub fn cancel(&self, id: u64) {
        let body = Some(Body::Cancel(Cancel { id }));
        self.requests.send(ForwardRequest { body }).expect("the stream is open");
    }

    /// Reads the next answer. Returns `None` once the function has closed the stream.
    pub async fn reply(&mut self) -> Option<(u64, Outcome)> {
        let reply = within(SOON, "an answer of a remote function", self.replies.message()).await;
        let reply = reply.expect("the stream does not break")?;
        Some((reply.id, reply.outcome.expect("an answer has an outcome")))
    }

    /// Sends `work` and returns the payload of its answer, or the code of the failure.
    pub async fn ask(&mut self, work: Work) -> Result<Vec<u8>, Code> {
        let id = work.id;
        self.send(work);
        let (answered, outcome) = self.reply().await.expect("the stream stays open");
        assert_eq!(answered, id, "the id of the answer");
        match outcome {
            Outcome::Rows(rows) => Ok(rows.rows.to_vec()),
            Outcome::Failure(failure) => Err(failure.code()),
        }
    }
}
