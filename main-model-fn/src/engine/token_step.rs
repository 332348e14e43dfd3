//! One step of a request after a forward: samples tokens, reports them, and ends choices.

use super::active_request::{ActiveRequest, RequestStage, Vocabulary};
use super::choice::OpenChoice;
use super::request::{Delta, Event, FinishReason};
use super::sampling::{Draw, DrawError, DrawnToken, SequenceState, logprobs};
use super::text_stream::TextStream;
use super::thought::Thought;
use crate::backend::BackendError;
use crate::grammar::GrammarError;
use crate::pages::{PageCopy, SequenceCache};
use crate::transformer::Model;
use remoe_model::text::TextError;
use remoe_proto::{ErrorCode, ServiceError};
use std::collections::HashMap;
use std::time::Instant;

/// Failure of one request after a forward.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StepError {
    /// A page could not be copied for another choice.
    #[error(transparent)]
    Copy(#[from] BackendError),
    /// A token could not be converted to text.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The grammar exceeds its limits.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// No token could be sampled.
    #[error(transparent)]
    Draw(#[from] DrawError),
}

impl StepError {
    /// Reports if the cause is an infinity or a NaN in the model's logits.
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

impl ActiveRequest {
    /// Appends to `draws` the tokens to sample from the logits of an iteration's wanted rows. Returns their number.
    ///
    /// [`step`](Self::step) expects the outcomes in the same order.
    pub(crate) fn prepare_draws<'a>(
        &'a mut self,
        logits: &'a [f32],
        vocab: usize,
        draws: &mut Vec<Draw<'a>>,
    ) -> usize {
        let Self { queued, stage, initial_progress, prompt_tokens, ends, no_counts, .. } = self;
        let request = &queued.request;
        let draw = |choice, output: &'a HashMap<u32, u32>, generated: usize, grammar, forced, logits| Draw {
            logits,
            sampling: &request.sampling,
            state: SequenceState {
                choice,
                position: request.prompt.len() + generated,
                prompt: prompt_tokens,
                output,
                banned: if generated < request.stop.min_tokens { ends } else { &[] },
            },
            grammar,
            forced,
            logprobs: request.logprobs,
        };
        let before = draws.len();
        let mut rows = logits.chunks_exact(vocab);
        match stage {
            RequestStage::Prompt(cache) => {
                let is_done = cache.length() == request.prompt.len() && request.max_tokens > 0;
                if let Some(last) = rows.next_back().filter(|_| is_done) {
                    let mut progress = initial_progress.iter_mut();
                    let draw = |choice| draw(choice, &*no_counts, 0, progress.next(), None, last);
                    draws.extend((0..request.choices).map(draw));
                }
            }
            RequestStage::Choices(choices) => {
                let due = choices.iter_mut().filter(|choice| choice.is_due(&request.prompt));
                draws.extend(due.zip(rows).map(|(choice, row)| {
                    let generated = choice.output.len();
                    let forced = choice.thought.as_ref().and_then(Thought::forced_token);
                    draw(choice.index, &choice.counts, generated, choice.progress.as_mut(), forced, row)
                }));
            }
        }
        draws.len() - before
    }

    /// Processes the logits of an iteration's wanted rows and the sampled tokens: reports tokens and ends choices.
    ///
    /// Returns true when the request has ended.
    pub(crate) fn step(
        &mut self,
        logits: &[f32],
        outcomes: Vec<Result<DrawnToken, DrawError>>,
        vocab: usize,
        vocabulary: &Vocabulary,
        model: &mut dyn Model,
    ) -> Result<bool, StepError> {
        self.failure_backoff = None;
        let stage = std::mem::replace(&mut self.stage, RequestStage::Choices(Vec::new()));
        match stage {
            RequestStage::Prompt(cache) => {
                let done = cache.length();
                self.score_prompt(logits, vocab, done);
                if done < self.queued.request.prompt.len() {
                    self.stage = RequestStage::Prompt(cache);
                    return Ok(false);
                }
                let last = logits.len().saturating_sub(vocab);
                self.finish_prompt(cache, &logits[last..], outcomes, vocabulary, model)?;
            }
            RequestStage::Choices(choices) => {
                let mut open = Vec::with_capacity(choices.len());
                let mut outcomes = outcomes.into_iter();
                for choice in choices {
                    let is_due = choice.is_due(&self.queued.request.prompt);
                    match is_due.then(|| outcomes.next()).flatten() {
                        Some(outcome) => open.extend(self.push_token(choice, outcome?)?),
                        None => open.push(choice),
                    }
                }
                self.stage = RequestStage::Choices(open);
            }
        }
        let has_ended = matches!(&self.stage, RequestStage::Choices(choices) if choices.is_empty());
        if has_ended {
            self.finish();
        }
        Ok(has_ended)
    }

    /// Fails the request.
    pub(crate) fn fail(mut self, error: ServiceError) {
        if let Some(spans) = &mut self.spans {
            spans.fail(&self.figures, error.code.http_status().to_string());
        }
        self.emit(Event::Failed(error));
    }

    /// Computes the log-probabilities of the prompt tokens that the rows before position `done` predict.
    fn score_prompt(&mut self, logits: &[f32], vocab: usize, done: usize) {
        let Some(top) = self.queued.request.prompt_logprobs else {
            return;
        };
        if self.prompt_logprobs.is_empty() {
            self.prompt_logprobs.push(None);
        }
        let prompt = &self.queued.request.prompt;
        let first = done - logits.len() / vocab;
        for (row, logits) in logits.chunks_exact(vocab).enumerate() {
            if let Some(&next) = prompt.get(first + row + 1) {
                self.prompt_logprobs.push(Some(logprobs(logits, next, top)));
            }
        }
    }

    /// Reports the results of the prompt, and starts the choices.
    fn finish_prompt(
        &mut self,
        cache: SequenceCache,
        logits: &[f32],
        outcomes: Vec<Result<DrawnToken, DrawError>>,
        vocabulary: &Vocabulary,
        model: &mut dyn Model,
    ) -> Result<(), StepError> {
        if self.queued.request.prompt_logprobs.is_some() {
            let scored = std::mem::take(&mut self.prompt_logprobs);
            self.emit(Event::Prompt(scored));
        }
        if self.queued.request.inspect.is_some() {
            let mut inspection = std::mem::take(&mut self.inspection);
            inspection.last_logits = logits.to_vec();
            self.emit(Event::Inspection(Box::new(inspection)));
        }
        if self.queued.request.embeds {
            let positions = self.queued.request.prompt.len() as f64;
            let states = std::mem::take(&mut self.states);
            let mean = states.into_iter().map(|sum| (sum / positions) as f32).collect();
            self.emit(Event::Embedding(mean));
        }
        let count = self.queued.request.choices;
        if self.queued.request.max_tokens == 0 {
            for choice in 0..count {
                self.emit(Event::Finished { choice, reason: FinishReason::Length });
            }
            return Ok(());
        }
        let mut caches = Vec::with_capacity(count);
        for _ in 1..count {
            let (fork, page_copies) = cache.fork(self.copies.pop());
            for PageCopy { from, to } in page_copies {
                model.copy_page(from, to)?;
            }
            caches.push(fork);
        }
        caches.push(cache);
        let mut open = Vec::with_capacity(count);
        let mut progress = std::mem::take(&mut self.initial_progress).into_iter();
        for ((index, cache), outcome) in caches.into_iter().enumerate().zip(outcomes) {
            let text = vocabulary
                .tokenizer
                .as_ref()
                .map(|tokenizer| TextStream::new(tokenizer, &self.queued.request));
            let counts = HashMap::new();
            let progress = progress.next();
            let thought = self.queued.request.thought_budget.as_ref().map(Thought::new);
            let output = Vec::new();
            let choice =
                OpenChoice { index, cache, output, counts, text, progress, thought, iteration_rows: 0 };
            open.extend(self.push_token(choice, outcome?)?);
        }
        self.stage = RequestStage::Choices(open);
        Ok(())
    }

    /// Reports the next token of `choice`. Returns the choice unless the token ends it.
    fn push_token(
        &mut self,
        mut choice: OpenChoice,
        drawn: DrawnToken,
    ) -> Result<Option<OpenChoice>, StepError> {
        let DrawnToken { token, logprobs } = drawn;
        let is_early = choice.output.len() < self.queued.request.stop.min_tokens;
        if self.first_token.is_none() {
            let now = Instant::now();
            self.first_token = Some(now);
            if let Some(spans) = &mut self.spans {
                spans.record_first_token(&self.figures, now);
            }
        }
        self.figures.completion_tokens += 1;
        if !is_early && self.ends.contains(&token) {
            self.end(choice, FinishReason::Stop)?;
            return Ok(None);
        }
        *choice.counts.entry(token).or_default() += 1;
        choice.output.push(token);
        let may_stop = choice.output.len() >= self.queued.request.stop.min_tokens;
        let released = choice.text.as_mut().map(|text| text.push(token, may_stop)).transpose()?;
        let released = released.unwrap_or_default();
        if let Some(thought) = &mut choice.thought {
            thought.push(token, &released.text);
        }
        let is_complete = choice.progress.as_mut().map(|progress| progress.step(token)).transpose()?;
        self.emit(Event::Delta(Delta {
            choice: choice.index,
            token: Some(token),
            text: released.text,
            logprobs,
        }));
        if let Some(stop) = released.stopped {
            // Drops the held text: nothing behind the stop string may be released.
            choice.text = None;
            self.end(choice, FinishReason::StopString(stop))?;
            return Ok(None);
        }
        if is_complete == Some(true) {
            self.end(choice, FinishReason::Stop)?;
            return Ok(None);
        }
        if choice.output.len() >= self.queued.request.max_tokens {
            self.end(choice, FinishReason::Length)?;
            return Ok(None);
        }
        Ok(Some(choice))
    }

    /// Releases the remaining text of `choice`, and reports its end.
    fn end(&self, mut choice: OpenChoice, reason: FinishReason) -> Result<(), StepError> {
        let rest = choice.text.as_mut().map(TextStream::finish).transpose()?.unwrap_or_default();
        if !rest.text.is_empty() {
            self.emit(Event::Delta(Delta { choice: choice.index, text: rest.text, ..Delta::default() }));
        }
        let reason = rest.stopped.map_or(reason, FinishReason::StopString);
        self.emit(Event::Finished { choice: choice.index, reason });
        Ok(())
    }

    /// Reports the end of the request.
    fn finish(&mut self) {
        let now = Instant::now();
        let first = self.first_token.unwrap_or(now);
        self.figures.ttft = first - self.queued.submitted;
        self.figures.prefill = first - self.started.unwrap_or(self.queued.submitted);
        self.figures.decode = now - first;
        if let Some(spans) = &mut self.spans {
            spans.finish(&self.figures, now);
        }
        self.emit(Event::Done(self.figures.clone()));
    }

    fn emit(&self, event: Event) {
        // The channel has space for every event of the request. An error means that the client is gone, which the
        // next iteration notices.
        let _client_gone = self.queued.events.try_send(event);
    }
}
