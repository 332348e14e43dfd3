//! Answers and chunks as JSON.

use super::exchange::Exchange;
use super::generate::{AnswerOptions, Route};
use super::logprobs::{ChatLogprobs, CompletionLogprobs, for_chat, for_completion};
use super::pieces::Piece;
use super::state::{HttpState, unix_seconds};
use super::text::TextFrontend;
use super::usage::Usage;
use crate::engine::request::FinishReason;
use remoe_http::random_id;
use remoe_wire::ServiceError;
use serde::Serialize;

/// An answer or a chunk of one.
#[derive(Debug, Serialize)]
pub(super) struct Answer {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<Choice>,
    /// Left out, null, or there: streams with a usage chunk have null in all others.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Choice {
    Whole(ChatChoice),
    Delta(ChatDelta),
    Completion(CompletionChoice),
}

#[derive(Debug, Serialize)]
struct ChatChoice {
    index: usize,
    message: ChatMessage,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Serialize)]
struct ChatMessage {
    role: &'static str,
    content: String,
    refusal: Option<String>,
}

#[derive(Debug, Serialize)]
struct ChatDelta {
    index: usize,
    delta: DeltaMessage,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Serialize)]
struct DeltaMessage {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

#[derive(Debug, Serialize)]
struct CompletionChoice {
    index: usize,
    /// Null without a tokenizer.
    text: Option<String>,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// Gives all parts of one answer the same id, time and model.
pub(super) struct Shape {
    route: Route,
    options: AnswerOptions,
    id: String,
    created: u64,
}

impl Shape {
    pub(super) fn new(route: Route, options: AnswerOptions) -> Self {
        let prefix = match route {
            Route::Chat => "chatcmpl",
            Route::Completions => "cmpl",
        };
        Self { route, options, id: format!("{prefix}-{}", random_id()), created: unix_seconds() }
    }

    /// The whole answer.
    ///
    /// # Errors
    /// A token's bytes cannot be told.
    pub(super) fn answer(
        &self,
        state: &HttpState,
        pieces: Vec<Piece>,
        exchange: &Exchange,
    ) -> Result<Answer, ServiceError> {
        let choices = pieces.into_iter().map(|piece| self.choice(state, piece));
        let usage = Usage::new(exchange, self.options.include_figures, state.account().as_deref());
        Ok(self.envelope(state, choices.collect::<Result<_, _>>()?, Some(Some(usage))))
    }

    /// A chunk of a stream.
    ///
    /// # Errors
    /// A token's bytes cannot be told.
    pub(super) fn chunk(&self, state: &HttpState, piece: Piece) -> Result<Answer, ServiceError> {
        let choice = self.choice(state, piece)?;
        Ok(self.envelope(state, vec![choice], self.options.include_usage.then_some(None)))
    }

    /// The chunk after all choices have ended, when asked for.
    pub(super) fn usage_chunk(&self, state: &HttpState, exchange: &Exchange) -> Option<Answer> {
        self.options.include_usage.then(|| {
            let usage = Usage::new(exchange, self.options.include_figures, state.account().as_deref());
            self.envelope(state, Vec::new(), Some(Some(usage)))
        })
    }

    fn envelope(&self, state: &HttpState, choices: Vec<Choice>, usage: Option<Option<Usage>>) -> Answer {
        Answer {
            id: self.id.clone(),
            object: match (self.route, self.options.stream) {
                (Route::Chat, false) => "chat.completion",
                (Route::Chat, true) => "chat.completion.chunk",
                (Route::Completions, _) => "text_completion",
            },
            created: self.created,
            model: state.options.model.clone(),
            choices,
            usage,
        }
    }

    fn choice(&self, state: &HttpState, piece: Piece) -> Result<Choice, ServiceError> {
        let text: Option<&dyn TextFrontend> = state.text.as_deref();
        let Piece { index, first, text: added, logprobs, token_ids, finish } = piece;
        let finish_reason = finish.map(FinishReason::as_str);
        let token_ids = self.options.token_ids.then_some(token_ids);
        // In a stream only the chunks that bring tokens have them.
        let logged = self.options.logprobs && (!self.options.stream || !logprobs.is_empty());
        Ok(match (self.route, self.options.stream) {
            (Route::Completions, _) => Choice::Completion(CompletionChoice {
                index,
                text: self.options.text.then_some(added),
                logprobs: logged.then(|| for_completion(text, &logprobs)).transpose()?,
                finish_reason,
                token_ids,
            }),
            (Route::Chat, false) => Choice::Whole(ChatChoice {
                index,
                message: ChatMessage { role: "assistant", content: added, refusal: None },
                logprobs: logged.then(|| for_chat(text, &logprobs)).transpose()?,
                finish_reason,
                token_ids,
            }),
            (Route::Chat, true) => Choice::Delta(ChatDelta {
                index,
                delta: DeltaMessage {
                    role: first.then_some("assistant"),
                    content: (first || !added.is_empty()).then_some(added),
                },
                logprobs: logged.then(|| for_chat(text, &logprobs)).transpose()?,
                finish_reason,
                token_ids,
            }),
        })
    }
}
