//! Prefill between decode iterations: begins, advances and finishes layered prefills.

use super::super::active_request::ActiveRequest;
use super::super::iteration_rows::{PrefillRows, RowShare};
use super::super::pace::TimeBudget;
use super::super::request::{ExpertTally, ExpertTime, Priority};
use super::super::scheduler::{PrefillWork, rows_per_sequence};
use super::Engine;
use super::iteration::collect_segments;
use crate::transformer::{ForwardError, Segment};
use std::time::{Duration, Instant};

/// Time for which prompts advance if no request decodes.
const IDLE_DECODE_SLICE: Duration = Duration::from_millis(250);
/// Time for which one of several prompts advances before the next one is selected.
const PROMPT_SLICE: Duration = Duration::from_millis(50);
/// Most prefills under way: each holds the hidden states of its rows.
const MAX_PREFILLS: usize = 4;
/// Rows up to which further prompts join a prefill: more rows do not make better use of the weights that are read.
const MAX_JOINED_ROWS: usize = 256;

/// A layered prefill of one request, or of several short ones.
pub(super) struct Prefill {
    id: u64,
    /// Members in the order of the running requests.
    members: Vec<Member>,
    /// Counts of each row's experts so far.
    tally: Vec<ExpertTally>,
    time: ExpertTime,
}

/// Rows of one request in a prefill.
struct Member {
    /// Id of the request; `None` once it has left. Its rows stay until the end of the layer.
    request: Option<u64>,
    rows: usize,
    segments: usize,
}

/// A prefill that could advance.
struct Candidate {
    /// Id of its oldest request.
    oldest_request: u64,
    work: PrefillWork,
    state: CandidateState,
}

#[derive(Clone, Copy)]
enum CandidateState {
    /// Index of a prefill under way.
    UnderWay(usize),
    /// Index of a request that is in no prefill.
    Waiting(usize),
}

impl Engine {
    /// Advances prompts until the next decode iteration is due. Returns false if none could advance.
    pub(super) fn prefill(&mut self) -> bool {
        if self.running.iter().all(ActiveRequest::decodes) {
            return false;
        }
        let now = Instant::now();
        let decodes = |running: &ActiveRequest| running.decodes() && running.failure_backoff().is_none();
        let has_streams = self.running.iter().any(decodes);
        let target = self.settings.target_itl;
        let time = if has_streams { self.pace.prefill_time(now, target) } else { IDLE_DECODE_SLICE };
        let (until, mut has_advanced) = (now + time, false);
        while (!has_advanced || Instant::now() < until) && self.prefill_one(until) {
            has_advanced = true;
            let has_new_stream = !has_streams && self.running.iter().any(decodes);
            if has_new_stream || !self.queue.is_empty() || !self.switches.is_empty() {
                break;
            }
        }
        has_advanced
    }

    /// Advances the prompt that the scheduler selects, at most until `until`. Returns false if there is none.
    fn prefill_one(&mut self, until: Instant) -> bool {
        let mut excluded = Vec::new();
        loop {
            let candidates = self.candidates(&excluded);
            let prompts: Vec<PrefillWork> = candidates.iter().map(|candidate| candidate.work).collect();
            let Some(selected) = self.prefill_order.next(&prompts) else { return false };
            let started = Instant::now();
            let index = match candidates[selected].state {
                CandidateState::UnderWay(index) => index,
                CandidateState::Waiting(index) => {
                    let request = self.running[index].id;
                    match self.begin_prefill(request) {
                        Some(index) => index,
                        None => {
                            excluded.push(request);
                            continue;
                        }
                    }
                }
            };
            let until = if prompts.len() > 1 { until.min(started + PROMPT_SLICE) } else { until };
            self.advance_prefill(index, until);
            self.prefill_order.record(&prompts, selected, started.elapsed());
            return true;
        }
    }

    /// Returns the prefills and requests that could advance, without those in `excluded`, in the order of arrival.
    fn candidates(&self, excluded: &[u64]) -> Vec<Candidate> {
        let now = Instant::now();
        let remaining = |running: &ActiveRequest| {
            running.pending_rows(1).iter().map(|pending| pending.rows).sum::<usize>()
        };
        let mut all = Vec::new();
        for (index, prefill) in self.prefills.iter().enumerate() {
            let members = self.running.iter().filter(|running| prefill.has_member(running));
            let oldest = members.clone().map(|running| running.id).min();
            let priority = members.clone().map(|running| running.request().priority).min();
            all.push(Candidate {
                oldest_request: oldest.unwrap_or_default(),
                work: PrefillWork {
                    rows: members.map(remaining).sum(),
                    priority: priority.unwrap_or_default(),
                },
                state: CandidateState::UnderWay(index),
            });
        }
        // The last prefill is reserved for interactive prompts.
        let limit = |priority| if priority == Priority::Batch { MAX_PREFILLS - 1 } else { MAX_PREFILLS };
        for (index, running) in self.running.iter().enumerate() {
            let priority = running.request().priority;
            let is_paused = running.failure_backoff().is_some_and(|backoff| backoff.until > now);
            let can_begin = self.prefills.len() < limit(priority)
                && running.prefill.is_none()
                && !running.decodes()
                && !is_paused;
            if can_begin && !excluded.contains(&running.id) && !self.waits_for_leader(running, excluded) {
                all.push(Candidate {
                    oldest_request: running.id,
                    work: PrefillWork { rows: remaining(running), priority },
                    state: CandidateState::Waiting(index),
                });
            }
        }
        all.sort_by_key(|candidate| candidate.oldest_request);
        all
    }

    /// Reports if `running` waits for another prompt that computes a common prefix. Requests in `excluded` do not count.
    fn waits_for_leader(&self, running: &ActiveRequest, excluded: &[u64]) -> bool {
        let max_rows = self.settings.limits.prefill_rows;
        let next_rows = |leader: &ActiveRequest| match &leader.prefill {
            Some(prefill) => prefill.rows.iter().sum(),
            None => rows_per_sequence(&leader.pending_rows(max_rows), max_rows).iter().sum::<usize>(),
        };
        let mut leaders = self.running.iter().filter(|leader| {
            let can_advance = leader.failure_backoff().is_none() && !excluded.contains(&leader.id);
            can_advance && leader.is_ahead_of(running)
        });
        leaders.any(|leader| running.should_follow(leader, next_rows(leader)))
    }

    /// Begins a prefill of `request`, together with other short prompts. Returns its index; `None` if nothing is left to
    /// compute or there are not enough pages.
    fn begin_prefill(&mut self, request: u64) -> Option<usize> {
        let max_rows = self.settings.limits.prefill_rows;
        let position = |engine: &Self| engine.running.iter().position(|running| running.id == request);
        let first = position(self)?;
        let rows = self.prefill_rows(first, max_rows)?;
        let missing = |engine: &Self| engine.running[first].missing_blocks(&rows);
        while !self.pages.free_blocks(missing(self)) {
            if !self.preempt_for(request) {
                return None;
            }
            if position(self) != Some(first) {
                // Requests before it were preempted and its index changed: the scheduler selects it again.
                return None;
            }
        }
        self.running[first].reserve(&rows, &mut self.pages);
        let mut total: usize = rows.iter().sum();
        let mut chosen = vec![(first, rows)];
        for index in self.short_prompts(first) {
            if total >= MAX_JOINED_ROWS {
                break;
            }
            let Some(rows) = self.prefill_rows(index, max_rows) else { continue };
            let joined: usize = rows.iter().sum();
            let fits = total + joined <= MAX_JOINED_ROWS;
            if fits && self.pages.free_blocks(self.running[index].missing_blocks(&rows)) {
                self.running[index].reserve(&rows, &mut self.pages);
                total += joined;
                chosen.push((index, rows));
            }
        }
        self.start_prefill(chosen)
    }

    /// Returns the rows of each sequence of the request at `index` in a prefill of at most `max_rows` rows, after looking up
    /// its prompt in the prefix cache again. Returns `None` if only one row is left, which decodes.
    fn prefill_rows(&mut self, index: usize, max_rows: usize) -> Option<Vec<usize>> {
        let running = &mut self.running[index];
        let found = running.extend_cached_prefix(&mut self.pages);
        self.metrics.prefix_tokens_found.inc_by(found as u64);
        (!running.decodes()).then(|| rows_per_sequence(&running.pending_rows(max_rows), max_rows))
    }

    /// Returns the indices of requests that could join a prefill of the one at `first`, the shortest first.
    fn short_prompts(&self, first: usize) -> Vec<usize> {
        if self.running[first].failure_backoff().is_some() || !self.memory_limits.joins_prompts() {
            return Vec::new();
        }
        let priority = self.running[first].request().priority;
        let mut others: Vec<(usize, usize)> = self
            .candidates(&[])
            .into_iter()
            .filter_map(|candidate| match candidate.state {
                CandidateState::Waiting(index) if candidate.work.priority == priority => {
                    Some((candidate.work.rows, index))
                }
                CandidateState::Waiting(_) | CandidateState::UnderWay(_) => None,
            })
            .filter(|&(_, index)| index != first && self.running[index].failure_backoff().is_none())
            .collect();
        others.sort_unstable();
        others.into_iter().map(|(_, index)| index).collect()
    }

    /// Preempts a request so that `request` gets its pages: a batch request for an interactive one, otherwise a later one of
    /// the same class. Returns false if there is none.
    fn preempt_for(&mut self, request: u64) -> bool {
        let Some(index) = self.running.iter().position(|running| running.id == request) else { return false };
        let is_interactive = !self.running[index].is_batch();
        let batch = self.running.iter().rposition(ActiveRequest::is_batch).filter(|_| is_interactive);
        let later = || {
            let gives_way = |later: &usize| is_interactive || self.running[*later].is_batch();
            (index + 1..self.running.len()).rev().find(gives_way)
        };
        match batch.or_else(later) {
            Some(last) => {
                self.preempt(last);
                true
            }
            None => false,
        }
    }

    /// Begins a prefill of the `chosen` requests: index, and rows of each sequence.
    fn start_prefill(&mut self, mut chosen: Vec<(usize, Vec<usize>)>) -> Option<usize> {
        chosen.sort_unstable_by_key(|&(index, _)| index);
        let mut rows = vec![Vec::new(); self.running.len()];
        let members = chosen.iter().map(|(index, rows)| Member {
            request: Some(self.running[*index].id),
            rows: rows.iter().sum(),
            segments: rows.iter().filter(|rows| **rows > 0).count(),
        });
        let members: Vec<Member> = members.collect();
        for (index, request_rows) in chosen {
            rows[index] = request_rows;
        }
        self.last_prefill_id += 1;
        let (id, started) = (self.last_prefill_id, Instant::now());
        let traced = self.trace_level(&rows);
        self.mark_started(&rows, started);
        let mut segments: Vec<Segment<'_>> = Vec::new();
        let shares = collect_segments(&mut self.running, &rows, &mut segments);
        let begun = self.model.begin_prefill(id, &segments, traced);
        drop(segments);
        self.record_cache_bytes();
        if let Err(error) = begun {
            self.handle_failure(&shares, members.iter().map(|member| member.rows).sum(), error, started);
            return None;
        }
        for (running, rows) in self.running.iter_mut().zip(rows).filter(|(_, rows)| !rows.is_empty()) {
            running.prefill = Some(PrefillRows { id, rows });
        }
        let tally = vec![ExpertTally::default(); members.iter().map(|member| member.rows).sum()];
        self.prefills.push(Prefill { id, members, tally, time: ExpertTime::default() });
        Some(self.prefills.len() - 1)
    }

    /// Advances prefill `index`, at most until `until`, and finishes it behind the last layer.
    fn advance_prefill(&mut self, index: usize, until: Instant) {
        let (id, started) = (self.prefills[index].id, Instant::now());
        match self.model.drop_removed_rows(id) {
            Ok(true) => self.prefills[index].drop_removed_members(),
            Ok(false) => (),
            Err(error) => return self.fail_prefill(index, error, started),
        }
        let shares = self.shares_in(index);
        let traced_requests = self.traced_requests(&shares);
        self.experts.set_traced_requests(traced_requests);
        let Self { model, experts, pace, queue, switches, stop, .. } = self;
        let is_interrupted = || !queue.is_empty() || !switches.is_empty() || stop.halt.is_cancelled();
        let mut budget = TimeBudget { pace, until, is_interrupted: &is_interrupted };
        let outcome = model.advance_prefill(id, experts, &mut budget);
        self.account(&shares, started, outcome.is_ok());
        match outcome {
            Ok(done) => {
                for (running, _) in self.running.iter_mut().zip(&shares).filter(|(_, share)| share.rows > 0) {
                    running.record_progress(started.elapsed());
                }
                let prefill = &mut self.prefills[index];
                let tally = self.experts.take_tally();
                prefill.tally.iter_mut().zip(tally).for_each(|(sum, tally)| *sum += tally);
                prefill.time += self.experts.time();
                if done {
                    self.finish_prefill(index, started);
                }
            }
            Err(error) => self.fail_prefill(index, error, started),
        }
    }

    /// Returns the share of each running request in prefill `index`, without outputs.
    fn shares_in(&self, index: usize) -> Vec<RowShare> {
        let members = &self.prefills[index].members;
        let share = |running: &ActiveRequest| {
            let index = members.iter().position(|member| member.request == Some(running.id));
            let first_row = members[..index.unwrap_or(0)].iter().map(|member| member.rows).sum();
            RowShare { first_row, rows: index.map_or(0, |index| members[index].rows), logits: 0, states: 0 }
        };
        self.running.iter().map(share).collect()
    }

    /// Returns the rows in prefill `id`, by request and sequence.
    fn rows_by_request(&self, id: u64) -> Vec<Vec<usize>> {
        let rows = |running: &ActiveRequest| match &running.prefill {
            Some(prefill) if prefill.id == id => prefill.rows.clone(),
            Some(_) | None => Vec::new(),
        };
        self.running.iter().map(rows).collect()
    }

    fn finish_prefill(&mut self, index: usize, started: Instant) {
        let prefill = self.prefills.remove(index);
        let rows = self.rows_by_request(prefill.id);
        self.detach_requests(prefill.id);
        let mut segments: Vec<Segment<'_>> = Vec::new();
        let shares = collect_segments(&mut self.running, &rows, &mut segments);
        let outcome = self.model.finish_prefill(prefill.id, &mut segments);
        drop(segments);
        self.count_iteration(&shares);
        match outcome {
            Ok(output) => self.apply_output(output, &shares, &prefill.tally, prefill.time),
            Err(error) => self.handle_failure(&shares, prefill.tally.len(), error, started),
        }
    }

    /// Drops prefill `index`, which failed and changed nothing, and handles the failure.
    fn fail_prefill(&mut self, index: usize, error: ForwardError, started: Instant) {
        let shares = self.shares_in(index);
        let prefill = self.prefills.remove(index);
        self.model.drop_prefill(prefill.id);
        self.detach_requests(prefill.id);
        self.handle_failure(&shares, prefill.tally.len(), error, started);
    }

    /// Removes prefill `id` from its requests.
    fn detach_requests(&mut self, id: u64) {
        for running in &mut self.running {
            running.prefill.take_if(|prefill| prefill.id == id);
        }
    }

    /// Removes the request at `index` from its prefill, which continues with the other members.
    pub(super) fn leave_prefill(&mut self, index: usize) {
        let running = &mut self.running[index];
        let (Some(rows), request) = (running.prefill.take(), running.id) else { return };
        let Some(index) = self.prefills.iter().position(|prefill| prefill.id == rows.id) else { return };
        let members = &mut self.prefills[index].members;
        let mut segment = 0;
        for member in members.iter_mut().filter(|member| member.request.is_some()) {
            if member.request == Some(request) {
                member.request = None;
                for _ in 0..member.segments {
                    self.model.remove_segment(rows.id, segment);
                }
                break;
            }
            segment += member.segments;
        }
        if members.iter().all(|member| member.request.is_none()) {
            self.model.drop_prefill(rows.id);
            self.prefills.remove(index);
        }
    }
}

impl Prefill {
    fn has_member(&self, running: &ActiveRequest) -> bool {
        running.prefill.as_ref().is_some_and(|prefill| prefill.id == self.id)
    }

    /// Drops the rows of members that have left.
    fn drop_removed_members(&mut self) {
        let mut tally = std::mem::take(&mut self.tally).into_iter();
        for member in &self.members {
            let member_tally = tally.by_ref().take(member.rows);
            match member.request {
                Some(_) => self.tally.extend(member_tally),
                None => member_tally.for_each(drop),
            }
        }
        self.members.retain(|member| member.request.is_some());
    }
}
