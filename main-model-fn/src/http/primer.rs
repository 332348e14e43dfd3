//! `/v1/primer`: model summary from which gateways predict expert usage. Disabled without `--primer`.

use super::state::HttpState;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use remoe_http::ApiError;
use remoe_model::Checkpoint;
use remoe_predictor::record::RecordHeader;
use remoe_proto::{ErrorCode, ServiceError};
use remoe_usage::write_model_summary;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;

/// Longest time until a client reads a part; a slower client is disconnected.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Source of the model summary.
#[derive(Debug, Clone)]
pub(crate) struct SummarySource {
    checkpoint: Arc<Checkpoint>,
    header: RecordHeader,
    /// Permit of the only download at a time, because the summary is read from disk.
    permit: Arc<Semaphore>,
}

impl SummarySource {
    /// Creates the source for `checkpoint`. `header` describes the activations of its requests.
    pub(crate) fn new(checkpoint: Arc<Checkpoint>, header: RecordHeader) -> Self {
        Self { checkpoint, header, permit: Arc::new(Semaphore::new(1)) }
    }
}

/// Sends the summary in parts, as they are read.
pub(super) async fn handle(State(state): State<Arc<HttpState>>) -> Result<Response, ApiError> {
    let source = state.options.primer.clone().ok_or_else(|| {
        ServiceError::new(ErrorCode::NotFound, "/v1/primer is disabled; start the function with --primer")
    })?;
    let permit = source.permit.clone().try_acquire_owned().map_err(|_| {
        ServiceError::new(ErrorCode::Unavailable, "/v1/primer is serving another client; retry later")
    })?;
    let (parts, received_parts) = mpsc::channel::<io::Result<Bytes>>(2);
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let _held_until_sent = permit;
        let send =
            |part| runtime.block_on(timeout(STALL_TIMEOUT, parts.send(part))).is_ok_and(|sent| sent.is_ok());
        let written = write_model_summary(&source.checkpoint, &source.header, |part| send(Ok(part.into())));
        if let Err(error) = written {
            tracing::warn!(%error, "/v1/primer failed");
            // An error tells the client that the parts so far are not the whole summary.
            send(Err(io::Error::other(error)));
        }
    });
    let body = Body::from_stream(ReceiverStream::new(received_parts));
    Ok(([(CONTENT_TYPE, "application/octet-stream")], body).into_response())
}
