//! The messages of a request, read by the service itself.

use super::Inbound;
use super::body::{MessageReader, PREFIX};
use bytes::{Buf, Bytes};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio_stream::Stream;
use tonic::Status;

/// The messages of a streaming request. tonic's own stream keeps the memory of its last message, however
/// large, until the next one comes; this one keeps nothing between messages.
pub struct Messages<T> {
    reader: MessageReader,
    kind: PhantomData<fn() -> T>,
}

impl<T> Messages<T> {
    /// Takes over the reading of `request`, whose own stream is empty from then on.
    ///
    /// # Errors
    /// The request did not pass an [`Intake`](super::Intake), or is read already: a fault of the server.
    pub fn of<R>(request: &mut tonic::Request<R>) -> Result<Self, Status> {
        let inbound = request.extensions_mut().remove::<Arc<Inbound>>();
        let reader = inbound.and_then(|inbound| inbound.reader().take());
        let reader = reader.ok_or_else(|| Status::internal("request without reader"))?;
        Ok(Self { reader, kind: PhantomData })
    }
}

impl<T: prost::Message + Default> Stream for Messages<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let message = ready!(self.reader.poll_message(context));
        Poll::Ready(message.map(|message| message.and_then(decode)))
    }
}

fn decode<T: prost::Message + Default>(mut message: Bytes) -> Result<T, Status> {
    if message.first() != Some(&0) {
        return Err(Status::unimplemented("compressed messages are not supported"));
    }
    // Fields refer to the message's bytes. Those of a small one lie in a larger buffer of the connection,
    // which they would keep.
    message.advance(PREFIX);
    if !message.is_unique() {
        message = Bytes::copy_from_slice(&message);
    }
    T::decode(message).map_err(|error| Status::internal(error.to_string()))
}
