//! The engine as its callers see it: a bounded queue in, a stream of events out. A full queue sheds load.

use super::request::{Event, Request};
use crate::backend::PAGE_POSITIONS;
use crate::pages::PageNeeds;
use remoe_proto::{ErrorCode, ServiceError};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// Limits of a request, known before the engine sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestLimits {
    /// Ids at or above this are no tokens.
    pub vocab_size: usize,
    /// Prompt and output together.
    pub context_length: usize,
    /// Pages of keys and values that there are.
    pub cache_pages: usize,
    /// Pages that a sequence needs.
    pub page_needs: PageNeeds,
    /// Rows of prompts that go through the layers together.
    pub prefill_rows: usize,
    /// Most choices of one request.
    pub max_choices: usize,
    /// Requests that run or wait at most; the next is refused.
    pub max_requests: usize,
    /// How long a request that states nothing may wait for its first row; `None`: as long as it takes.
    pub queue_deadline: Option<Duration>,
}

impl RequestLimits {
    /// Positions of each of `choices` sequences that the KV cache has room for.
    pub(crate) fn cached_positions(&self, choices: usize) -> usize {
        self.page_needs.positions(self.cache_pages / choices.max(1), self.prefill_rows)
    }
}

/// A request on its way to the engine.
pub(crate) struct Job {
    pub(crate) request: Request,
    pub(crate) events: mpsc::Sender<Event>,
    pub(crate) submitted: Instant,
    /// Held until the request has left the engine: the queue's bound.
    pub(crate) _slot: OwnedSemaphorePermit,
}

impl Job {
    /// Reports if its queue deadline has passed.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        let limit = self.request.queue_deadline;
        limit.is_some_and(|limit| now.saturating_duration_since(self.submitted) >= limit)
    }

    /// The error for its client then.
    pub(crate) fn overdue(&self) -> ServiceError {
        let message = "queue deadline exceeded: other requests are computed first; retry later";
        ServiceError::new(ErrorCode::QueueDeadlineExceeded, message)
    }
}

/// The caller's end of the engine. Clones share the queue.
#[derive(Clone)]
pub struct EngineHandle {
    jobs: mpsc::UnboundedSender<Job>,
    slots: Arc<Semaphore>,
    limits: RequestLimits,
}

/// The events of one request. Dropping it ends the request's work at the next iteration.
pub type Events = mpsc::Receiver<Event>;

impl EngineHandle {
    pub(crate) fn new(limits: RequestLimits) -> (Self, mpsc::UnboundedReceiver<Job>) {
        // Unbounded in type only: every job holds one of `max_requests` slots.
        let (jobs, receiver) = mpsc::unbounded_channel();
        let slots = Arc::new(Semaphore::new(limits.max_requests));
        (Self { jobs, slots, limits }, receiver)
    }

    /// Returns the limits of requests.
    pub fn limits(&self) -> RequestLimits {
        self.limits
    }

    /// Hands `request` to the engine.
    ///
    /// # Errors
    /// `InvalidArgument` and `ContextLengthExceeded` for what can never run, `ResourceExhausted`
    /// when the queue is full, `Unavailable` when the engine has stopped.
    pub fn submit(&self, request: Request) -> Result<Events, ServiceError> {
        self.check(&request)?;
        let slot = self.slots.clone().try_acquire_owned().map_err(|_| {
            ServiceError::new(
                ErrorCode::ResourceExhausted,
                format!("queue full: {} requests run or wait; retry later", self.limits.max_requests),
            )
        })?;
        // Room for every event that the request can cause, so that the engine never waits for a
        // client that reads slowly.
        let room = request.choices * (request.max_tokens + 2) + 4;
        let (events, receiver) = mpsc::channel(room);
        let job = Job { request, events, submitted: Instant::now(), _slot: slot };
        self.jobs
            .send(job)
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

    /// Requests that run or wait.
    pub fn in_flight(&self) -> usize {
        self.limits.max_requests - self.slots.available_permits()
    }
}
