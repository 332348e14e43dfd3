//! A request inside the engine: its prompt on the way through the model, then its choices.

use super::choice::OpenChoice;
use super::failure_backoff::FailureBackoff;
use super::handle::Job;
use super::request::{
    Delta, Event, ExpertTally, ExpertTime, Figures, FinishReason, Inspection, Priority, Request,
    TokenLogprobs,
};
use super::sampling::{Draw, DrawError, Drawn, DrawnToken, distinct, logprobs};
use super::scheduler::Pending;
use super::spans::Spans;
use super::text_stream::TextStream;
use super::thought::Thought;
use crate::backend::BackendError;
use crate::grammar::{Grammar, GrammarError, GrammarProgress};
use crate::pages::{BlockPages, SequenceCache};
use crate::records::{Recording, Step};
use crate::transformer::{Model, OutputRows, Trace};
use remoe_billing::{BilledRequest, Phase, RequestWork};
use remoe_model::text::{TextError, Tokenizer};
use remoe_proto::{ErrorCode, ServiceError};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokenizer and end-of-sequence ids that the engine uses.
pub(crate) struct Vocabulary {
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    pub(crate) end_ids: Vec<u32>,
}

/// Rows of a prompt whose every logit is wanted, in one iteration: a row of logits is as long as the
/// vocabulary.
const SCORED_CHUNK: usize = 64;

/// An admitted request.
pub(crate) struct ActiveRequest {
    /// Never used twice.
    pub(crate) id: u64,
    pub(super) job: Job,
    pub(super) stage: Stage,
    /// For the last page of the prompt, of which every choice needs its own.
    pub(super) copies: Vec<BlockPages>,
    /// When its first rows were taken into an iteration.
    started: Option<Instant>,
    /// Rows in the layered prefill that the request is part of.
    pub(super) pass: Option<PassRows>,
    first_token: Option<Instant>,
    pub(super) figures: Figures,
    pub(super) inspection: Inspection,
    pub(super) prompt_logprobs: Vec<Option<TokenLogprobs>>,
    /// The sum of the prompt's hidden states so far, position by position; empty before the first.
    pub(super) states: Vec<f64>,
    /// Tokens that end a choice.
    ends: Vec<u32>,
    /// For the repetition penalty; empty without one.
    prompt_tokens: Vec<u32>,
    /// Progress of the choices that are to come, if there is a grammar.
    beginnings: Vec<GrammarProgress>,
    /// Token counts of a choice without tokens.
    no_counts: HashMap<u32, u32>,
    /// Where activations are recorded.
    pub(super) recording: Option<Recording>,
    /// Failed iterations since it last went on.
    failure_backoff: Option<FailureBackoff>,
    /// Where it is recorded.
    pub(super) spans: Option<Box<Spans>>,
}

impl BilledRequest for ActiveRequest {
    fn work(&mut self) -> (&mut RequestWork, Phase) {
        let phase = match &self.stage {
            Stage::Prompt(_) => Phase::Prefill,
            Stage::Choices(_) => Phase::Decode,
        };
        (&mut *self.figures.work, phase)
    }
}

/// Why a request cannot go on after a forward.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StepError {
    /// A page could not be copied for another choice.
    #[error(transparent)]
    Copy(#[from] BackendError),
    /// A token could not be turned into text.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A grammar asks for too much.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// No token could be drawn.
    #[error(transparent)]
    Draw(#[from] DrawError),
}

impl StepError {
    /// Reports if the model's logits have an infinity or a NaN.
    pub(crate) fn is_not_finite(&self) -> bool {
        matches!(self, Self::Draw(DrawError::NotFinite))
    }
}

impl From<StepError> for ServiceError {
    fn from(error: StepError) -> Self {
        let code = match error {
            StepError::Grammar(_) | StepError::Draw(DrawError::Grammar(_)) => ErrorCode::InvalidArgument,
            StepError::Copy(_) | StepError::Text(_) | StepError::Draw(DrawError::NotFinite) => {
                ErrorCode::Internal
            }
        };
        Self::new(code, error.to_string())
    }
}

pub(super) enum Stage {
    /// The prompt, of which the cache's length is done.
    Prompt(SequenceCache),
    /// Continuations that have not ended.
    Choices(Vec<OpenChoice>),
}

/// The rows that a request has in an iteration: one slice of tokens and a cache per sequence.
pub(crate) struct IterationRows<'a> {
    pub(crate) tokens: &'a [u32],
    pub(crate) cache: &'a mut SequenceCache,
    pub(crate) wanted: OutputRows,
}

/// A request's rows in a layered prefill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PassRows {
    /// Which prefill.
    pub(super) id: u64,
    /// By sequence.
    pub(super) rows: Vec<usize>,
}

/// A request's part of an iteration, in rows.
pub(crate) struct RowShare {
    /// The first of them among all rows.
    pub(crate) first: usize,
    pub(crate) rows: usize,
    /// Rows whose logits are wanted.
    pub(crate) logits: usize,
    /// Rows whose hidden states are wanted.
    pub(crate) states: usize,
}

impl RowShare {
    /// Returns the range of its rows among all.
    pub(crate) fn range(&self) -> Range<usize> {
        self.first..self.first + self.rows
    }

    pub(crate) fn of(lent: &[IterationRows<'_>], first: usize) -> Self {
        let mut share = Self { first, rows: 0, logits: 0, states: 0 };
        for IterationRows { tokens, wanted, .. } in lent {
            share.rows += tokens.len();
            match wanted {
                OutputRows::None => (),
                OutputRows::Last | OutputRows::Likeliest(_) => share.logits += 1,
                OutputRows::All => share.logits += tokens.len(),
                OutputRows::States => share.states += tokens.len(),
            }
        }
        share
    }
}

impl ActiveRequest {
    pub(crate) fn new(id: u64, mut job: Job, vocabulary: &Vocabulary, recording: Option<Recording>) -> Self {
        let activations = job.request.activations.take();
        let request = &job.request;
        let figures = Figures { prompt_tokens: request.prompt.len(), activations, ..Figures::default() };
        let mut ends = request.stop.token_ids.clone();
        if !request.stop.ignore_eos {
            ends.extend(&vocabulary.end_ids);
        }
        let prompt_tokens = match request.sampling.repetition_penalty {
            1.0 => Vec::new(),
            _ => distinct(&request.prompt),
        };
        let cache = SequenceCache::new(request.tenant);
        let beginnings = request.grammar.iter().cycle().take(request.choices).map(Grammar::begin).collect();
        Self {
            id,
            job,
            stage: Stage::Prompt(cache),
            copies: Vec::new(),
            started: None,
            pass: None,
            first_token: None,
            figures,
            inspection: Inspection::default(),
            prompt_logprobs: Vec::new(),
            states: Vec::new(),
            ends,
            prompt_tokens,
            beginnings,
            no_counts: HashMap::new(),
            recording,
            failure_backoff: None,
            spans: None,
        }
    }

    /// Records that its first rows are about to be computed, if they were not before.
    pub(super) fn start(&mut self, now: Instant) {
        if self.started.is_none() {
            self.started = Some(now);
            self.figures.queued = now - self.job.submitted;
            self.spans = Spans::begin(&self.job.request.span, self.job.submitted, now);
        }
    }

    /// Reports if it has waited for its first row for longer than it may.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.started.is_none() && self.job.is_overdue(now)
    }

    /// True for a request that gives way to interactive ones.
    pub(super) fn is_batch(&self) -> bool {
        self.request().priority == Priority::Batch
    }

    pub(crate) fn request(&self) -> &Request {
        &self.job.request
    }

    /// Reports if its client has a token of it.
    pub(super) fn has_answered(&self) -> bool {
        self.first_token.is_some()
    }

    /// Reports if every row of the prompt has to go through the model: the prefix cache does not hold what is
    /// recorded, inspected or scored of them.
    pub(super) fn wants_prompt_rows(&self) -> bool {
        let request = self.request();
        self.recording.is_some()
            || request.inspect.is_some()
            || request.prompt_logprobs.is_some()
            || request.embeds
    }

    /// Reports if the ids of the experts of its rows are wanted.
    pub(super) fn wants_routing(&self) -> bool {
        self.recording.is_some() || self.figures.activations.is_some()
    }

    /// Tokens of a prompt that is about to begin that were looked for among what is kept, and those found.
    pub(crate) fn prefix(&self) -> (usize, usize) {
        match self.stage {
            Stage::Prompt(_) if !self.wants_prompt_rows() => {
                (self.request().prompt.len(), self.figures.cached_tokens)
            }
            _ => (0, 0),
        }
    }

    /// Reports if the receiver of its events has gone.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.job.events.is_closed()
    }

    pub(crate) fn failure_backoff(&self) -> Option<FailureBackoff> {
        self.failure_backoff
    }

    /// The iteration that began at `started` has failed for want of experts that the request needs.
    /// False when it has borne that for too long.
    pub(crate) fn set_back(&mut self, started: Instant) -> bool {
        self.failure_backoff = FailureBackoff::after(self.failure_backoff, started, Instant::now());
        if let Some(spans) = &self.spans {
            spans.event("experts out of reach");
        }
        self.failure_backoff.is_some()
    }

    /// Reports if it takes part in decode iterations: each of its sequences has at most one row to forward, and it is
    /// part of no layered prefill.
    pub(super) fn decodes(&self) -> bool {
        let prompt = &self.request().prompt;
        self.pass.is_none()
            && match &self.stage {
                Stage::Prompt(cache) => cache.length() + 1 == prompt.len(),
                Stage::Choices(choices) => choices.iter().all(|choice| choice.pending(prompt) <= 1),
            }
    }

    /// Records that its prompt has gone on for `time` since a failure, which does not count as time without progress.
    pub(super) fn went_on(&mut self, time: Duration) {
        if let Some(failure_backoff) = &mut self.failure_backoff {
            failure_backoff.went_on(time);
        }
    }

    /// Returns the rows that each sequence could forward now: a prompt's rest, or one row per choice, or all that a
    /// choice has to forward again. At most `chunk` rows of a sequence go together.
    pub(crate) fn pending(&self, chunk: usize) -> Vec<Pending> {
        let prompt = &self.request().prompt;
        match &self.stage {
            Stage::Prompt(cache) => {
                let scored = self.request().prompt_logprobs.is_some();
                let chunk = if scored { chunk.min(SCORED_CHUNK) } else { chunk };
                vec![Pending { rows: prompt.len() - cache.length(), chunk }]
            }
            Stage::Choices(choices) => {
                choices.iter().map(|choice| Pending { rows: choice.pending(prompt), chunk }).collect()
            }
        }
    }

    /// Lends the tokens and caches of the next iteration; `rows` has one entry per pending one.
    pub(crate) fn rows<'a>(&'a mut self, rows: &[usize], out: &mut Vec<IterationRows<'a>>) {
        let last = self.job.request.likeliest().map_or(OutputRows::Last, OutputRows::Likeliest);
        let prompt = self.job.request.prompt.as_slice();
        match &mut self.stage {
            Stage::Prompt(cache) => {
                let take = rows.first().copied().unwrap_or(0);
                if take == 0 {
                    return;
                }
                let done = cache.length();
                let wanted = if self.job.request.embeds {
                    OutputRows::States
                } else if self.job.request.prompt_logprobs.is_some() {
                    OutputRows::All
                } else if done + take == prompt.len() {
                    last
                } else {
                    OutputRows::None
                };
                out.push(IterationRows { tokens: &prompt[done..done + take], cache, wanted });
            }
            Stage::Choices(choices) => {
                for (choice, &take) in choices.iter_mut().zip(rows) {
                    let (tokens, cache, complete) = choice.take(prompt, take);
                    if take > 0 {
                        let wanted = if complete { last } else { OutputRows::None };
                        out.push(IterationRows { tokens, cache, wanted });
                    }
                }
            }
        }
    }

    /// Counts forwarded rows, where their experts were computed, the `time` of the iteration's experts
    /// and, for a record, which they were; `first` is the request's first row of the iteration.
    pub(crate) fn count(
        &mut self,
        tally: &[ExpertTally],
        time: ExpertTime,
        trace: Option<&Trace>,
        first: usize,
    ) {
        match &self.stage {
            Stage::Prompt(_) => self.figures.prefill_experts += time,
            Stage::Choices(_) => self.figures.decode_experts += time,
        }
        for (row, step) in self.new_rows(tally.len()) {
            self.figures.forwarded_positions += 1;
            self.figures.experts += tally[row];
            let Some(trace) = trace else { continue };
            if let Some(recording) = &mut self.recording {
                recording.count(&trace.routing, first + row, step);
            }
            if let Some(activations) = &mut self.figures.activations {
                let layers = trace.routing.iter().filter_map(|layer| layer.tokens.get(first + row));
                activations.count(step.phase(), layers.map(Vec::as_slice));
            }
        }
    }

    /// Returns those of the request's `rows` of the iteration that had not been forwarded before a preemption.
    fn new_rows(&self, rows: usize) -> Vec<(usize, Step)> {
        match &self.stage {
            Stage::Prompt(_) => (0..rows).map(|row| (row, Step::Prefill)).collect(),
            Stage::Choices(choices) => {
                let mut end = 0;
                let mut new = Vec::with_capacity(choices.len());
                for choice in choices {
                    end += choice.taken;
                    if choice.is_due(&self.job.request.prompt) {
                        new.push((end - 1, Step::Decode));
                    }
                }
                new
            }
        }
    }

    /// The request's activation record, once it has ended.
    pub(crate) fn into_recording(self) -> Option<Recording> {
        self.recording
    }

    /// Keeps what an inspection asked for of the request's rows.
    pub(crate) fn keep_trace(&mut self, trace: &Trace, first: usize, rows: usize, row_bytes: usize) {
        let (Some(level), Stage::Prompt(_)) = (self.job.request.inspect, &self.stage) else {
            return;
        };
        for (index, layer) in trace.routing.iter().enumerate() {
            if self.inspection.routing.len() <= index {
                self.inspection
                    .routing
                    .push(super::request::LayerRouting { layer: layer.layer, tokens: Vec::new() });
            }
            let tokens = layer.tokens[first..first + rows].iter().cloned();
            self.inspection.routing[index].tokens.extend(tokens);
        }
        if level == super::request::InspectLevel::Hidden {
            let bytes = &trace.hidden[first * row_bytes..(first + rows) * row_bytes];
            self.inspection.hidden.extend_from_slice(bytes);
        }
    }

    /// Adds hidden states of the prompt's next positions, `hidden` elements each, to their sum. A position is added as
    /// a whole and after those before it: no cut of the prompt changes the sum.
    pub(super) fn add_states(&mut self, states: &[f32], hidden: usize) {
        for row in states.chunks_exact(hidden) {
            self.states.resize(hidden, 0.0);
            self.states.iter_mut().zip(row).for_each(|(sum, state)| *sum += f64::from(*state));
        }
    }

    /// Adds to `draws` what is to be drawn from the logits of an iteration's wanted rows; [`step`](Self::step)
    /// wants the outcomes in this order. Returns how many there are.
    pub(crate) fn draws<'a>(
        &'a mut self,
        logits: &'a [f32],
        vocab: usize,
        draws: &mut Vec<Draw<'a>>,
    ) -> usize {
        let Self { job, stage, beginnings, prompt_tokens, ends, no_counts, .. } = self;
        let request = &job.request;
        let draw = |choice, output: &'a HashMap<u32, u32>, drawn: usize, grammar, given, logits| Draw {
            logits,
            sampling: &request.sampling,
            drawn: Drawn {
                choice,
                position: request.prompt.len() + drawn,
                prompt: prompt_tokens,
                output,
                banned: if drawn < request.stop.min_tokens { ends } else { &[] },
            },
            grammar,
            given,
            logprobs: request.logprobs,
        };
        let before = draws.len();
        let mut rows = logits.chunks_exact(vocab);
        match stage {
            Stage::Prompt(cache) => {
                let is_done = cache.length() == request.prompt.len() && request.max_tokens > 0;
                if let Some(last) = rows.next_back().filter(|_| is_done) {
                    let mut beginnings = beginnings.iter_mut();
                    let draw = |choice| draw(choice, &*no_counts, 0, beginnings.next(), None, last);
                    draws.extend((0..request.choices).map(draw));
                }
            }
            Stage::Choices(choices) => {
                let due = choices.iter_mut().filter(|choice| choice.is_due(&request.prompt));
                draws.extend(due.zip(rows).map(|(choice, row)| {
                    let drawn = choice.output.len();
                    let given = choice.thought.as_ref().and_then(Thought::next);
                    draw(choice.index, &choice.counts, drawn, choice.progress.as_mut(), given, row)
                }));
            }
        }
        draws.len() - before
    }

    /// Takes the logits of an iteration's wanted rows and what was drawn from them, and goes on: reports
    /// tokens, ends choices. True when the request has ended.
    pub(crate) fn step(
        &mut self,
        logits: &[f32],
        outcomes: Vec<Result<DrawnToken, DrawError>>,
        vocab: usize,
        vocabulary: &Vocabulary,
        model: &mut dyn Model,
    ) -> Result<bool, StepError> {
        self.failure_backoff = None;
        let stage = std::mem::replace(&mut self.stage, Stage::Choices(Vec::new()));
        match stage {
            Stage::Prompt(cache) => {
                let done = cache.length();
                self.score_prompt(logits, vocab, done);
                if done < self.job.request.prompt.len() {
                    self.stage = Stage::Prompt(cache);
                    return Ok(false);
                }
                let last = logits.len().saturating_sub(vocab);
                self.prompt_done(cache, &logits[last..], outcomes, vocabulary, model)?;
            }
            Stage::Choices(choices) => {
                let mut going = Vec::with_capacity(choices.len());
                let mut outcomes = outcomes.into_iter();
                for choice in choices {
                    let due = choice.is_due(&self.job.request.prompt);
                    match due.then(|| outcomes.next()).flatten() {
                        Some(outcome) => going.extend(self.take(choice, outcome?)?),
                        None => going.push(choice),
                    }
                }
                self.stage = Stage::Choices(going);
            }
        }
        let ended = matches!(&self.stage, Stage::Choices(choices) if choices.is_empty());
        if ended {
            self.finish();
        }
        Ok(ended)
    }

    /// Ends the request with an error.
    pub(crate) fn fail(mut self, error: ServiceError) {
        if let Some(spans) = &mut self.spans {
            spans.fail(&self.figures, error.code.http_status().to_string());
        }
        self.emit(Event::Failed(error));
    }

    /// Log-probabilities of the prompt tokens that the rows before position `done` predict.
    fn score_prompt(&mut self, logits: &[f32], vocab: usize, done: usize) {
        let Some(top) = self.job.request.prompt_logprobs else {
            return;
        };
        if self.prompt_logprobs.is_empty() {
            self.prompt_logprobs.push(None);
        }
        let prompt = &self.job.request.prompt;
        let first = done - logits.len() / vocab;
        for (row, logits) in logits.chunks_exact(vocab).enumerate() {
            if let Some(&next) = prompt.get(first + row + 1) {
                self.prompt_logprobs.push(Some(logprobs(logits, next, top)));
            }
        }
    }

    fn prompt_done(
        &mut self,
        cache: SequenceCache,
        logits: &[f32],
        outcomes: Vec<Result<DrawnToken, DrawError>>,
        vocabulary: &Vocabulary,
        model: &mut dyn Model,
    ) -> Result<(), StepError> {
        if self.job.request.prompt_logprobs.is_some() {
            let scored = std::mem::take(&mut self.prompt_logprobs);
            self.emit(Event::Prompt(scored));
        }
        if self.job.request.inspect.is_some() {
            let mut inspection = std::mem::take(&mut self.inspection);
            inspection.last_logits = logits.to_vec();
            self.emit(Event::Inspection(Box::new(inspection)));
        }
        if self.job.request.embeds {
            let positions = self.job.request.prompt.len() as f64;
            let states = std::mem::take(&mut self.states);
            let mean = states.into_iter().map(|sum| (sum / positions) as f32).collect();
            self.emit(Event::Embedding(mean));
        }
        let count = self.job.request.choices;
        if self.job.request.max_tokens == 0 {
            for choice in 0..count {
                self.emit(Event::Finished { choice, reason: FinishReason::Length });
            }
            return Ok(());
        }
        let mut caches = Vec::with_capacity(count);
        for _ in 1..count {
            let (fork, copied) = cache.fork(self.copies.pop());
            for (from, to) in copied {
                model.copy_page(from, to)?;
            }
            caches.push(fork);
        }
        caches.push(cache);
        let mut going = Vec::with_capacity(count);
        let mut beginnings = std::mem::take(&mut self.beginnings).into_iter();
        for ((index, cache), outcome) in caches.into_iter().enumerate().zip(outcomes) {
            let text =
                vocabulary.tokenizer.as_ref().map(|tokenizer| TextStream::new(tokenizer, &self.job.request));
            let counts = HashMap::new();
            let progress = beginnings.next();
            let thought = self.job.request.thought_budget.as_ref().map(Thought::new);
            let output = Vec::new();
            let choice = OpenChoice { index, cache, output, counts, text, progress, thought, taken: 0 };
            going.extend(self.take(choice, outcome?)?);
        }
        self.stage = Stage::Choices(going);
        Ok(())
    }

    /// Takes and reports the next token of `choice`; gives it back unless it has ended.
    fn take(&mut self, mut choice: OpenChoice, outcome: DrawnToken) -> Result<Option<OpenChoice>, StepError> {
        let DrawnToken { token, logprobs } = outcome;
        let early = choice.output.len() < self.job.request.stop.min_tokens;
        if self.first_token.is_none() {
            let now = Instant::now();
            self.first_token = Some(now);
            if let Some(spans) = &mut self.spans {
                spans.first_token(&self.figures, now);
            }
        }
        self.figures.completion_tokens += 1;
        if !early && self.ends.contains(&token) {
            self.end(choice, FinishReason::Stop)?;
            return Ok(None);
        }
        *choice.counts.entry(token).or_default() += 1;
        choice.output.push(token);
        let may_stop = choice.output.len() >= self.job.request.stop.min_tokens;
        let step = choice.text.as_mut().map(|text| text.push(token, may_stop)).transpose()?;
        let step = step.unwrap_or_default();
        if let Some(thought) = &mut choice.thought {
            thought.take(token, &step.text);
        }
        let complete = choice.progress.as_mut().map(|progress| progress.step(token)).transpose()?;
        self.emit(Event::Delta(Delta {
            choice: choice.index,
            token: Some(token),
            text: step.text,
            logprobs,
        }));
        if let Some(stop) = step.stopped {
            // Text is held no more: nothing after the stop string may leave.
            choice.text = None;
            self.end(choice, FinishReason::StopString(stop))?;
            return Ok(None);
        }
        if complete == Some(true) {
            self.end(choice, FinishReason::Stop)?;
            return Ok(None);
        }
        if choice.output.len() >= self.job.request.max_tokens {
            self.end(choice, FinishReason::Length)?;
            return Ok(None);
        }
        Ok(Some(choice))
    }

    fn end(&self, mut choice: OpenChoice, reason: FinishReason) -> Result<(), StepError> {
        let rest = choice.text.as_mut().map(TextStream::finish).transpose()?.unwrap_or_default();
        if !rest.text.is_empty() {
            self.emit(Event::Delta(Delta { choice: choice.index, text: rest.text, ..Delta::default() }));
        }
        let reason = rest.stopped.map_or(reason, FinishReason::StopString);
        self.emit(Event::Finished { choice: choice.index, reason });
        Ok(())
    }

    fn finish(&mut self) {
        let now = Instant::now();
        let first = self.first_token.unwrap_or(now);
        self.figures.ttft = first - self.job.submitted;
        self.figures.prefill = first - self.started.unwrap_or(self.job.submitted);
        self.figures.decode = now - first;
        if let Some(spans) = &mut self.spans {
            spans.finish(&self.figures, now);
        }
        self.emit(Event::Done(self.figures.clone()));
    }

    fn emit(&self, event: Event) {
        // The channel has room for every event of the request; an error means that the client is
        // gone, which the next iteration notices.
        let _client_gone = self.job.events.try_send(event);
    }
}
