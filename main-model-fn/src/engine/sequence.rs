//! A request inside the engine: its prompt on the way through the model, then its choices.

use super::handle::Job;
use super::request::{Delta, Event, ExpertTally, Figures, FinishReason, Inspection, Request, TokenLogprobs};
use super::sampling::{Drawn, logprobs, sample};
use super::text::TextStream;
use crate::transformer::{SequenceCache, Trace, Wanted};
use remoe_model::text::{TextError, Tokenizer};
use remoe_wire::{ErrorCode, ServiceError};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;
use tch::TchError;

/// What the engine knows about ends of sequences and text.
pub(crate) struct Vocabulary {
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    pub(crate) end_ids: Vec<u32>,
}

/// An admitted request.
pub(crate) struct Running {
    job: Job,
    stage: Stage,
    started: Instant,
    first_token: Option<Instant>,
    figures: Figures,
    inspection: Inspection,
    prompt_logprobs: Vec<Option<TokenLogprobs>>,
}

/// Why a request cannot go on after a forward.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StepError {
    /// A cache could not be copied for another choice.
    #[error("LibTorch: {0}")]
    Torch(#[from] TchError),
    /// A token could not be turned into text.
    #[error(transparent)]
    Text(#[from] TextError),
}

impl From<StepError> for ServiceError {
    fn from(error: StepError) -> Self {
        Self::new(ErrorCode::Internal, error.to_string())
    }
}

enum Stage {
    /// The prompt, of which the cache's length is done.
    Prompt(SequenceCache),
    /// Continuations that have not ended.
    Choices(Vec<Choice>),
}

struct Choice {
    index: usize,
    cache: SequenceCache,
    /// Drawn, not forwarded yet.
    last: u32,
    drawn: usize,
    counts: HashMap<u32, u32>,
    text: Option<TextStream>,
}

/// The rows that a request has in an iteration: one slice of tokens and a cache per sequence.
pub(crate) struct Rows<'a> {
    pub(crate) tokens: &'a [u32],
    pub(crate) cache: &'a mut SequenceCache,
    pub(crate) logits: Wanted,
}

impl Running {
    pub(crate) fn new(job: Job, cache: SequenceCache, now: Instant) -> Self {
        let figures = Figures {
            prompt_tokens: job.request.prompt.len(),
            queued: now - job.submitted,
            ..Figures::default()
        };
        Self {
            job,
            stage: Stage::Prompt(cache),
            started: now,
            first_token: None,
            figures,
            inspection: Inspection::default(),
            prompt_logprobs: Vec::new(),
        }
    }

    pub(crate) fn request(&self) -> &Request {
        &self.job.request
    }

    /// Whether nobody listens any more.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.job.events.is_closed()
    }

    /// Cache positions that the request may come to use.
    pub(crate) fn reserved(request: &Request) -> usize {
        (request.prompt.len() + request.max_tokens) * request.choices
    }

    /// Known tokens that are not forwarded yet, per sequence: a prompt's rest, or one per choice.
    pub(crate) fn pending(&self) -> Vec<usize> {
        match &self.stage {
            Stage::Prompt(cache) => vec![self.job.request.prompt.len() - cache.length() as usize],
            Stage::Choices(choices) => vec![1; choices.len()],
        }
    }

    /// Lends the tokens and caches of the next iteration; `rows` has one entry per pending one.
    pub(crate) fn rows<'a>(&'a mut self, rows: &[usize], out: &mut Vec<Rows<'a>>) {
        match &mut self.stage {
            Stage::Prompt(cache) => {
                let take = rows.first().copied().unwrap_or(0);
                if take == 0 {
                    return;
                }
                let prompt = &self.job.request.prompt;
                let done = cache.length() as usize;
                let logits = if self.job.request.prompt_logprobs.is_some() {
                    Wanted::All
                } else if done + take == prompt.len() {
                    Wanted::Last
                } else {
                    Wanted::None
                };
                out.push(Rows { tokens: &prompt[done..done + take], cache, logits });
            }
            Stage::Choices(choices) => out.extend(choices.iter_mut().map(|choice| Rows {
                tokens: std::slice::from_ref(&choice.last),
                cache: &mut choice.cache,
                logits: Wanted::Last,
            })),
        }
    }

    /// Counts `rows` forwarded rows and where their experts were computed.
    pub(crate) fn count(&mut self, tally: &[ExpertTally]) {
        self.figures.forwarded_positions += tally.len() as u64;
        for &row in tally {
            self.figures.experts += row;
        }
    }

    /// Keeps what an inspection asked for of the request's rows.
    pub(crate) fn keep_trace(&mut self, trace: &Trace, first: usize, rows: usize, row_bytes: usize) {
        let Some(level) = self.job.request.inspect else {
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

    /// Takes the logits of an iteration's wanted rows and goes on: draws tokens, reports them,
    /// ends choices. True when the request has ended.
    pub(crate) fn step(
        &mut self,
        logits: &mut [f32],
        vocab: usize,
        vocabulary: &Vocabulary,
    ) -> Result<bool, StepError> {
        let stage = std::mem::replace(&mut self.stage, Stage::Choices(Vec::new()));
        match stage {
            Stage::Prompt(cache) => {
                let done = cache.length() as usize;
                self.score_prompt(logits, vocab, done);
                if done < self.job.request.prompt.len() {
                    self.stage = Stage::Prompt(cache);
                    return Ok(false);
                }
                let last = logits.len().saturating_sub(vocab);
                self.prompt_done(cache, &mut logits[last..], vocabulary)?;
            }
            Stage::Choices(choices) => {
                let mut going = Vec::with_capacity(choices.len());
                for (choice, logits) in choices.into_iter().zip(logits.chunks_exact_mut(vocab)) {
                    going.extend(self.draw(choice, logits, vocabulary)?);
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
    pub(crate) fn fail(self, error: ServiceError) {
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
        logits: &mut [f32],
        vocabulary: &Vocabulary,
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
        let count = self.job.request.choices;
        if self.job.request.max_tokens == 0 {
            for choice in 0..count {
                self.emit(Event::Finished { choice, reason: FinishReason::Length });
            }
            return Ok(());
        }
        let mut caches = Vec::with_capacity(count);
        for _ in 1..count {
            caches.push(cache.fork()?);
        }
        caches.push(cache);
        let mut going = Vec::with_capacity(count);
        for (index, cache) in caches.into_iter().enumerate() {
            let text = vocabulary
                .tokenizer
                .as_ref()
                .map(|tokenizer| TextStream::new(tokenizer, &self.job.request.stop.strings));
            let choice = Choice { index, cache, last: 0, drawn: 0, counts: HashMap::new(), text };
            let mut logits = logits.to_vec();
            going.extend(self.draw(choice, &mut logits, vocabulary)?);
        }
        self.stage = Stage::Choices(going);
        Ok(())
    }

    /// Draws and reports the next token of `choice`; gives it back unless it has ended.
    fn draw(
        &mut self,
        mut choice: Choice,
        logits: &mut [f32],
        vocabulary: &Vocabulary,
    ) -> Result<Option<Choice>, StepError> {
        let request = &self.job.request;
        let stop = &request.stop;
        let early = choice.drawn < stop.min_tokens;
        let mut ends: Vec<u32> = stop.token_ids.clone();
        if !stop.ignore_eos {
            ends.extend(&vocabulary.end_ids);
        }
        let unmodified = request.logprobs.map(|top| (logits.to_vec(), top));
        let drawn = Drawn {
            choice: choice.index,
            position: request.prompt.len() + choice.drawn,
            prompt: &request.prompt,
            output: &choice.counts,
            banned: if early { &ends } else { &[] },
        };
        let token = sample(logits, &request.sampling, &drawn);
        let logprobs = unmodified.map(|(logits, top)| logprobs(&logits, token, top));
        self.first_token.get_or_insert_with(Instant::now);
        self.figures.completion_tokens += 1;
        choice.drawn += 1;
        if ends.contains(&token) && !early {
            self.end(choice, FinishReason::Stop)?;
            return Ok(None);
        }
        *choice.counts.entry(token).or_default() += 1;
        choice.last = token;
        let step = choice.text.as_mut().map(|text| text.push(token)).transpose()?.unwrap_or_default();
        self.emit(Event::Delta(Delta {
            choice: choice.index,
            token: Some(token),
            text: step.text,
            logprobs,
        }));
        if step.stopped {
            // Text is held no more: nothing after the stop string may leave.
            choice.text = None;
            self.end(choice, FinishReason::Stop)?;
            return Ok(None);
        }
        if choice.drawn >= self.job.request.max_tokens {
            self.end(choice, FinishReason::Length)?;
            return Ok(None);
        }
        Ok(Some(choice))
    }

    fn end(&self, mut choice: Choice, reason: FinishReason) -> Result<(), StepError> {
        let rest = choice.text.as_mut().map(TextStream::finish).transpose()?.unwrap_or_default();
        if !rest.text.is_empty() {
            self.emit(Event::Delta(Delta { choice: choice.index, text: rest.text, ..Delta::default() }));
        }
        let reason = if rest.stopped { FinishReason::Stop } else { reason };
        self.emit(Event::Finished { choice: choice.index, reason });
        Ok(())
    }

    fn finish(&mut self) {
        let now = Instant::now();
        let first = self.first_token.unwrap_or(now);
        self.figures.ttft = first - self.job.submitted;
        self.figures.prefill = first - self.started;
        self.figures.decode = now - first;
        self.emit(Event::Done(self.figures));
    }

    fn emit(&self, event: Event) {
        // The channel has room for every event of the request; an error means that the client is
        // gone, which the next iteration notices.
        let _client_gone = self.job.events.try_send(event);
    }
}
