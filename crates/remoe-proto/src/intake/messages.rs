//! Message stream of a request, which the service reads itself.

use super::RequestReader;
use super::body::{MessageReader, PREFIX_BYTES};
use bytes::{Buf, Bytes};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio_stream::Stream;
use tonic::Status;

/// Message stream of a streaming request. Tonic's own stream keeps the memory of its last message until the next one.
/// This stream keeps nothing between messages.
pub struct MessageStream<T> {
    reader: MessageReader,
    message_type: PhantomData<fn() -> T>,
}

impl<T> MessageStream<T> {
    /// Takes the messages of `request`, whose own stream is empty from then on.
    ///
    /// # Errors
    /// Internal error: the request did not pass an [`Intake`](super::Intake), or was taken already.
    pub fn take_from<R>(request: &mut tonic::Request<R>) -> Result<Self, Status> {
        let inbound = request.extensions_mut().remove::<Arc<RequestReader>>();
        let reader = inbound.and_then(|inbound| inbound.reader().take());
        let reader = reader.ok_or_else(|| Status::internal("request without reader"))?;
        Ok(Self { reader, message_type: PhantomData })
    }
}

impl<T: prost::Message + Default> Stream for MessageStream<T> {
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
    // Decoded fields refer to the bytes of the message. Copies a small message, because its fields would keep the
    // larger buffer of the connection.
    message.advance(PREFIX_BYTES);
    if !message.is_unique() {
        message = Bytes::copy_from_slice(&message);
    }
    T::decode(message).map_err(|error| Status::internal(error.to_string()))
}
