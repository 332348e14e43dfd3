//! Requests to be admitted to a model's queue, waiting requests, and the errors of refused ones.

use crate::prefix_index::PromptPrefix;
use remoe_proto::{ErrorCode, ServiceError};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Request in the queue. Its reply is a grant `G` or an error.
pub(super) struct WaitingRequest<G> {
    pub(super) arrived: Instant,
    /// Set if no main function served when the request arrived.
    pub(super) is_cold: bool,
    pub(super) prefix: PromptPrefix,
    pub(super) reply: oneshot::Sender<Result<G, ServiceError>>,
}

/// Request to be admitted to the queue.
#[derive(Debug, Clone)]
pub(crate) struct AdmissionRequest {
    /// Client among whose requests it counts in the fair queue.
    pub(crate) client: Arc<str>,
    /// Size of the body in bytes.
    pub(crate) bytes: usize,
    pub(crate) arrived: Instant,
    /// Time at which the client stops waiting, if the client stated it.
    pub(crate) client_deadline: Option<Instant>,
    /// Time at which the request leaves the queue, if it is limited.
    pub(crate) queue_deadline: Option<Instant>,
    /// Set if the request was admitted before, and its main function failed.
    pub(crate) is_retry: bool,
    /// Beginning of the body, which main functions may have in their prefix caches.
    pub(crate) prefix: PromptPrefix,
}

impl AdmissionRequest {
    /// Returns the earlier of the client's deadline and the queue deadline.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.client_deadline.into_iter().chain(self.queue_deadline).min()
    }

    /// Returns whether [`Self::deadline`] is the queue deadline.
    pub(super) fn is_queue_deadline_first(&self) -> bool {
        self.queue_deadline.is_some() && self.deadline() == self.queue_deadline
    }
}

/// Returns the error code of a request that got no slot before its deadline.
pub(super) fn deadline_error_code(is_queue_deadline: bool) -> ErrorCode {
    if is_queue_deadline { ErrorCode::QueueDeadlineExceeded } else { ErrorCode::Unavailable }
}

/// Refusal to admit a request.
#[derive(Debug)]
pub(crate) struct AdmissionRefusal {
    pub(crate) error: ServiceError,
    pub(crate) retry_after: Duration,
}

/// Returns the error of requests to a model that admits no more.
pub(super) fn shutting_down_error() -> ServiceError {
    ServiceError::new(ErrorCode::Unavailable, "the server is shutting down; retry later")
}

/// Returns the error of requests that are shed because the queue is full.
pub(super) fn queue_full_error() -> ServiceError {
    ServiceError::new(ErrorCode::ResourceExhausted, "queue full: too many requests run or wait; retry later")
}
