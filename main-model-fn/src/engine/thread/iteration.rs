//! One decode iteration of continuous batching: selects rows, reserves pages, forwards, and hands each request its output.

use super::super::active_request::ActiveRequest;
use super::super::failure_backoff::select_participants;
use super::super::iteration_rows::RowShare;
use super::super::request::{ExpertTally, ExpertTime, InspectLevel};
use super::super::sampling::run_all;
use super::Engine;
use crate::dispatch::TracedRequest;
use crate::transformer::{ForwardError, Output, Segment};
use remoe_proto::{ErrorCode, ServiceError};
use std::time::Instant;

impl Engine {
    /// Returns the rows of the next iteration, by request and sequence: one for each that decodes.
    fn decode_rows(&self) -> Vec<Vec<usize>> {
        let decoding = || self.running.iter().filter(|running| running.decodes());
        let backoffs: Vec<_> = decoding().map(ActiveRequest::failure_backoff).collect();
        let mut selected = select_participants(&backoffs, self.prefer_retries, Instant::now()).into_iter();
        let rows = |running: &ActiveRequest| match running.decodes() && selected.next() == Some(true) {
            true => running.pending_rows(1).iter().map(|pending| pending.rows).collect(),
            false => Vec::new(),
        };
        self.running.iter().map(rows).collect()
    }

    /// Returns the rows of the next iteration and reserves pages for them. If pages are short, preempts requests, the last
    /// admitted first.
    fn reserve_decode_rows(&mut self) -> Vec<Vec<usize>> {
        loop {
            let rows = self.decode_rows();
            let missing: usize =
                self.running.iter().zip(&rows).map(|(running, rows)| running.missing_blocks(rows)).sum();
            if self.pages.free_blocks(missing) {
                for (running, rows) in self.running.iter_mut().zip(&rows) {
                    // Cannot fail, because enough blocks are free.
                    let _reserved = running.reserve(rows, &mut self.pages);
                }
                self.record_cache_bytes();
                return rows;
            }
            let batch = self.running.iter().rposition(ActiveRequest::is_batch);
            let last = batch.or(self.running.len().checked_sub(1));
            let Some(last) = last else { return rows };
            if self.running.len() == 1 {
                // A single request cannot exceed the pool: its limits were checked when it was submitted.
                let error = ServiceError::new(ErrorCode::Internal, "a single request exceeds the KV cache");
                self.take_out(last).fail(error);
                return Vec::new();
            }
            self.preempt(last);
        }
    }

    /// Preempts the request at `index`: releases its pages, and admits it again later.
    pub(super) fn preempt(&mut self, index: usize) {
        let mut preempted = self.take_out(index);
        self.metrics.preemptions.inc();
        preempted.release_pages();
        self.paused.push_front(preempted);
    }

    /// Runs one forward for all decoding sequences, and one step of each request that took part. Returns false if none did.
    ///
    /// Never inlined, because its instructions are counted by its name.
    #[inline(never)]
    pub(super) fn iterate(&mut self) -> bool {
        let rows = self.reserve_decode_rows();
        self.prefer_retries = !self.prefer_retries;
        if rows.iter().flatten().all(|rows| *rows == 0) {
            return false;
        }
        let started = Instant::now();
        let trace_level = self.trace_level(&rows);
        self.mark_started(&rows, started);
        let traced_requests = self.traced_requests(&shares_of(&rows));
        let mut segments: Vec<Segment<'_>> = Vec::new();
        let shares = collect_segments(&mut self.running, &rows, &mut segments);
        self.experts.set_traced_requests(traced_requests);
        let outcome = self.model.forward(&mut segments, &mut self.experts, trace_level);
        drop(segments);
        self.count_iteration(&shares);
        self.account(&shares, started, outcome.is_ok());
        match outcome {
            Ok(output) => {
                let (tally, time) = (self.experts.take_tally(), self.experts.time());
                self.apply_output(output, &shares, &tally, time);
                self.pace.record_decode(started, Instant::now(), self.settings.target_itl);
            }
            Err(error) => {
                let rows = shares.iter().map(|share| share.rows).sum();
                self.handle_failure(&shares, rows, error, started);
            }
        }
        true
    }

    /// Attributes the time since `started` to the requests with `shares`, if the forward, or part of a prefill, `succeeded`.
    /// Records its calls in any case.
    pub(super) fn account(&mut self, shares: &[RowShare], started: Instant, succeeded: bool) {
        self.metrics.iteration_seconds.observe(started.elapsed().as_secs_f64());
        let elapsed = self.attribution.end_iteration(Instant::now());
        self.record_calls(shares);
        if succeeded {
            let rows = shares.iter().map(RowShare::range);
            self.attribution.attribute(elapsed, &mut self.running, rows, self.experts.pairs());
        }
    }

    /// Counts a completed forward in the metrics.
    pub(super) fn count_iteration(&self, shares: &[RowShare]) {
        self.metrics.iterations.inc();
        self.metrics.rows.inc_by(shares.iter().map(|share| share.rows as u64).sum());
    }

    /// Returns the level of records of a forward for the requests with `rows`; `None` if nothing is recorded.
    pub(super) fn trace_level(&self, rows: &[Vec<usize>]) -> Option<InspectLevel> {
        let participants =
            || self.running.iter().zip(rows).filter(|(_, rows)| rows.iter().any(|rows| *rows > 0));
        let inspect = participants().filter_map(|(running, _)| running.request().inspect).max();
        let needs_routing = participants().any(|(running, _)| running.wants_routing());
        inspect.or(needs_routing.then_some(InspectLevel::Routing))
    }

    /// Marks the requests with `rows` as started, if they were not before.
    pub(super) fn mark_started(&mut self, rows: &[Vec<usize>], now: Instant) {
        for (running, rows) in self.running.iter_mut().zip(rows) {
            if rows.iter().any(|rows| *rows > 0) {
                running.mark_started(now);
            }
        }
    }

    /// Returns the traced requests among those with rows in a forward.
    pub(super) fn traced_requests(&mut self, shares: &[RowShare]) -> Vec<TracedRequest> {
        let links = &self.experts.placement().links;
        let mut traced = Vec::new();
        for (request, (running, share)) in self.running.iter_mut().zip(shares).enumerate() {
            if let Some(spans) = running.spans.as_mut().filter(|_| share.rows > 0) {
                let contexts = links.iter().map(|link| spans.context(link.address())).collect();
                traced.push(TracedRequest {
                    request,
                    rows: share.range(),
                    contexts,
                    named_at: vec![None; links.len()],
                });
            }
        }
        traced
    }

    /// Adds the calls of a forward, or part of a prefill, to the spans of its requests, successful or not.
    pub(super) fn record_calls(&mut self, shares: &[RowShare]) {
        for traced in self.experts.take_traced_requests() {
            let spans = self.running.get_mut(traced.request).and_then(|running| running.spans.as_mut());
            let Some(spans) = spans else { continue };
            for (link, named_at) in self.experts.placement().links.iter().zip(traced.named_at) {
                named_at.into_iter().for_each(|at| spans.record_named(link.address(), at));
            }
        }
        let (pairs, links) = (self.experts.pairs(), &self.experts.placement().links);
        let all_rows = 0..shares.iter().map(|share| share.range().end).max().unwrap_or(0);
        let totals = self.experts.call_totals().iter().enumerate();
        for (link, calls) in totals.filter(|(_, calls)| calls.has_calls()) {
            let all = pairs.answered_pairs(link, all_rows.clone());
            for (running, share) in self.running.iter_mut().zip(shares) {
                let own = pairs.answered_pairs(link, share.range());
                // Without any answer, the requests of the messages are unknown: the calls count for all that took part.
                let took_part = own > 0 || (all == 0 && share.rows > 0);
                if let Some(spans) = running.spans.as_mut().filter(|_| took_part) {
                    spans.add_calls(links[link].address(), calls, own, all);
                }
            }
        }
    }

    /// Hands each request with a share its part of a forward's output: samples tokens, and ends finished requests.
    ///
    /// `tally` has the counts of each row's experts, and `time` is the experts' time.
    pub(super) fn apply_output(
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
                let (own, others) = logits.split_at(share.logits * output.vocab);
                logits = others;
                own
            })
            .collect();
        let hidden = self.model.hidden();
        let mut states = output.states.as_slice();
        for (running, share) in self.running.iter_mut().zip(shares) {
            let (own, others) = states.split_at(share.states * hidden);
            running.add_states(own, hidden);
            states = others;
        }
        let mut draws = Vec::new();
        let mut draw_counts = Vec::with_capacity(shares.len());
        for ((running, share), logits) in self.running.iter_mut().zip(shares).zip(&parts) {
            let count = match share.rows {
                0 => 0,
                _ => running.prepare_draws(logits, output.vocab, &mut draws),
            };
            draw_counts.push(count);
        }
        let mut outcomes = run_all(draws, &self.pool).into_iter();
        let mut first_row = 0;
        let running = std::mem::take(&mut self.running);
        for (((mut running, share), logits), count) in
            running.into_iter().zip(shares).zip(parts).zip(draw_counts)
        {
            if share.rows == 0 {
                self.running.push(running);
                continue;
            }
            let outcomes = outcomes.by_ref().take(count).collect();
            let row_tally = &tally[first_row..first_row + share.rows];
            running.count_rows(row_tally, time, output.trace.as_ref(), first_row);
            if let Some(trace) = &output.trace {
                running.record_inspection(trace, first_row, share.rows, self.row_bytes);
            }
            first_row += share.rows;
            running.cache_full_pages(&mut self.pages);
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

    /// Handles a failed forward of `rows` rows, which has changed nothing.
    ///
    /// If experts were out of reach, the requests that need them back off and retry apart from the others; they fail after
    /// too long without progress. After any other error, all requests of the forward fail.
    pub(super) fn handle_failure(
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
            let may_continue = match &out_of_reach {
                _ if rows.is_empty() => true,
                None => false,
                Some(out_of_reach) => {
                    !out_of_reach.iter().any(|row| rows.contains(row)) || running.back_off(started)
                }
            };
            match may_continue {
                true => self.running.push(running),
                false => running.fail(error.clone()),
            }
        }
        self.metrics.repeated.inc_by(u64::from(!self.running.is_empty()));
    }
}

/// Appends the segments of the running requests to `segments`. `rows` has the rows of each request and sequence.
///
/// Returns each request's share of the rows.
pub(super) fn collect_segments<'a>(
    running: &'a mut [ActiveRequest],
    rows: &[Vec<usize>],
    segments: &mut Vec<Segment<'a>>,
) -> Vec<RowShare> {
    let (mut shares, mut first_row) = (Vec::with_capacity(running.len()), 0);
    for (running, rows) in running.iter_mut().zip(rows) {
        let first_segment = segments.len();
        if rows.iter().any(|rows| *rows > 0) {
            running.append_segments(rows, segments);
        }
        let share = RowShare::new(&segments[first_segment..], first_row);
        first_row = share.range().end;
        shares.push(share);
    }
    shares
}

/// Returns the shares of requests with `rows` rows of each sequence, without outputs.
fn shares_of(rows: &[Vec<usize>]) -> Vec<RowShare> {
    let mut first_row = 0;
    let share = |rows: &Vec<usize>| {
        let share = RowShare { first_row, rows: rows.iter().sum(), logits: 0, states: 0 };
        first_row = share.range().end;
        share
    };
    rows.iter().map(share).collect()
}
