//! Admission: requests that wait for a slot of a main function, and requests that have one. Dropping either leaves
//! the queue or frees the slot.

use super::entry::{deadline_error_code, shutting_down_error};
use super::running::Backend;
use crate::queue::Ticket;
use crate::timeline::{ColdStart, RequestTimeline};
use remoe_proto::ServiceError;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;
use tokio::time::timeout_at;

/// Reply to a waiting request, and the channel that it is sent through.
pub(super) type GrantReply = (oneshot::Sender<Result<Grant, ServiceError>>, Result<Grant, ServiceError>);

/// Sends replies to waiting requests. Must not be called under the model's lock: a grant that is not received is
/// dropped, which takes that lock.
pub(super) fn send_replies(replies: Vec<GrantReply>) {
    for (sender, reply) in replies {
        let _client_gone = sender.send(reply);
    }
}

/// Owner of a model's queue and slots, to which requests give back what they had.
pub(super) trait SlotOwner: Send + Sync {
    /// Removes a request from the queue, if it still waits.
    fn leave(self: Arc<Self>, ticket: Ticket);

    /// Frees a slot of a backend.
    fn release(self: Arc<Self>, backend: u64);

    /// Sends no requests to a failed backend for a while.
    fn pause(&self, backend: u64);

    /// Records a complete cold start.
    fn record_cold_start(&self, cold_start: ColdStart);
}

/// Request in the queue. It leaves the queue when this is dropped.
pub(crate) struct QueuedRequest {
    pub(super) owner: Arc<dyn SlotOwner>,
    pub(super) ticket: Ticket,
    pub(super) is_cold: bool,
    pub(super) deadline: Instant,
    /// Set if `deadline` is the queue deadline.
    pub(super) is_queue_deadline: bool,
    pub(super) receiver: oneshot::Receiver<Result<Grant, ServiceError>>,
}

impl QueuedRequest {
    /// Reports if the request waits for a cold start: no main function served when it arrived.
    pub(crate) fn is_cold(&self) -> bool {
        self.is_cold
    }

    /// Waits for a slot of a main function.
    ///
    /// # Errors
    /// The deadline passed, the request was displaced from the full queue, or the server shuts down.
    pub(crate) async fn granted(mut self) -> Result<Grant, ServiceError> {
        match timeout_at(self.deadline.into(), &mut self.receiver).await {
            Ok(Ok(reply)) => reply,
            Ok(Err(_dropped)) => Err(shutting_down_error()),
            Err(_elapsed) => Err(ServiceError::new(
                deadline_error_code(self.is_queue_deadline),
                "queue deadline exceeded: no main function was ready in time; retry later",
            )),
        }
    }
}

impl Drop for QueuedRequest {
    fn drop(&mut self) {
        // If a grant has been sent meanwhile, it is dropped with the receiver, which frees its slot.
        self.owner.clone().leave(self.ticket);
    }
}

/// Slot of a main function, which one request has until this is dropped.
pub(crate) struct Grant {
    pub(super) owner: Arc<dyn SlotOwner>,
    pub(super) backend: Backend,
    pub(super) timeline: RequestTimeline,
    /// Time at which the wake was decided that the request waited for; `None`: it waited for no cold start.
    pub(super) wake_decided_at: Option<Instant>,
}

impl Grant {
    pub(crate) fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Returns the parts of the request's time until it got this slot.
    pub(crate) fn timeline(&self) -> &RequestTimeline {
        &self.timeline
    }

    /// Returns the cold start that the request waited for, if it waited for one.
    pub(crate) fn awaited_wake(&self) -> Option<AwaitedWake> {
        let decided_at = self.wake_decided_at?;
        Some(AwaitedWake { owner: self.owner.clone(), decided_at, timeline: self.timeline })
    }

    /// Reports that the main function could not be reached or failed. It gets no requests for a while.
    pub(crate) fn report_failure(&self) {
        self.owner.pause(self.backend.id);
    }
}

/// Wake of a model that a request waited for. The cold start is complete with the request's first token.
pub(crate) struct AwaitedWake {
    owner: Arc<dyn SlotOwner>,
    decided_at: Instant,
    timeline: RequestTimeline,
}

impl AwaitedWake {
    /// Returns the seconds since the wake was decided, a bound of the time to first token.
    pub(crate) fn elapsed_seconds(&self) -> f64 {
        self.decided_at.elapsed().as_secs_f64()
    }

    /// Records the cold start, whose first token came `first_token_seconds` after a main function got the request.
    pub(crate) fn complete(&self, first_token_seconds: f64) {
        self.owner.record_cold_start(ColdStart::new(self.decided_at, &self.timeline, first_token_seconds));
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.owner.clone().release(self.backend.id);
    }
}
