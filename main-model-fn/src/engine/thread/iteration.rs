//! One iteration of continuous batching: whose rows, room for them, a forward for all of them, and what comes of it
//! for each request.

use super::super::failure_backoff::takes_part;
use super::super::request::{ExpertTally, ExpertTime, InspectLevel};
use super::super::sampling::make_all;
use super::super::sequence::{ActiveRequest, RowShare};
use super::Engine;
use crate::dispatch::TracedRequest;
use crate::transformer::{ForwardError, Output, Segment};
use remoe_proto::{ErrorCode, ServiceError};
use std::time::Instant;

impl Engine {
    /// Per request and sequence, the row of the next iteration: all that decode have one.
    fn plan(&self) -> Vec<Vec<usize>> {
        let decoding = || self.running.iter().filter(|running| running.decodes());
        let setbacks: Vec<_> = decoding().map(ActiveRequest::failure_backoff).collect();
        let mut taking_part = takes_part(&setbacks, self.apart, Instant::now()).into_iter();
        let rows = |running: &ActiveRequest| match running.decodes() && taking_part.next() == Some(true) {
            true => running.pending(1).iter().map(|pending| pending.rows).collect(),
            false => Vec::new(),
        };
        self.running.iter().map(rows).collect()
    }

    /// The rows of the next iteration, with pages for them. Where there are not enough for all, the requests that were
    /// admitted last give way: they go on later from what is still kept of them then.
    fn make_room(&mut self) -> Vec<Vec<usize>> {
        loop {
            let rows = self.plan();
            let lacking: usize =
                self.running.iter().zip(&rows).map(|(running, rows)| running.lacking(rows)).sum();
            if self.pages.make_free(lacking) {
                for (running, rows) in self.running.iter_mut().zip(&rows) {
                    // Cannot fail: as many as they lack are free.
                    let _has_room = running.reserve(rows, &mut self.pages);
                }
                self.measure_caches();
                return rows;
            }
            let batch = self.running.iter().rposition(ActiveRequest::is_batch);
            let last = batch.or(self.running.len().checked_sub(1));
            let Some(last) = last else { return rows };
            if self.running.len() == 1 {
                // What a request may come to hold was checked when it was submitted.
                let error = ServiceError::new(ErrorCode::Internal, "a single request exceeds the KV cache");
                self.take_out(last).fail(error);
                return Vec::new();
            }
            self.preempt(last);
        }
    }

    /// Pauses the request at `index`: it goes on later from what is still kept of it then.
    pub(super) fn preempt(&mut self, index: usize) {
        let mut preempted = self.take_out(index);
        self.metrics.preemptions.inc();
        preempted.pause();
        self.paused.push_front(preempted);
    }

    /// One forward for all sequences that decode, and a step for every request that took part. False where none does.
    /// Never a part of another function's code: its instructions are counted by its name.
    #[inline(never)]
    pub(super) fn iterate(&mut self) -> bool {
        let rows = self.make_room();
        self.apart = !self.apart;
        if rows.iter().flatten().all(|rows| *rows == 0) {
            return false;
        }
        let started = Instant::now();
        let traced = self.traced(&rows);
        self.start(&rows, started);
        let followed = self.followed(&shares_of(&rows));
        let mut segments: Vec<Segment<'_>> = Vec::new();
        let shares = lend(&mut self.running, &rows, &mut segments);
        self.experts.follow(followed);
        let outcome = self.model.forward(&mut segments, &mut self.experts, traced);
        drop(segments);
        self.count_iteration(&shares);
        self.account(&shares, started, outcome.is_ok());
        match outcome {
            Ok(output) => {
                let (tally, time) = (self.experts.take_tally(), self.experts.time());
                self.advance(output, &shares, &tally, time);
                self.pace.decoded(started, Instant::now(), self.settings.target_itl);
            }
            Err(error) => {
                let rows = shares.iter().map(|share| share.rows).sum();
                self.set_back(&shares, rows, error, started);
            }
        }
        true
    }

    /// Accounts for the time since `started`, in which the requests with `shares` took part; it is theirs if the
    /// forward, or the part of one, `succeeded`.
    pub(super) fn account(&mut self, shares: &[RowShare], started: Instant, succeeded: bool) {
        self.metrics.iteration_seconds.observe(started.elapsed().as_secs_f64());
        let passed = self.attribution.end_iteration(Instant::now());
        self.note_calls(shares);
        if succeeded {
            let rows = shares.iter().map(RowShare::range);
            self.attribution.attribute(passed, &mut self.running, rows, self.experts.pairs());
        }
    }

    /// Counts a forward that is over.
    pub(super) fn count_iteration(&self, shares: &[RowShare]) {
        self.metrics.iterations.inc();
        self.metrics.rows.inc_by(shares.iter().map(|share| share.rows as u64).sum());
    }

    /// Returns the level of records of a forward for the requests with `rows`; `None` if nothing is recorded.
    pub(super) fn traced(&self, rows: &[Vec<usize>]) -> Option<InspectLevel> {
        let these = || self.running.iter().zip(rows).filter(|(_, rows)| rows.iter().any(|rows| *rows > 0));
        let inspect = these().filter_map(|(running, _)| running.request().inspect).max();
        let counts = these().any(|(running, _)| running.wants_routing());
        inspect.or(counts.then_some(InspectLevel::Routing))
    }

    /// The requests with `rows` begin, those that have not.
    pub(super) fn start(&mut self, rows: &[Vec<usize>], now: Instant) {
        for (running, rows) in self.running.iter_mut().zip(rows) {
            if rows.iter().any(|rows| *rows > 0) {
                running.start(now);
            }
        }
    }

    /// The traced requests among those that have rows in a forward.
    pub(super) fn followed(&mut self, shares: &[RowShare]) -> Vec<TracedRequest> {
        let links = &self.experts.placement().links;
        let mut followed = Vec::new();
        for (request, (running, share)) in self.running.iter_mut().zip(shares).enumerate() {
            if let Some(spans) = running.spans.as_mut().filter(|_| share.rows > 0) {
                let contexts = links.iter().map(|link| spans.context(link.address())).collect();
                followed.push(TracedRequest {
                    request,
                    rows: share.range(),
                    contexts,
                    told: vec![None; links.len()],
                });
            }
        }
        followed
    }

    /// Tells the spans of requests what was asked of remote functions for them, whether the iteration succeeded or not.
    pub(super) fn note_calls(&mut self, shares: &[RowShare]) {
        for followed in self.experts.take_followed() {
            let spans = self.running.get_mut(followed.request).and_then(|running| running.spans.as_mut());
            let Some(spans) = spans else { continue };
            for (link, told) in self.experts.placement().links.iter().zip(followed.told) {
                told.into_iter().for_each(|at| spans.told(link.address(), at));
            }
        }
        let (pairs, links) = (self.experts.pairs(), &self.experts.placement().links);
        let all = 0..shares.iter().map(|share| share.range().end).max().unwrap_or(0);
        for (link, calls) in self.experts.calls().iter().enumerate().filter(|(_, calls)| calls.is_any()) {
            let all = pairs.answered_pairs(link, all.clone());
            for (running, share) in self.running.iter_mut().zip(shares) {
                let own = pairs.answered_pairs(link, share.range());
                // If nothing was answered, the owners of the messages are unknown: all requests that took part.
                let took_part = own > 0 || (all == 0 && share.rows > 0);
                if let Some(spans) = running.spans.as_mut().filter(|_| took_part) {
                    spans.asked(links[link].address(), calls, own, all);
                }
            }
        }
    }

    /// Takes on the requests with `shares` of a forward, whose rows' experts were computed as `tally` says and took
    /// `time`.
    pub(super) fn advance(
        &mut self,
        output: Output,
        shares: &[RowShare],
        tally: &[ExpertTally],
        time: ExpertTime,
    ) {
        self.memory_limits.count_forward();
        let mut logits = output.logits.as_slice();
        let parts: Vec<&[f32]> = shares
            .iter()
            .map(|share| {
                let (these, others) = logits.split_at(share.logits * output.vocab);
                logits = others;
                these
            })
            .collect();
        let hidden = self.model.hidden();
        let mut states = output.states.as_slice();
        for (running, share) in self.running.iter_mut().zip(shares) {
            let (these, others) = states.split_at(share.states * hidden);
            running.add_states(these, hidden);
            states = others;
        }
        let mut draws = Vec::new();
        let mut counts = Vec::with_capacity(shares.len());
        for ((running, share), logits) in self.running.iter_mut().zip(shares).zip(&parts) {
            let drawn = match share.rows {
                0 => 0,
                _ => running.draws(logits, output.vocab, &mut draws),
            };
            counts.push(drawn);
        }
        let mut outcomes = make_all(draws, &self.pool).into_iter();
        let mut first = 0;
        let running = std::mem::take(&mut self.running);
        for (((mut running, share), logits), drawn) in running.into_iter().zip(shares).zip(parts).zip(counts)
        {
            if share.rows == 0 {
                self.running.push(running);
                continue;
            }
            let outcomes = outcomes.by_ref().take(drawn).collect();
            running.count(&tally[first..first + share.rows], time, output.trace.as_ref(), first);
            if let Some(trace) = &output.trace {
                running.keep_trace(trace, first, share.rows, self.row_bytes);
            }
            first += share.rows;
            running.keep(&mut self.pages);
            match running.step(logits, outcomes, output.vocab, &self.vocabulary, self.model.as_mut()) {
                Ok(true) => {
                    if let (Some(recorder), Some(recording)) = (&self.recorder, running.into_recording()) {
                        recorder.finish(recording);
                    }
                }
                Ok(false) => self.running.push(running),
                Err(error) => {
                    self.metrics.not_finite.inc_by(u64::from(error.is_not_finite()));
                    running.fail(error.into());
                }
            }
        }
    }

    /// After a failed forward of `rows` rows, which has changed nothing. Where weights were out of reach it is done
    /// again, without those that need them or with those only, who fail once that has gone on for too
    /// long; after anything else its requests fail.
    pub(super) fn set_back(
        &mut self,
        shares: &[RowShare],
        rows: usize,
        error: ForwardError,
        started: Instant,
    ) {
        if error.is_device_lost() {
            tracing::error!(%error, "device lost: the process ends");
            return self.stop.device_lost.cancel();
        }
        if error.is_out_of_memory() {
            return self.handle_out_of_memory(shares, error);
        }
        let out_of_reach = error.out_of_reach(rows);
        tracing::error!(%error, again = out_of_reach.is_some(), "iteration failed");
        let error = ServiceError::from(error);
        let running = std::mem::take(&mut self.running);
        for (mut running, share) in running.into_iter().zip(shares) {
            let rows = share.range();
            let goes_on = match &out_of_reach {
                _ if rows.is_empty() => true,
                None => false,
                Some(out_of_reach) => {
                    !out_of_reach.iter().any(|row| rows.contains(row)) || running.set_back(started)
                }
            };
            match goes_on {
                true => self.running.push(running),
                false => running.fail(error.clone()),
            }
        }
        self.metrics.repeated.inc_by(u64::from(!self.running.is_empty()));
    }
}

/// Lends the rows of the requests, those of `rows` by request and sequence, to `segments`. Returns the share of each.
pub(super) fn lend<'a>(
    running: &'a mut [ActiveRequest],
    rows: &[Vec<usize>],
    segments: &mut Vec<Segment<'a>>,
) -> Vec<RowShare> {
    let (mut shares, mut first) = (Vec::with_capacity(running.len()), 0);
    for (running, rows) in running.iter_mut().zip(rows) {
        let mut lent = Vec::new();
        if rows.iter().any(|rows| *rows > 0) {
            running.rows(rows, &mut lent);
        }
        let share = RowShare::of(&lent, first);
        first = share.range().end;
        shares.push(share);
        segments.extend(lent.into_iter().map(|rows| Segment {
            tokens: rows.tokens,
            cache: rows.cache,
            wanted: rows.wanted,
        }));
    }
    shares
}

/// The shares of requests with `rows` of each sequence, of which nothing is wanted yet.
fn shares_of(rows: &[Vec<usize>]) -> Vec<RowShare> {
    let mut first = 0;
    let share = |rows: &Vec<usize>| {
        let share = RowShare { first, rows: rows.iter().sum(), logits: 0, states: 0 };
        first = share.range().end;
        share
    };
    rows.iter().map(share).collect()
}
