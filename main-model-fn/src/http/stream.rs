//! Answers as server-sent events.

use super::answer_shape::AnswerShape;
use super::pieces::Pieces;
use super::running::RunningGeneration;
use super::state::HttpState;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use remoe_proto::ServiceError;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tracing::Instrument;

/// Chunks that wait for a client. More wait in the engine's channel, which the request's size bounds.
const CHUNK_QUEUE: usize = 32;

/// Interval of comments while no event is sent.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

type Chunks = mpsc::Sender<Result<Event, axum::Error>>;

/// Reason why a stream was aborted.
enum StreamAbort {
    /// The client is gone, or was disconnected.
    Client,
    /// The engine failed.
    Engine(ServiceError),
}

impl From<ServiceError> for StreamAbort {
    fn from(error: ServiceError) -> Self {
        Self::Engine(error)
    }
}

/// Starts the stream. A separate task fills it, so that a client that disconnects is noticed at once.
pub(super) fn respond(
    state: Arc<HttpState>,
    mut shape: Box<dyn AnswerShape>,
    pieces: Pieces,
    running: RunningGeneration,
) -> Response {
    let (chunks, stream) = mpsc::channel(CHUNK_QUEUE);
    let (trailer_sender, received_trailers) = oneshot::channel();
    let is_from_gateway = running.timeline().is_from_gateway();
    let filling = async move {
        tokio::select! {
            // Dropping the task cancels the requests in the engine.
            () = chunks.closed() => (),
            trailers = fill(&state, shape.as_mut(), pieces, running, &chunks) => {
                // A client that is gone reads no trailers.
                let _gone = trailers.map(|trailers| trailer_sender.send(trailers));
            }
        }
    };
    tokio::spawn(filling.in_current_span());
    let events = Sse::new(ReceiverStream::new(stream))
        .keep_alive(KeepAlive::new().interval(KEEP_ALIVE_INTERVAL).text("keep-alive"));
    let unbuffered = (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    let response = ([unbuffered], events).into_response();
    if !is_from_gateway {
        return response;
    }
    let trailers = async { Some(Ok(received_trailers.await.ok()?)) };
    let mut response = response.map(|body| Body::new(body.with_trailers(trailers)));
    response.headers_mut().insert(
        header::TRAILER,
        HeaderValue::from_static("server-timing, x-remoe-tokens, x-remoe-told, x-remoe-activations"),
    );
    response
}

/// Sends all events. Returns the trailers for a gateway, if the stream was complete.
async fn fill(
    state: &HttpState,
    shape: &mut dyn AnswerShape,
    pieces: Pieces,
    running: RunningGeneration,
    chunks: &Chunks,
) -> Option<HeaderMap> {
    let span = running.span.clone();
    match deliver(state, shape, pieces, running, chunks).await {
        Ok(trailers) => return Some(trailers),
        Err(StreamAbort::Client) => tracing::debug!("client disconnected"),
        Err(StreamAbort::Engine(error)) => {
            tracing::warn!(%error, "stream failed");
            span.fail(error.code.http_status().to_string(), "stream failed after status 200");
            if let Ok(event) = shape.failed(state, error) {
                // If the client is gone as well, nothing can be done.
                let _client_gone = chunks.send(Ok(event)).await;
            }
        }
    }
    None
}

/// Sends the events of a successful stream.
async fn deliver(
    state: &HttpState,
    shape: &mut dyn AnswerShape,
    mut pieces: Pieces,
    mut running: RunningGeneration,
    chunks: &Chunks,
) -> Result<HeaderMap, StreamAbort> {
    send(chunks, shape.begin(state)?).await?;
    for piece in pieces.opening() {
        send(chunks, shape.piece(state, piece)?).await?;
    }
    while let Some((prompt, event)) = running.next().await? {
        for piece in pieces.convert_event(state, prompt, event)? {
            let is_client_slow = chunks.capacity() == 0;
            send(chunks, shape.piece(state, piece)?).await?;
            if is_client_slow {
                running.stopwatch.forget_pace();
            }
        }
    }
    running.reasoning_tokens = pieces.reasoning_tokens();
    send(chunks, shape.end(state, &running)?).await?;
    Ok(running.gateway_headers())
}

/// Sends events, waiting for a slow client (backpressure) until its connection is dropped.
async fn send(chunks: &Chunks, events: Vec<Event>) -> Result<(), StreamAbort> {
    for event in events {
        chunks.send(Ok(event)).await.map_err(|_| StreamAbort::Client)?;
    }
    Ok(())
}
