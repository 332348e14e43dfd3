//! Admission: which requests leave the queue, and which have waited for too long.

use super::super::handle::Job;
use super::super::page_reservation::expected_pages;
use super::super::request::{Event, Priority};
use super::super::sequence::ActiveRequest;
use super::Engine;
use crate::pages::SequenceCache;
use std::time::{Duration, Instant};

/// A request that does not fit lets others pass for so long after it came; then what becomes free is left to it.
const MOST_PASSED: Duration = Duration::from_secs(10);

/// The request that starts next.
enum NextStart {
    /// A preempted one, by its index.
    Paused(usize),
    /// One that has just come, by its index.
    Waiting(usize),
    Nothing,
    /// No waiting request fits; true if the first of them would without the batch requests that run.
    DoesNotFit {
        fits_without_batch: bool,
    },
}

impl Engine {
    pub(super) fn wait_for(&mut self, mut job: Job) {
        let deadline = &mut job.request.queue_deadline;
        *deadline = deadline.or(self.settings.limits.queue_deadline);
        self.waiting.push_back(job);
    }

    /// Fails requests that have waited for their first row for longer than they may.
    pub(super) fn end_overdue(&mut self, now: Instant) {
        while let Some(index) = self.waiting.iter().position(|job| job.is_overdue(now)) {
            let Some(job) = self.waiting.remove(index) else { break };
            self.metrics.overdue.inc();
            let _client_gone = job.events.try_send(Event::Failed(job.overdue()));
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
            let error = running.job.overdue();
            running.fail(error);
        }
    }

    /// Starts waiting requests while batch and cache have room and experts are placed: interactive ones before
    /// others, of each class those that were preempted first, then in the order of arrival. Where one does not fit,
    /// others pass it for a while; batch requests that run give way to interactive ones.
    pub(super) fn admit(&mut self) {
        // What comes before the first placement waits for it; HTTP takes nothing until then.
        if self.experts.placement().generation == 0 {
            return;
        }
        if self.paused.is_empty() && self.waiting.is_empty() {
            return;
        }
        let now = Instant::now();
        for priority in [Priority::Interactive, Priority::Batch] {
            loop {
                match self.next(priority, now) {
                    NextStart::Paused(index) => {
                        let Some(paused) = self.paused.remove(index) else { break };
                        self.begin(paused);
                    }
                    NextStart::Waiting(index) => {
                        let Some(job) = self.waiting.remove(index) else { break };
                        let recording =
                            self.recorder.as_ref().map(|recorder| recorder.begin(&job.request.prompt));
                        self.admitted += 1;
                        self.begin(ActiveRequest::new(self.admitted, job, &self.vocabulary, recording));
                    }
                    NextStart::Nothing => break,
                    NextStart::DoesNotFit { fits_without_batch } => {
                        match self.running.iter().rposition(ActiveRequest::is_batch) {
                            Some(batch) if priority == Priority::Interactive && fits_without_batch => {
                                self.preempt(batch);
                            }
                            // A batch request that took the room now would have to give it back.
                            Some(_) | None => return,
                        }
                    }
                }
            }
        }
    }

    /// The request of a class that starts next, and fits. None after one that others have passed for too long.
    fn next(&self, priority: Priority, now: Instant) -> NextStart {
        let (headroom, limits) = (self.settings.headroom, &self.settings.limits);
        let passed = |job: &Job| now.saturating_duration_since(job.submitted) > MOST_PASSED;
        let paused = self.paused.iter().enumerate().map(|(index, paused)| {
            let needs = (paused.request().choices, paused.growth(headroom, limits));
            (NextStart::Paused(index), paused.request().priority, needs, passed(&paused.job))
        });
        let waiting = self.waiting.iter().enumerate().map(|(index, job)| {
            let needs = (job.request.choices, expected_pages(&job.request, headroom, limits));
            (NextStart::Waiting(index), job.request.priority, needs, passed(job))
        });
        let room = self.room(|_| true);
        let mut blocked = None;
        for (next, _, needs, passed) in paused.chain(waiting).filter(|(_, class, ..)| *class == priority) {
            if room.takes(needs) {
                return next;
            }
            blocked.get_or_insert(needs);
            if passed {
                break;
            }
        }
        match blocked {
            None => NextStart::Nothing,
            Some(needs) => NextStart::DoesNotFit {
                fits_without_batch: self.room(|running| !running.is_batch()).takes(needs),
            },
        }
    }

    fn begin(&mut self, mut next: ActiveRequest) {
        next.begin(&mut self.pages);
        let (asked, found) = next.prefix();
        self.metrics.prefix_tokens.inc_by(asked as u64);
        self.metrics.prefix_tokens_found.inc_by(found as u64);
        self.running.push(next);
    }

    /// Sequences and pages that are free beside the requests that run and `stay`.
    fn room(&self, stay: impl Fn(&ActiveRequest) -> bool) -> FreeCapacity {
        let (headroom, limits) = (self.settings.headroom, &self.settings.limits);
        let (staying, leaving): (Vec<&ActiveRequest>, Vec<&ActiveRequest>) =
            self.running.iter().partition(|running| stay(running));
        let sequences: usize = staying.iter().map(|running| running.request().choices).sum();
        let growth: usize = staying.iter().map(|running| running.growth(headroom, limits)).sum();
        let freed: usize =
            leaving.iter().flat_map(|running| running.caches()).map(SequenceCache::pages).sum();
        let held = self.pages.held().saturating_sub(freed) + growth;
        FreeCapacity {
            is_empty: staying.is_empty(),
            sequences: self.memory_limits.max_batch().saturating_sub(sequences),
            pages: self.pages.limit().saturating_sub(held),
        }
    }
}

/// Sequences and pages that a request may take.
struct FreeCapacity {
    /// No request runs: what a request may come to hold was checked when it was submitted.
    is_empty: bool,
    sequences: usize,
    pages: usize,
}

impl FreeCapacity {
    fn takes(&self, (sequences, pages): (usize, usize)) -> bool {
        self.is_empty || (sequences <= self.sequences && pages <= self.pages)
    }
}
