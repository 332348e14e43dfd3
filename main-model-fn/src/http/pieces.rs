//! Pieces of an answer: what an engine event adds to a choice.

use super::generate::{AnswerOptions, PreparedGeneration, Route};
use super::logprobs::{LoggedToken, characters};
use super::state::HttpState;
use super::tools::{CallDelta, ChoiceReader, ParsedDelta};
use crate::engine::request::{Delta, Event, FinishReason, Request, TokenLogprobs};
use remoe_proto::ServiceError;

/// Addition to one choice. A stream sends each as a chunk; otherwise the pieces are joined.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ChoicePiece {
    /// Index of the choice in the answer.
    pub(super) index: usize,
    /// True for the first piece of the choice.
    pub(super) first: bool,
    pub(super) text: String,
    /// Thoughts (reasoning) of the model.
    pub(super) reasoning: String,
    pub(super) calls: Vec<CallDelta>,
    pub(super) logprobs: Vec<LoggedToken>,
    pub(super) token_ids: Vec<u32>,
    /// Reason for the end of the choice, as answers name it.
    pub(super) finish: Option<&'static str>,
    /// Stop string that ended the choice, by its index in the request.
    pub(super) stopped_by: Option<usize>,
}

impl ChoicePiece {
    /// Creates a piece that adds nothing.
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

    /// Appends a later piece of the same choice.
    pub(super) fn join(&mut self, later: Self) {
        self.text.push_str(&later.text);
        self.reasoning.push_str(&later.reasoning);
        for call in later.calls {
            match self.calls.iter_mut().find(|known| known.index == call.index) {
                Some(known) => known.arguments.push_str(&call.arguments),
                None => self.calls.push(call),
            }
        }
        self.logprobs.extend(later.logprobs);
        self.token_ids.extend(later.token_ids);
        self.finish = later.finish.or(self.finish);
        self.stopped_by = later.stopped_by.or(self.stopped_by);
    }

    fn is_empty(&self) -> bool {
        !self.first
            && self.text.is_empty()
            && self.reasoning.is_empty()
            && self.calls.is_empty()
            && self.logprobs.is_empty()
            && self.token_ids.is_empty()
            && self.finish.is_none()
    }
}

/// Converts engine events to pieces.
pub(super) struct Pieces {
    route: Route,
    options: AnswerOptions,
    choices: usize,
    echoes: Option<Vec<String>>,
    /// Reader of each choice, if answers may have more than content.
    readers: Vec<ChoiceReader>,
    /// Characters of text so far, per choice.
    offsets: Vec<usize>,
    /// First token of each prompt, which has no log-probability.
    first_tokens: Vec<u32>,
}

impl Pieces {
    /// Splits a generation into the state to keep and the requests for the engine.
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

    /// Returns the number of choices in the answer.
    pub(super) fn total(&self) -> usize {
        self.offsets.len()
    }

    /// Returns the number of tokens in thoughts so far.
    pub(super) fn reasoning_tokens(&self) -> usize {
        self.readers.iter().map(ChoiceReader::reasoning_tokens).sum()
    }

    /// Returns the pieces before the first event: roles, and repeated prompts unless they come with log-probabilities.
    pub(super) fn opening(&self) -> Vec<ChoicePiece> {
        let echoes = self.echoes.as_ref().filter(|_| !self.options.logprobs);
        (0..self.total())
            .map(|index| ChoicePiece {
                first: self.route == Route::Chat,
                text: echoes.and_then(|echoes| echoes.get(index / self.choices)).cloned().unwrap_or_default(),
                ..ChoicePiece::empty(index)
            })
            .filter(|piece| !piece.is_empty())
            .collect()
    }

    /// Returns the pieces of an event of prompt `prompt`, without empty ones.
    ///
    /// # Errors
    /// Fails if the bytes of a token are unknown.
    pub(super) fn convert_event(
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
        Ok(pieces.into_iter().filter(|piece| !piece.is_empty()).collect())
    }

    /// Returns the pieces at the end of a choice: the text that was held back, then the finish reason.
    fn finished(&mut self, index: usize, reason: FinishReason) -> Vec<ChoicePiece> {
        let mut rest = ChoicePiece::empty(index);
        let mut has_called = false;
        if let Some(reader) = self.readers.get_mut(index) {
            let parsed = reader.finish(reason == FinishReason::Length);
            (rest.text, rest.reasoning) = (parsed.content, parsed.reasoning);
            has_called = reader.has_called();
        }
        let finish = match reason {
            FinishReason::Stop | FinishReason::StopString(_) if has_called => "tool_calls",
            reason => reason.as_str(),
        };
        let stopped_by = match reason {
            FinishReason::StopString(index) => Some(index),
            FinishReason::Stop | FinishReason::Length => None,
        };
        vec![rest, ChoicePiece { finish: Some(finish), stopped_by, ..ChoicePiece::empty(index) }]
    }

    /// Returns the piece of a delta.
    fn delta(&mut self, state: &HttpState, index: usize, delta: Delta) -> Result<ChoicePiece, ServiceError> {
        let scored = delta.logprobs.filter(|_| self.options.logprobs);
        let logprobs = scored.map(|scored| self.logged_token(state, index, scored.token, Some(scored)));
        let parsed = match self.readers.get_mut(index) {
            Some(reader) if delta.token.is_some() => reader.push_token(&delta.text),
            Some(reader) => reader.push(&delta.text),
            None => ParsedDelta { content: delta.text, ..ParsedDelta::default() },
        };
        Ok(ChoicePiece {
            text: parsed.content,
            reasoning: parsed.reasoning,
            calls: parsed.calls,
            logprobs: logprobs.transpose()?.into_iter().collect(),
            token_ids: delta.token.into_iter().filter(|_| self.options.token_ids).collect(),
            ..ChoicePiece::empty(index)
        })
    }

    /// Returns the repeated prompt with its log-probabilities, once per choice.
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
                logprobs.push(self.logged_token(state, index, token, scored.clone())?);
            }
            pieces.push(ChoicePiece { text: echo.clone(), logprobs, ..ChoicePiece::empty(index) });
        }
        Ok(pieces)
    }

    /// Creates a logged token, and advances the choice's text offset by it.
    fn logged_token(
        &mut self,
        state: &HttpState,
        index: usize,
        token: u32,
        scored: Option<TokenLogprobs>,
    ) -> Result<LoggedToken, ServiceError> {
        let mut offset = 0;
        if let (Some(text), Some(characters_so_far)) = (&state.text, self.offsets.get_mut(index)) {
            offset = *characters_so_far;
            if self.options.special_text || !text.is_special(token) {
                *characters_so_far += characters(&text.token_bytes(token)?);
            }
        }
        Ok(LoggedToken { token, offset, scored })
    }
}
