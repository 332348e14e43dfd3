//! Prompts between decode iterations: which layered prefill goes on or begins, for how long, and what comes of it.

use super::super::pace::TimeBudget;
use super::super::request::{ExpertTally, ExpertTime, Priority};
use super::super::scheduler::{PrefillWork, rows_of};
use super::super::sequence::{ActiveRequest, PassRows, RowShare};
use super::Engine;
use super::iteration::lend;
use crate::transformer::{ForwardError, Segment};
use std::time::{Duration, Instant};

/// How long prompts go on where nothing decodes ..
const ALONE: Duration = Duration::from_millis(250);
/// .. and one of several.
const IN_TURN: Duration = Duration::from_millis(50);
/// Prefills under way at most: each holds the hidden states of its rows.
const MOST_PREFILLS: usize = 4;
/// Up to so many rows further prompts join a prefill: more rows make no better use of the weights that are read.
const WORTH_JOINING: usize = 256;

/// A layered prefill of one request or of several short ones.
pub(super) struct Prefill {
    id: u64,
    /// In the order of the requests that run.
    members: Vec<Member>,
    /// Where the experts of each row were computed so far.
    tally: Vec<ExpertTally>,
    time: ExpertTime,
}

/// The rows of a request.
struct Member {
    /// The request's id; `None` once it has left. Its rows stay until the end of the layer.
    request: Option<u64>,
    rows: usize,
    segments: usize,
}

/// Something that could go on.
#[derive(Clone, Copy)]
enum Candidate {
    /// A prefill under way, by its index.
    UnderWay(usize),
    /// A request that is part of none, by its index.
    Waiting(usize),
}

impl Engine {
    /// Lets prompts go on until the next decode iteration is due. False where none could.
    pub(super) fn prefill(&mut self) -> bool {
        if self.running.iter().all(ActiveRequest::decodes) {
            return false;
        }
        let now = Instant::now();
        let decodes = |running: &ActiveRequest| running.decodes() && running.failure_backoff().is_none();
        let streams = self.running.iter().any(decodes);
        let time = if streams { self.pace.between_tokens(now, self.settings.target_itl) } else { ALONE };
        let (until, mut any) = (now + time, false);
        while (!any || Instant::now() < until) && self.prefill_one(until) {
            any = true;
            let begins = !streams && self.running.iter().any(decodes);
            if begins || !self.jobs.is_empty() || !self.switches.is_empty() {
                break;
            }
        }
        any
    }

    /// Lets the prompt whose turn it is go on, `until` at most. False where there is none.
    fn prefill_one(&mut self, until: Instant) -> bool {
        let mut excluded = Vec::new();
        loop {
            let candidates = self.candidates(&excluded);
            let prompts: Vec<PrefillWork> = candidates.iter().map(|&(_, prompt, _)| prompt).collect();
            let Some(turn) = self.turns.next(&prompts) else { return false };
            let started = Instant::now();
            let index = match candidates[turn].2 {
                Candidate::UnderWay(index) => index,
                Candidate::Waiting(index) => {
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
            let until = if prompts.len() > 1 { until.min(started + IN_TURN) } else { until };
            self.advance_prefill(index, until);
            self.turns.had(&prompts, turn, started.elapsed());
            return true;
        }
    }

    /// Prefills and requests that could go on, in the order of arrival, but for the requests `excluded`.
    fn candidates(&self, excluded: &[u64]) -> Vec<(u64, PrefillWork, Candidate)> {
        let now = Instant::now();
        let left =
            |running: &ActiveRequest| running.pending(1).iter().map(|pending| pending.rows).sum::<usize>();
        let mut all = Vec::new();
        for (index, prefill) in self.prefills.iter().enumerate() {
            let members = self.running.iter().filter(|running| prefill.has(running));
            let oldest = members.clone().map(|running| running.id).min();
            let priority = members.clone().map(|running| running.request().priority).min();
            let prompt =
                PrefillWork { rows: members.map(left).sum(), priority: priority.unwrap_or_default() };
            all.push((oldest.unwrap_or_default(), prompt, Candidate::UnderWay(index)));
        }
        // One is kept for interactive prompts.
        let most = |priority| if priority == Priority::Batch { MOST_PREFILLS - 1 } else { MOST_PREFILLS };
        for (index, running) in self.running.iter().enumerate() {
            let rests = running.failure_backoff().is_some_and(|failure_backoff| failure_backoff.until > now);
            let has_room = self.prefills.len() < most(running.request().priority);
            let waits = has_room && running.pass.is_none() && !running.decodes() && !rests;
            if waits && !excluded.contains(&running.id) && !self.follows_another(running, excluded) {
                let prompt = PrefillWork { rows: left(running), priority: running.request().priority };
                all.push((running.id, prompt, Candidate::Waiting(index)));
            }
        }
        all.sort_by_key(|&(arrived, ..)| arrived);
        all
    }

    /// True if another prompt that is ahead, and is not `excluded`, computes what `running` begins with.
    fn follows_another(&self, running: &ActiveRequest, excluded: &[u64]) -> bool {
        let most = self.settings.limits.prefill_rows;
        let next = |leader: &ActiveRequest| match &leader.pass {
            Some(pass) => pass.rows.iter().sum(),
            None => rows_of(&leader.pending(most), most).iter().sum::<usize>(),
        };
        let mut leaders = self.running.iter().filter(|leader| {
            let goes_on = leader.failure_backoff().is_none() && !excluded.contains(&leader.id);
            goes_on && leader.is_ahead_of(running)
        });
        leaders.any(|leader| running.follows(leader, next(leader)))
    }

    /// Begins a prefill of `request`, together with others where it is short. Returns its index; none where there is
    /// nothing to compute or no room for its pages.
    fn begin_prefill(&mut self, request: u64) -> Option<usize> {
        let most = self.settings.limits.prefill_rows;
        let at = |engine: &Self| engine.running.iter().position(|running| running.id == request);
        let first = at(self)?;
        let rows = self.looked_up(first, most)?;
        let lacking = |engine: &Self| engine.running[first].lacking(&rows);
        while !self.pages.make_free(lacking(self)) {
            if !self.preempt_for(request) {
                return None;
            }
            if at(self) != Some(first) {
                // Those before it have moved up: it is its turn again in a moment.
                return None;
            }
        }
        self.running[first].reserve(&rows, &mut self.pages);
        let mut total: usize = rows.iter().sum();
        let mut chosen = vec![(first, rows)];
        for index in self.short_ones(first) {
            if total >= WORTH_JOINING {
                break;
            }
            let Some(rows) = self.looked_up(index, most) else { continue };
            let joined: usize = rows.iter().sum();
            if total + joined <= WORTH_JOINING && self.pages.make_free(self.running[index].lacking(&rows)) {
                self.running[index].reserve(&rows, &mut self.pages);
                total += joined;
                chosen.push((index, rows));
            }
        }
        self.start_pass(chosen)
    }

    /// Rows of the request at `index` in a prefill of at most `most`, after what others have computed of it
    /// meanwhile; none where only one is left, which decodes.
    fn looked_up(&mut self, index: usize, most: usize) -> Option<Vec<usize>> {
        let running = &mut self.running[index];
        let found = running.look_up(&mut self.pages);
        self.metrics.prefix_tokens_found.inc_by(found as u64);
        (!running.decodes()).then(|| rows_of(&running.pending(most), most))
    }

    /// Requests that could join a prefill of the one at `first`, the shortest first.
    fn short_ones(&self, first: usize) -> Vec<usize> {
        if self.running[first].failure_backoff().is_some() || !self.memory_limits.joins_prompts() {
            return Vec::new();
        }
        let priority = self.running[first].request().priority;
        let mut others: Vec<(usize, usize)> = self
            .candidates(&[])
            .into_iter()
            .filter_map(|(_, prompt, candidate)| match candidate {
                Candidate::Waiting(index) if prompt.priority == priority => Some((prompt.rows, index)),
                Candidate::Waiting(_) | Candidate::UnderWay(_) => None,
            })
            .filter(|&(_, index)| index != first && self.running[index].failure_backoff().is_none())
            .collect();
        others.sort_unstable();
        others.into_iter().map(|(_, index)| index).collect()
    }

    /// Pauses a request so that `request` gets its pages: a batch request for an interactive one, else one of the
    /// same class that came later.
    fn preempt_for(&mut self, request: u64) -> bool {
        let Some(index) = self.running.iter().position(|running| running.id == request) else { return false };
        let interactive = !self.running[index].is_batch();
        let batch = self.running.iter().rposition(ActiveRequest::is_batch).filter(|_| interactive);
        let later = || {
            let gives_way = |it: &usize| interactive || self.running[*it].is_batch();
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

    /// Begins a prefill of the `chosen` requests, by index, with so many rows of each of their sequences.
    fn start_pass(&mut self, mut chosen: Vec<(usize, Vec<usize>)>) -> Option<usize> {
        chosen.sort_unstable_by_key(|&(index, _)| index);
        let mut rows = vec![Vec::new(); self.running.len()];
        let members = chosen.iter().map(|(index, rows)| Member {
            request: Some(self.running[*index].id),
            rows: rows.iter().sum(),
            segments: rows.iter().filter(|rows| **rows > 0).count(),
        });
        let members: Vec<Member> = members.collect();
        for (index, of_request) in chosen {
            rows[index] = of_request;
        }
        self.passes_begun += 1;
        let (id, started) = (self.passes_begun, Instant::now());
        let traced = self.traced(&rows);
        self.start(&rows, started);
        let mut segments: Vec<Segment<'_>> = Vec::new();
        let shares = lend(&mut self.running, &rows, &mut segments);
        let begun = self.model.begin_pass(id, &segments, traced);
        drop(segments);
        self.measure_caches();
        if let Err(error) = begun {
            self.set_back(&shares, members.iter().map(|member| member.rows).sum(), error, started);
            return None;
        }
        for (running, rows) in self.running.iter_mut().zip(rows).filter(|(_, rows)| !rows.is_empty()) {
            running.pass = Some(PassRows { id, rows });
        }
        let tally = vec![ExpertTally::default(); members.iter().map(|member| member.rows).sum()];
        self.prefills.push(Prefill { id, members, tally, time: ExpertTime::default() });
        Some(self.prefills.len() - 1)
    }

    /// Lets prefill `index` go on, `until` at most, and takes its requests on where it has gone through all layers.
    fn advance_prefill(&mut self, index: usize, until: Instant) {
        let (id, started) = (self.prefills[index].id, Instant::now());
        match self.model.close_gaps(id) {
            Ok(true) => self.prefills[index].close_gaps(),
            Ok(false) => (),
            Err(error) => return self.fail_prefill(index, error, started),
        }
        let shares = self.shares_in(index);
        let followed = self.followed(&shares);
        self.experts.follow(followed);
        let Self { model, experts, pace, jobs, switches, stop, .. } = self;
        let interrupted = || !jobs.is_empty() || !switches.is_empty() || stop.halt.is_cancelled();
        let mut rest = TimeBudget { pace, until, interrupted: &interrupted };
        let outcome = model.advance_pass(id, experts, &mut rest);
        self.account(&shares, started, outcome.is_ok());
        match outcome {
            Ok(done) => {
                for (running, _) in self.running.iter_mut().zip(&shares).filter(|(_, share)| share.rows > 0) {
                    running.went_on(started.elapsed());
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

    /// The rows of each request in prefill `index`, of which nothing is wanted yet.
    fn shares_in(&self, index: usize) -> Vec<RowShare> {
        let members = &self.prefills[index].members;
        let share = |running: &ActiveRequest| {
            let at = members.iter().position(|member| member.request == Some(running.id));
            let first = members[..at.unwrap_or(0)].iter().map(|member| member.rows).sum();
            RowShare { first, rows: at.map_or(0, |at| members[at].rows), logits: 0, states: 0 }
        };
        self.running.iter().map(share).collect()
    }

    /// Rows in pass `id` by request and sequence.
    fn rows_in(&self, id: u64) -> Vec<Vec<usize>> {
        let rows = |running: &ActiveRequest| match &running.pass {
            Some(pass) if pass.id == id => pass.rows.clone(),
            Some(_) | None => Vec::new(),
        };
        self.running.iter().map(rows).collect()
    }

    fn finish_prefill(&mut self, index: usize, started: Instant) {
        let prefill = self.prefills.remove(index);
        let rows = self.rows_in(prefill.id);
        self.forget_pass(prefill.id);
        let mut segments: Vec<Segment<'_>> = Vec::new();
        let shares = lend(&mut self.running, &rows, &mut segments);
        let outcome = self.model.finish_pass(prefill.id, &mut segments);
        drop(segments);
        self.count_iteration(&shares);
        match outcome {
            Ok(output) => self.advance(output, &shares, &prefill.tally, prefill.time),
            Err(error) => self.set_back(&shares, prefill.tally.len(), error, started),
        }
    }

    /// Prefill `index` has failed, and changed nothing.
    fn fail_prefill(&mut self, index: usize, error: ForwardError, started: Instant) {
        let shares = self.shares_in(index);
        let prefill = self.prefills.remove(index);
        self.model.drop_pass(prefill.id);
        self.forget_pass(prefill.id);
        self.set_back(&shares, prefill.tally.len(), error, started);
    }

    /// No request is part of pass `id` any more.
    fn forget_pass(&mut self, id: u64) {
        for running in &mut self.running {
            running.pass.take_if(|pass| pass.id == id);
        }
    }

    /// Takes the request at `index` out of its prefill, whose other members go on.
    pub(super) fn leave_prefill(&mut self, index: usize) {
        let running = &mut self.running[index];
        let (Some(pass), request) = (running.pass.take(), running.id) else { return };
        let Some(index) = self.prefills.iter().position(|prefill| prefill.id == pass.id) else { return };
        let members = &mut self.prefills[index].members;
        let mut segment = 0;
        for member in members.iter_mut().filter(|member| member.request.is_some()) {
            if member.request == Some(request) {
                member.request = None;
                for _ in 0..member.segments {
                    self.model.leave_pass(pass.id, segment);
                }
                break;
            }
            segment += member.segments;
        }
        if members.iter().all(|member| member.request.is_none()) {
            self.model.drop_pass(pass.id);
            self.prefills.remove(index);
        }
    }
}

impl Prefill {
    fn has(&self, running: &ActiveRequest) -> bool {
        running.pass.as_ref().is_some_and(|pass| pass.id == self.id)
    }

    /// The rows of those that have left are gone.
    fn close_gaps(&mut self) {
        let mut tally = std::mem::take(&mut self.tally).into_iter();
        for member in &self.members {
            let these = tally.by_ref().take(member.rows);
            match member.request {
                Some(_) => self.tally.extend(these),
                None => these.for_each(drop),
            }
        }
        self.members.retain(|member| member.request.is_some());
    }
}
