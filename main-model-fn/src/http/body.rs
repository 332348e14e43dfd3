//! Reads and parses request bodies.

use super::state::HttpState;
use axum::extract::Request;
use remoe_http::{ApiError, parse_json, receive_body};
use remoe_proto::{ErrorCode, ServiceError};
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// Parses the body of `request` as a `T`, and checks it with `then` on a blocking thread.
pub(super) async fn read<T, U>(
    state: &Arc<HttpState>,
    request: Request,
    then: impl FnOnce(&HttpState, T) -> Result<U, ServiceError> + Send + 'static,
) -> Result<U, ApiError>
where
    T: DeserializeOwned,
    U: Send + 'static,
{
    let options = &state.options;
    let bytes = receive_body(request, options.body_limit, options.body_timeout).await?;
    let stopped = || ServiceError::new(ErrorCode::Internal, "cannot read the request body: the task crashed");
    let pass = state.preparing.acquire(bytes.len()).await?;
    let state = state.clone();
    let work = tokio::task::spawn_blocking(move || {
        let _until_done = pass;
        then(&state, parse_json(&bytes)?)
    });
    Ok(work.await.map_err(|_| stopped())??)
}
