//! Interface of the engine for its callers: submits requests to a bounded queue and returns a stream of events. If the
//! queue is full, requests are refused (load shedding).

use super::request::{Event, Request};
use crate::backend::PAGE_POSITIONS;
use crate::pages::PageNeeds;
use remoe_proto::{ErrorCode, ServiceError};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// Limits that a request is checked against before it enters the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestLimits {
    /// Number of token ids; valid ids are below it.
    pub vocab_size: usize,
    /// Most tokens of prompt and output together.
    pub context_length: usize,
    /// Number of pages in the KV cache.
    pub cache_pages: usize,
    /// Pages that a sequence needs, by its length.
    pub page_needs: PageNeeds,
    /// Most rows of a layered prefill.
    pub prefill_rows: usize,
    /// Most choices of one request.
    pub max_choices: usize,
    /// Most requests that run or wait; load shedding refuses further ones.
    pub max_requests: usize,
    /// Queue deadline of requests that state none; `None`: no limit.
    pub queue_deadline: Option<Duration>,
}

impl RequestLimits {
    /// Returns the positions that each of `choices` sequences can have in the KV cache.
    pub(crate) fn cached_positions(&self, choices: usize) -> usize {
        self.page_needs.positions(self.cache_pages / choices.max(1), self.prefill_rows)
    }
}

/// A request in the engine's queue.
pub(crate) struct QueuedRequest {
    pub(crate) request: Request,
    pub(crate) events: mpsc::Sender<Event>,
    pub(crate) submitted: Instant,
    /// Permit of the bounded queue, held until the request has left the engine.
    pub(crate) _permit: OwnedSemaphorePermit,
}

impl QueuedRequest {
    /// Reports if the queue deadline has passed.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        let limit = self.request.queue_deadline;
        limit.is_some_and(|limit| now.saturating_duration_since(self.submitted) >= limit)
    }

    /// Returns the error for a client whose request missed its queue deadline.
    pub(crate) fn deadline_error(&self) -> ServiceError {
        let message = "queue deadline exceeded: other requests are computed first; retry later";
        ServiceError::new(ErrorCode::QueueDeadlineExceeded, message)
    }
}

/// Handle to submit requests. Clones share the queue.
#[derive(Clone)]
pub struct EngineHandle {
    queue: mpsc::UnboundedSender<QueuedRequest>,
    permits: Arc<Semaphore>,
    limits: RequestLimits,
}

/// Events of one request. Dropping the receiver cancels the request at the next iteration.
pub type Events = mpsc::Receiver<Event>;

impl EngineHandle {
    pub(crate) fn new(limits: RequestLimits) -> (Self, mpsc::UnboundedReceiver<QueuedRequest>) {
        // Unbounded in type only: every request holds one of `max_requests` permits.
        let (queue, receiver) = mpsc::unbounded_channel();
        let permits = Arc::new(Semaphore::new(limits.max_requests));
        (Self { queue, permits, limits }, receiver)
    }

    /// Returns the limits of requests.
    pub fn limits(&self) -> RequestLimits {
        self.limits
    }

    /// Submits `request` to the engine.
    ///
    /// # Errors
    /// Fails with `InvalidArgument` or `ContextLengthExceeded` if the request can never run, with `ResourceExhausted` if
    /// the queue is full, with `Unavailable` if the engine has stopped.
    pub fn submit(&self, request: Request) -> Result<Events, ServiceError> {
        self.check(&request)?;
        let permit = self.permits.clone().try_acquire_owned().map_err(|_| {
            ServiceError::new(
                ErrorCode::ResourceExhausted,
                format!("queue full: {} requests run or wait; retry later", self.limits.max_requests),
            )
        })?;
        // The channel holds every event of the request, so that the engine never waits for a client that reads slowly.
        let capacity = request.choices * (request.max_tokens + 2) + 4;
        let (events, receiver) = mpsc::channel(capacity);
        let queued = QueuedRequest { request, events, submitted: Instant::now(), _permit: permit };
        self.queue
            .send(queued)
            .map_err(|_| ServiceError::new(ErrorCode::Unavailable, "the engine has stopped"))?;
        Ok(receiver)
    }

    fn check(&self, request: &Request) -> Result<(), ServiceError> {
        let limits = &self.limits;
        request.sampling.check()?;
        request.stop.check()?;
        if request.prompt.is_empty() {
            return Err(ServiceError::invalid("prompt", "empty prompt: expected at least one token"));
        }
        if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= limits.vocab_size) {
            return Err(ServiceError::invalid(
                "prompt",
                format!("invalid token id {id}: expected 0 to {}", limits.vocab_size.saturating_sub(1)),
            ));
        }
        if request.choices == 0 || request.choices > limits.max_choices {
            return Err(ServiceError::invalid(
                "n",
                format!("invalid `n`: expected 1 to {}, got {}", limits.max_choices, request.choices),
            ));
        }
        let length = request.prompt.len().saturating_add(request.max_tokens);
        if length > limits.context_length {
            return Err(ServiceError {
                code: ErrorCode::ContextLengthExceeded,
                message: format!(
                    "This model's maximum context length is {} tokens. However, you requested {length} tokens ({} in the prompt, {} in the completion). Please reduce the length of the prompt or of the completion.",
                    limits.context_length,
                    request.prompt.len(),
                    request.max_tokens,
                ),
                field: Some("prompt".to_owned()),
            });
        }
        let pages = limits.page_needs.pages(length, limits.prefill_rows).saturating_mul(request.choices);
        if pages > limits.cache_pages {
            return Err(ServiceError {
                code: ErrorCode::ContextLengthExceeded,
                message: format!(
                    "request exceeds the KV cache: {pages} pages of {PAGE_POSITIONS} tokens needed (n = {}, {length} \
                     tokens each), capacity {} pages; lower n or max_tokens, or raise --kv-cache-bytes",
                    request.choices, limits.cache_pages,
                ),
                field: Some("max_tokens".to_owned()),
            });
        }
        Ok(())
    }

    /// Returns the number of requests that run or wait.
    pub fn in_flight(&self) -> usize {
        self.limits.max_requests - self.permits.available_permits()
    }
}
