//! Additions to a choice by an event.

use super::generate::{AnswerOptions, PreparedGeneration, Route};
use super::logprobs::{LoggedToken, characters};
use super::state::HttpState;
use super::tools::{CallDelta, ChoiceReader, ParsedDelta};
use crate::engine::request::{Delta, Event, FinishReason, Request, TokenLogprobs};
use remoe_proto::ServiceError;

/// An addition to one choice; in a stream each is a chunk, else they are joined.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ChoicePiece {
    /// The choice's index in the answer.
    pub(super) index: usize,
    /// The first piece of this choice.
    pub(super) first: bool,
    pub(super) text: String,
    /// Thoughts of the model.
    pub(super) reasoning: String,
    pub(super) calls: Vec<CallDelta>,
    pub(super) logprobs: Vec<LoggedToken>,
    pub(super) token_ids: Vec<u32>,
    /// Why the choice has ended, as answers say it.
    pub(super) finish: Option<&'static str>,
    /// The stop string that ended it, by its place in the request.
    pub(super) stopped_by: Option<usize>,
}

impl ChoicePiece {
    pub(super) fn empty(index: usize) -> Self {
        Self {
            index,
            first: false,
            text: String::new(),
            reasoning: String::new(),
            calls: Vec::new(),
            logprobs: Vec::new(),
            token_ids: Vec::new(),
            finish: None,
            stopped_by: None,
        }
    }

    /// Adds what came later.
    pub(super) fn join(&mut self, later: Self) {
        self.text.push_str(&later.text);
        self.reasoning.push_str(&later.reasoning);
        for call in later.calls {
            match self.calls.iter_mut().find(|begun| begun.index == call.index) {
                Some(begun) => begun.arguments.push_str(&call.arguments),
                None => self.calls.push(call),
            }
        }
        self.logprobs.extend(later.logprobs);
        self.token_ids.extend(later.token_ids);
        self.finish = later.finish.or(self.finish);
        self.stopped_by = later.stopped_by.or(self.stopped_by);
    }

    fn says_nothing(&self) -> bool {
        !self.first
            && self.text.is_empty()
            && self.reasoning.is_empty()
            && self.calls.is_empty()
            && self.logprobs.is_empty()
            && self.token_ids.is_empty()
            && self.finish.is_none()
    }
}

/// Turns events into pieces.
pub(super) struct Pieces {
    route: Route,
    options: AnswerOptions,
    choices: usize,
    echoes: Option<Vec<String>>,
    /// Per choice, where it may say anything else than content.
    readers: Vec<ChoiceReader>,
    /// Per choice, the characters of the text that its logged tokens gave so far.
    offsets: Vec<usize>,
    /// Per prompt, its first token, which no log-probability exists for.
    first_tokens: Vec<u32>,
}

impl Pieces {
    /// Returns the state to keep of a generation, and its requests for the engine.
    pub(super) fn new(generation: PreparedGeneration) -> (Self, Vec<Request>) {
        let requests = generation.requests;
        let choices = requests.first().map_or(1, |request| request.choices);
        let first = |request: &Request| request.prompt.first().copied().unwrap_or_default();
        let pieces = Self {
            route: generation.route,
            options: generation.options,
            choices,
            first_tokens: requests.iter().map(first).collect(),
            echoes: generation.echoes,
            readers: generation.form.iter().flat_map(|form| form.readers(choices)).collect(),
            offsets: vec![0; requests.len() * choices],
        };
        (pieces, requests)
    }

    /// Choices of the answer.
    pub(super) fn total(&self) -> usize {
        self.offsets.len()
    }

    /// Tokens of the thoughts so far.
    pub(super) fn reasoning_tokens(&self) -> usize {
        self.readers.iter().map(ChoiceReader::reasoning_tokens).sum()
    }

    /// Returns the pieces that come before the engine's first event: roles, and the repeated prompts unless their
    /// log-probabilities are to come with them.
    pub(super) fn opening(&self) -> Vec<ChoicePiece> {
        let echoes = self.echoes.as_ref().filter(|_| !self.options.logprobs);
        (0..self.total())
            .map(|index| ChoicePiece {
                first: self.route == Route::Chat,
                text: echoes.and_then(|echoes| echoes.get(index / self.choices)).cloned().unwrap_or_default(),
                ..ChoicePiece::empty(index)
            })
            .filter(|piece| !piece.says_nothing())
            .collect()
    }

    /// The pieces of an event of prompt `prompt`, none that says nothing.
    ///
    /// # Errors
    /// A token's bytes cannot be told.
    pub(super) fn of(
        &mut self,
        state: &HttpState,
        prompt: usize,
        event: Event,
    ) -> Result<Vec<ChoicePiece>, ServiceError> {
        let first = prompt * self.choices;
        let pieces = match event {
            Event::Delta(delta) => vec![self.delta(state, first + delta.choice, delta)?],
            Event::Finished { choice, reason } => self.finished(first + choice, reason),
            Event::Prompt(scored) => return self.prompt(state, prompt, scored),
            Event::Inspection(_) | Event::Embedding(_) | Event::Done(_) | Event::Failed(_) => {
                return Ok(Vec::new());
            }
        };
        Ok(pieces.into_iter().filter(|piece| !piece.says_nothing()).collect())
    }

    /// The end of a choice, after what was held back of its text.
    fn finished(&mut self, index: usize, reason: FinishReason) -> Vec<ChoicePiece> {
        let mut rest = ChoicePiece::empty(index);
        let mut has_called = false;
        if let Some(reader) = self.readers.get_mut(index) {
            let said = reader.finish(reason == FinishReason::Length);
            (rest.text, rest.reasoning) = (said.content, said.reasoning);
            has_called = reader.has_called();
        }
        let finish = match reason {
            FinishReason::Stop | FinishReason::StopString(_) if has_called => "tool_calls",
            reason => reason.as_str(),
        };
        let stopped_by = match reason {
            FinishReason::StopString(place) => Some(place),
            FinishReason::Stop | FinishReason::Length => None,
        };
        vec![rest, ChoicePiece { finish: Some(finish), stopped_by, ..ChoicePiece::empty(index) }]
    }

    fn delta(&mut self, state: &HttpState, index: usize, delta: Delta) -> Result<ChoicePiece, ServiceError> {
        let wanted = delta.logprobs.filter(|_| self.options.logprobs);
        let logprobs = wanted.map(|scored| self.log(state, index, scored.token, Some(scored)));
        let said = match self.readers.get_mut(index) {
            Some(reader) if delta.token.is_some() => reader.push_token(&delta.text),
            Some(reader) => reader.push(&delta.text),
            None => ParsedDelta { content: delta.text, ..ParsedDelta::default() },
        };
        Ok(ChoicePiece {
            text: said.content,
            reasoning: said.reasoning,
            calls: said.calls,
            logprobs: logprobs.transpose()?.into_iter().collect(),
            token_ids: delta.token.into_iter().filter(|_| self.options.token_ids).collect(),
            ..ChoicePiece::empty(index)
        })
    }

    /// The repeated prompt with its log-probabilities, for each of its choices.
    fn prompt(
        &mut self,
        state: &HttpState,
        prompt: usize,
        scored: Vec<Option<TokenLogprobs>>,
    ) -> Result<Vec<ChoicePiece>, ServiceError> {
        let echo = self.echoes.as_ref().and_then(|echoes| echoes.get(prompt));
        let Some(echo) = echo.filter(|_| self.options.logprobs).cloned() else {
            return Ok(Vec::new());
        };
        let first_token = self.first_tokens.get(prompt).copied().unwrap_or_default();
        let mut pieces = Vec::with_capacity(self.choices);
        for index in prompt * self.choices..(prompt + 1) * self.choices {
            let mut logprobs = Vec::with_capacity(scored.len());
            for scored in &scored {
                let token = scored.as_ref().map_or(first_token, |scored| scored.token);
                logprobs.push(self.log(state, index, token, scored.clone())?);
            }
            pieces.push(ChoicePiece { text: echo.clone(), logprobs, ..ChoicePiece::empty(index) });
        }
        Ok(pieces)
    }

    fn log(
        &mut self,
        state: &HttpState,
        index: usize,
        token: u32,
        scored: Option<TokenLogprobs>,
    ) -> Result<LoggedToken, ServiceError> {
        let mut offset = 0;
        if let (Some(text), Some(so_far)) = (&state.text, self.offsets.get_mut(index)) {
            offset = *so_far;
            if self.options.special_text || !text.is_special(token) {
                *so_far += characters(&text.token_bytes(token)?);
            }
        }
        Ok(LoggedToken { token, offset, scored })
    }
}
