//! `/v1/primer`: what gateways predict from, told where `--primer` says so.

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

/// Longest time until a client takes a part of it; a slower one gets no more.
const STALL: Duration = Duration::from_secs(10);

/// Where the primer comes from.
#[derive(Debug, Clone)]
pub(crate) struct SummarySource {
    checkpoint: Arc<Checkpoint>,
    header: RecordHeader,
    /// One at a time: it is read from disk.
    turn: Arc<Semaphore>,
}

impl SummarySource {
    /// Creates the source of `checkpoint`, whose requests' activations are those of `header`.
    pub(crate) fn new(checkpoint: Arc<Checkpoint>, header: RecordHeader) -> Self {
        Self { checkpoint, header, turn: Arc::new(Semaphore::new(1)) }
    }
}

/// The primer, in parts as they are read.
pub(super) async fn handle(State(state): State<Arc<HttpState>>) -> Result<Response, ApiError> {
    let source = state.options.primer.clone().ok_or_else(|| {
        ServiceError::new(ErrorCode::NotFound, "/v1/primer is disabled; start the function with --primer")
    })?;
    let turn = source.turn.clone().try_acquire_owned().map_err(|_| {
        ServiceError::new(ErrorCode::Unavailable, "/v1/primer is serving another client; retry later")
    })?;
    let (parts, told) = mpsc::channel::<io::Result<Bytes>>(2);
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let _until_told = turn;
        let tell = |part| runtime.block_on(timeout(STALL, parts.send(part))).is_ok_and(|told| told.is_ok());
        let written = write_model_summary(&source.checkpoint, &source.header, |part| tell(Ok(part.into())));
        if let Err(error) = written {
            tracing::warn!(%error, "/v1/primer failed");
            // What was sent so far must not look like all of it.
            tell(Err(io::Error::other(error)));
        }
    });
    let body = Body::from_stream(ReceiverStream::new(told));
    Ok(([(CONTENT_TYPE, "application/octet-stream")], body).into_response())
}
