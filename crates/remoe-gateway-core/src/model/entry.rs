//! Requests that ask a model to be admitted, and wait in its queue.

use crate::prefix_index::PromptPrefix;
use remoe_proto::{ErrorCode, ServiceError};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Request in the queue, which gets a grant `G` or an error.
pub(super) struct Waiting<G> {
    pub(super) arrived: Instant,
    pub(super) cold: bool,
    pub(super) beginning: PromptPrefix,
    pub(super) answer: oneshot::Sender<Result<G, ServiceError>>,
}

/// Request that asks to be admitted.
#[derive(Debug, Clone)]
pub(crate) struct AdmissionRequest {
    /// Client whose turn it takes.
    pub(crate) client: Arc<str>,
    /// Bytes that it keeps in memory.
    pub(crate) bytes: usize,
    pub(crate) arrived: Instant,
    /// Time until which its client waits, if the client said so.
    pub(crate) until: Option<Instant>,
    /// Time of its queue deadline, if it has one.
    pub(crate) queue_until: Option<Instant>,
    /// It was admitted before, and its main function failed.
    pub(crate) again: bool,
    /// Beginning of its body, which main functions may have in their prefix caches.
    pub(crate) beginning: PromptPrefix,
}

impl AdmissionRequest {
    /// Returns the time at which it no longer waits for its turn.
    pub(super) fn last(&self) -> Option<Instant> {
        self.until.into_iter().chain(self.queue_until).min()
    }

    /// Returns whether [`Self::last`] is its queue deadline.
    pub(super) fn is_queue_deadline_first(&self) -> bool {
        self.queue_until.is_some() && self.last() == self.queue_until
    }
}

/// Returns the error code of a request that got no turn in time.
pub(super) fn late(by_queue_deadline: bool) -> ErrorCode {
    if by_queue_deadline { ErrorCode::QueueDeadlineExceeded } else { ErrorCode::Unavailable }
}

/// Refusal of a request.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) error: ServiceError,
    pub(crate) retry_after: Duration,
}

/// Returns the error of requests to a model that takes no more.
pub(super) fn closed() -> ServiceError {
    ServiceError::new(ErrorCode::Unavailable, "the server is shutting down; retry later")
}

/// Returns the error of requests that find the queue full.
pub(super) fn full() -> ServiceError {
    ServiceError::new(ErrorCode::ResourceExhausted, "queue full: too many requests run or wait; retry later")
}
