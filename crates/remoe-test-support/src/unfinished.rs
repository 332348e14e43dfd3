//! Incomplete requests, which announce a message and never send all of it.

use crate::deadline::{SOON, within};
use bytes::{BufMut, Bytes, BytesMut};
use std::future::poll_fn;
use std::net::SocketAddr;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::Status;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tower_service::Service;

/// Path of `Forward` of a remote function.
pub const FORWARD: &str = "/remoe.v1.ExpertFunction/Forward";
/// Path of `SetRouting` of a main function.
pub const SET_ROUTING: &str = "/remoe.v1.MainModel/SetRouting";

/// Connection with requests that stay open until it is dropped.
pub struct UnfinishedRequests {
    channel: Channel,
    requests: JoinSet<()>,
    bodies: Vec<mpsc::UnboundedSender<Bytes>>,
}

impl UnfinishedRequests {
    /// Connects to `address`.
    pub async fn open(address: SocketAddr) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address makes a URI");
        let channel = within(SOON, "a connection", endpoint.connect()).await.expect("the function listens");
        Self { channel, requests: JoinSet::new(), bodies: Vec::new() }
    }

    /// Starts a request of `path` with `bytes`, which neither continues nor ends.
    pub fn begin(&mut self, path: &str, bytes: Bytes) {
        let (sender, received) = mpsc::unbounded_channel();
        sender.send(bytes).expect("the channel is open");
        self.bodies.push(sender);
        let request =
            http::Request::post(path).header("te", "trailers").header("content-type", "application/grpc");
        let request = request.body(Body::new(Endless(received))).expect("the request is one");
        let mut channel = self.channel.clone();
        self.requests.spawn(async move {
            // Keeps the answer or the refusal until the end.
            let Ok(()) = poll_fn(|context| channel.poll_ready(context)).await else { return };
            let _answer = channel.call(request).await;
            std::future::pending::<()>().await;
        });
    }
}

/// Returns the prefix of a message of `announced` bytes and its first `sent` bytes, all zero.
#[must_use]
pub fn beginning(announced: u32, sent: usize) -> Bytes {
    let mut bytes = BytesMut::with_capacity(5 + sent);
    bytes.put_u8(0);
    bytes.put_u32(announced);
    bytes.put_bytes(0, sent);
    bytes.freeze()
}

/// Body with the bytes of a channel, which is never closed.
struct Endless(mpsc::UnboundedReceiver<Bytes>);

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, Status>>> {
        self.0.poll_recv(context).map(|bytes| bytes.map(|bytes| Ok(http_body::Frame::data(bytes))))
    }
}
