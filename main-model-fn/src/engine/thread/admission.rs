//! Admission control: moves requests from the queue to the batch, and fails those whose queue deadline has passed.

use super::super::active_request::ActiveRequest;
use super::super::handle::QueuedRequest;
use super::super::page_reservation::expected_pages;
use super::super::request::{Event, Priority};
use super::Engine;
use crate::pages::SequenceCache;
use std::time::{Duration, Instant};

/// Time for which others may overtake a request that does not fit. After it, free capacity is reserved for the request.
const MAX_OVERTAKE_TIME: Duration = Duration::from_secs(10);

/// Next request to admit.
enum NextStart {
    /// Preempted request, by index.
    Paused(usize),
    /// Waiting request, by index.
    Waiting(usize),
    Nothing,
    /// No request fits.
    DoesNotFit {
        /// True if the first request would fit without the running batch-priority requests.
        fits_without_batch: bool,
    },
}

/// Capacity that a request needs to start.
#[derive(Clone, Copy)]
struct NeededCapacity {
    sequences: usize,
    pages: usize,
}

impl Engine {
    /// Appends a request to those that wait.
    pub(super) fn enqueue(&mut self, mut queued: QueuedRequest) {
        let deadline = &mut queued.request.queue_deadline;
        *deadline = deadline.or(self.settings.limits.queue_deadline);
        self.waiting.push_back(queued);
    }

    /// Fails requests whose queue deadline passed before their first row was computed.
    pub(super) fn fail_overdue(&mut self, now: Instant) {
        while let Some(index) = self.waiting.iter().position(|queued| queued.is_overdue(now)) {
            let Some(queued) = self.waiting.remove(index) else { break };
            self.metrics.overdue.inc();
            let _client_gone = queued.events.try_send(Event::Failed(queued.deadline_error()));
        }
        let mut overdue = Vec::new();
        while let Some(index) = self.running.iter().position(|running| running.is_overdue(now)) {
            overdue.push(self.take_out(index));
        }
        while let Some(index) = self.paused.iter().position(|paused| paused.is_overdue(now)) {
            overdue.extend(self.paused.remove(index));
        }
        for running in overdue {
            self.metrics.overdue.inc();
            let error = running.queued.deadline_error();
            running.fail(error);
        }
    }

    /// Admits waiting requests while there are batch slots and pages.
    ///
    /// Interactive requests go before batch ones; within a class, preempted requests go first, then the order of arrival
    /// counts. If a request does not fit, others overtake it for a while. Interactive requests preempt batch ones.
    pub(super) fn admit(&mut self) {
        // Requests wait for the first placement; HTTP accepts none before it.
        if self.experts.placement().generation == 0 {
            return;
        }
        if self.paused.is_empty() && self.waiting.is_empty() {
            return;
        }
        let now = Instant::now();
        for priority in [Priority::Interactive, Priority::Batch] {
            loop {
                match self.next_to_start(priority, now) {
                    NextStart::Paused(index) => {
                        let Some(paused) = self.paused.remove(index) else { break };
                        self.start_running(paused);
                    }
                    NextStart::Waiting(index) => {
                        let Some(queued) = self.waiting.remove(index) else { break };
                        let recorder = self.recorder.as_ref();
                        let recording = recorder.map(|recorder| recorder.begin(&queued.request.prompt));
                        self.last_request_id += 1;
                        let id = self.last_request_id;
                        self.start_running(ActiveRequest::new(id, queued, &self.vocabulary, recording));
                    }
                    NextStart::Nothing => break,
                    NextStart::DoesNotFit { fits_without_batch } => {
                        match self.running.iter().rposition(ActiveRequest::is_batch) {
                            Some(batch) if priority == Priority::Interactive && fits_without_batch => {
                                self.preempt(batch);
                            }
                            // A batch request that took the capacity now would soon be preempted.
                            Some(_) | None => return,
                        }
                    }
                }
            }
        }
    }

    /// Returns the next request of a class that fits. Stops at a request that others have overtaken for too long.
    fn next_to_start(&self, priority: Priority, now: Instant) -> NextStart {
        let (headroom, limits) = (self.settings.headroom, &self.settings.limits);
        let is_overtaken_too_long =
            |queued: &QueuedRequest| now.saturating_duration_since(queued.submitted) > MAX_OVERTAKE_TIME;
        let paused = self.paused.iter().enumerate().map(|(index, paused)| {
            let (sequences, pages) = (paused.request().choices, paused.expected_growth(headroom, limits));
            (NextStart::Paused(index), &paused.queued, NeededCapacity { sequences, pages })
        });
        let waiting = self.waiting.iter().enumerate().map(|(index, queued)| {
            let pages = expected_pages(&queued.request, headroom, limits);
            (NextStart::Waiting(index), queued, NeededCapacity { sequences: queued.request.choices, pages })
        });
        let free = self.free_capacity(|_| true);
        let mut blocked = None;
        let of_class = |(_, queued, _): &(NextStart, &QueuedRequest, NeededCapacity)| {
            queued.request.priority == priority
        };
        for (next, queued, needed) in paused.chain(waiting).filter(of_class) {
            if free.fits(needed) {
                return next;
            }
            blocked.get_or_insert(needed);
            if is_overtaken_too_long(queued) {
                break;
            }
        }
        match blocked {
            None => NextStart::Nothing,
            Some(needed) => NextStart::DoesNotFit {
                fits_without_batch: self.free_capacity(|running| !running.is_batch()).fits(needed),
            },
        }
    }

    /// Starts `next` from the prefix cache.
    fn start_running(&mut self, mut next: ActiveRequest) {
        next.begin_sequences(&mut self.pages);
        let (looked_up, found) = next.prefix_lookup();
        self.metrics.prefix_tokens.inc_by(looked_up as u64);
        self.metrics.prefix_tokens_found.inc_by(found as u64);
        self.running.push(next);
    }

    /// Returns the capacity in addition to the running requests that `stays` keeps.
    fn free_capacity(&self, stays: impl Fn(&ActiveRequest) -> bool) -> FreeCapacity {
        let (headroom, limits) = (self.settings.headroom, &self.settings.limits);
        let (staying, leaving): (Vec<&ActiveRequest>, Vec<&ActiveRequest>) =
            self.running.iter().partition(|running| stays(running));
        let sequences: usize = staying.iter().map(|running| running.request().choices).sum();
        let growth: usize = staying.iter().map(|running| running.expected_growth(headroom, limits)).sum();
        let freed: usize =
            leaving.iter().flat_map(|running| running.caches()).map(SequenceCache::pages).sum();
        let held = self.pages.held_pages().saturating_sub(freed) + growth;
        FreeCapacity {
            is_empty: staying.is_empty(),
            sequences: self.memory_limits.max_batch().saturating_sub(sequences),
            pages: self.pages.limit().saturating_sub(held),
        }
    }
}

/// Capacity that a request may take.
struct FreeCapacity {
    /// True if no request runs: then any request fits, as its limits were checked when it was submitted.
    is_empty: bool,
    sequences: usize,
    pages: usize,
}

impl FreeCapacity {
    fn fits(&self, needed: NeededCapacity) -> bool {
        self.is_empty || (needed.sequences <= self.sequences && needed.pages <= self.pages)
    }
}
