//! One iteration: whose rows, room for them, a forward for all of them, and what comes of it for each request.

use super::super::request::InspectLevel;
use super::super::sampling::make_all;
use super::super::scheduler::{Pending, plan};
use super::super::sequence::{Running, Share};
use super::super::setback::takes_part;
use super::Engine;
use crate::dispatch::Followed;
use crate::transformer::{ForwardError, Output, Segment};
use remoe_wire::{ErrorCode, ServiceError};
use std::time::Instant;

impl Engine {
    /// The rows of the next iteration, per request and sequence.
    fn plan(&self) -> Vec<Vec<usize>> {
        let setbacks: Vec<_> = self.running.iter().map(Running::setback).collect();
        let taking_part = takes_part(&setbacks, self.apart, Instant::now());
        let pending: Vec<Vec<Pending>> = (self.running.iter().zip(taking_part))
            .map(|(running, takes_part)| {
                let mut pending = running.pending(self.settings.prompt_chunk);
                if !takes_part {
                    pending.iter_mut().for_each(|pending| pending.rows = 0);
                }
                pending
            })
            .collect();
        let mut rows = plan(&pending.concat(), self.settings.iteration_rows).into_iter();
        pending.iter().map(|pending| rows.by_ref().take(pending.len()).collect()).collect()
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
            let Some(mut last) = self.running.pop() else {
                return rows;
            };
            self.metrics.preemptions.inc();
            last.pause();
            if self.running.is_empty() {
                // What a request may come to hold was checked when it was submitted.
                last.fail(ServiceError::new(ErrorCode::Internal, "a single request exceeds the KV cache"));
            } else {
                self.paused.push_front(last);
            }
        }
    }

    /// One forward for all rows, and a step for every request that took part. Never a part of another function's code:
    /// its instructions are counted by its name.
    #[inline(never)]
    pub(super) fn iterate(&mut self) {
        let rows = self.make_room();
        self.apart = !self.apart;
        if self.running.is_empty() {
            return;
        }
        let inspect = self.running.iter().filter_map(|running| running.request().inspect).max();
        let counts = self.running.iter().any(Running::wants_routing);
        let trace = inspect.or(counts.then_some(InspectLevel::Routing));
        let followed = self.followed(&rows);
        let started = Instant::now();
        let mut segments: Vec<Segment<'_>> = Vec::new();
        // Per request: its segments' rows, and what is wanted of them.
        let mut shares = Vec::with_capacity(self.running.len());
        for (running, rows) in self.running.iter_mut().zip(&rows) {
            let mut lent = Vec::new();
            running.rows(rows, &mut lent);
            shares.push(Share::of(&lent));
            segments.extend(lent.into_iter().map(|rows| Segment {
                tokens: rows.tokens,
                cache: rows.cache,
                wanted: rows.wanted,
            }));
        }
        self.experts.follow(followed);
        let outcome = self.model.forward(&mut segments, &mut self.experts, trace);
        drop(segments);
        self.metrics.iterations.inc();
        self.metrics.rows.inc_by(shares.iter().map(|share| share.rows as u64).sum());
        self.metrics.iteration_seconds.observe(started.elapsed().as_secs_f64());
        let passed = self.attribution.passed(Instant::now());
        self.note_calls(&shares);
        match outcome {
            Ok(output) => {
                let rows = shares.iter().map(|share| share.rows);
                self.attribution.share(passed, &mut self.running, rows, self.experts.pairs());
                self.advance(output, &shares);
            }
            Err(error) => self.set_back(&shares, error, started),
        }
    }

    /// The traced requests among those with `rows` in the iteration, one entry per sequence.
    fn followed(&mut self, rows: &[Vec<usize>]) -> Vec<Followed> {
        let links = &self.experts.placement().links;
        let (mut followed, mut first) = (Vec::new(), 0);
        for (request, (running, rows)) in self.running.iter_mut().zip(rows).enumerate() {
            let rows = first..first + rows.iter().sum::<usize>();
            first = rows.end;
            if let Some(spans) = running.spans.as_mut().filter(|_| !rows.is_empty()) {
                let contexts = links.iter().map(|link| spans.context(link.address())).collect();
                followed.push(Followed { request, rows, contexts, told: vec![None; links.len()] });
            }
        }
        followed
    }

    /// Tells the spans of requests what was asked of remote functions for them, whether the iteration succeeded or not.
    fn note_calls(&mut self, shares: &[Share]) {
        for followed in self.experts.take_followed() {
            let spans = self.running.get_mut(followed.request).and_then(|running| running.spans.as_mut());
            let Some(spans) = spans else { continue };
            for (link, told) in self.experts.placement().links.iter().zip(followed.told) {
                told.into_iter().for_each(|at| spans.told(link.address(), at));
            }
        }
        let (pairs, links) = (self.experts.pairs(), &self.experts.placement().links);
        let all = 0..shares.iter().map(|share| share.rows).sum();
        for (link, calls) in self.experts.calls().iter().enumerate().filter(|(_, calls)| calls.is_any()) {
            let all = pairs.of(link, all.clone());
            let mut first = 0;
            for (running, share) in self.running.iter_mut().zip(shares) {
                let rows = first..first + share.rows;
                first = rows.end;
                let own = pairs.of(link, rows);
                // Where nothing was answered nobody knows whose the messages were: of all that took part.
                let took_part = own > 0 || (all == 0 && share.rows > 0);
                if let Some(spans) = running.spans.as_mut().filter(|_| took_part) {
                    spans.asked(links[link].address(), calls, own, all);
                }
            }
        }
    }

    fn advance(&mut self, output: Output, shares: &[Share]) {
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
            let tally = &self.experts.tally()[first..first + share.rows];
            running.count(tally, self.experts.time(), output.trace.as_ref(), first);
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
                Err(error) => running.fail(error.into()),
            }
        }
    }

    /// After a failed iteration, which has changed nothing. Where weights were out of reach it is done
    /// again, without those that need them or with those only, who fail once that has gone on for too
    /// long; after anything else its requests fail.
    fn set_back(&mut self, shares: &[Share], error: ForwardError, started: Instant) {
        let out_of_reach = error.out_of_reach(shares.iter().map(|share| share.rows).sum());
        tracing::error!(%error, again = out_of_reach.is_some(), "iteration failed");
        let error = ServiceError::from(error);
        let mut first = 0;
        let running = std::mem::take(&mut self.running);
        for (mut running, share) in running.into_iter().zip(shares) {
            let rows = first..first + share.rows;
            first = rows.end;
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
