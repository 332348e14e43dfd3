//! Admission: requests that wait for a slot, through a cold start too, and those that have one. Both give it back
//! when they are dropped.

use super::entry::{closed, late};
use super::running::Backend;
use crate::queue::Ticket;
use crate::timeline::{ColdStart, RequestTimeline};
use remoe_proto::ServiceError;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;
use tokio::time::timeout_at;

/// Result for a waiting request, and the channel that it is sent through.
pub(super) type GrantReply = (oneshot::Sender<Result<Grant, ServiceError>>, Result<Grant, ServiceError>);

/// Answers waiting requests. Not under the lock: a grant that is not received is dropped, which takes the lock.
pub(super) fn answer(answers: Vec<GrantReply>) {
    for (sender, answer) in answers {
        let _client_gone = sender.send(answer);
    }
}

/// Queue and places of a model: what a request had of them is given back here.
pub(super) trait Places: Send + Sync {
    /// Takes a request out of the queue, if it still waits.
    fn leave(self: Arc<Self>, ticket: Ticket);

    /// Frees a place of a backend.
    fn release(self: Arc<Self>, backend: u64);

    /// Gives a backend no request for a moment.
    fn pause(&self, backend: u64);

    /// Takes the times of a wake that is over.
    fn woke(&self, cold_start: ColdStart);
}

/// A request in the queue. It leaves when this is dropped.
pub(crate) struct QueuedRequest {
    pub(super) places: Arc<dyn Places>,
    pub(super) ticket: Ticket,
    pub(super) cold: bool,
    pub(super) until: Instant,
    /// True if the queue deadline comes before every other limit.
    pub(super) by_queue_deadline: bool,
    pub(super) receiver: oneshot::Receiver<Result<Grant, ServiceError>>,
}

impl QueuedRequest {
    /// Nothing answered when it came.
    pub(crate) fn is_cold(&self) -> bool {
        self.cold
    }

    /// Waits for a backend with room.
    ///
    /// # Errors
    /// No place was found in time, the request gave way to others, or the server shuts down.
    pub(crate) async fn granted(mut self) -> Result<Grant, ServiceError> {
        match timeout_at(self.until.into(), &mut self.receiver).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_dropped)) => Err(closed()),
            Err(_late) => Err(ServiceError::new(
                late(self.by_queue_deadline),
                "queue deadline exceeded: no main function was ready in time; retry later",
            )),
        }
    }
}

impl Drop for QueuedRequest {
    fn drop(&mut self) {
        // What was granted meanwhile is given back with the receiver.
        self.places.clone().leave(self.ticket);
    }
}

/// Leave to use a backend, until it is dropped.
pub(crate) struct Grant {
    pub(super) places: Arc<dyn Places>,
    pub(super) backend: Backend,
    pub(super) parts: RequestTimeline,
    /// When the wake was decided that the request waited for; none where functions answered when it came.
    pub(super) woken: Option<Instant>,
}

impl Grant {
    pub(crate) fn backend(&self) -> &Backend {
        &self.backend
    }

    /// The parts of the request's time so far.
    pub(crate) fn parts(&self) -> &RequestTimeline {
        &self.parts
    }

    /// The wake that the request waited for, of which its first token tells the rest; none where functions answered
    /// when it came.
    pub(crate) fn wake(&self) -> Option<Wake> {
        let decided = self.woken?;
        Some(Wake { places: self.places.clone(), decided, parts: self.parts })
    }

    /// The backend could not be reached, or broke off: it gets no request for a moment.
    pub(crate) fn failed(&self) {
        self.places.pause(self.backend.id);
    }
}

/// A wake that a request waited for.
pub(crate) struct Wake {
    places: Arc<dyn Places>,
    decided: Instant,
    parts: RequestTimeline,
}

impl Wake {
    /// Seconds since it was decided: no first token took longer.
    pub(crate) fn so_far(&self) -> f64 {
        self.decided.elapsed().as_secs_f64()
    }

    /// The request's first token came so many seconds after a main function had it.
    pub(crate) fn is_over(&self, first: f64) {
        self.places.woke(ColdStart::new(self.decided, &self.parts, first));
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.places.clone().release(self.backend.id);
    }
}
