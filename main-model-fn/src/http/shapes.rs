//! JSON answers and chunks of chats and completions in OpenAI's format.

use super::answer_shape::{AnswerShape, event};
use super::generate::{AnswerOptions, Route};
use super::logprobs::{ChatLogprobs, CompletionLogprobs, for_chat, for_completion};
use super::pieces::ChoicePiece;
use super::running::RunningGeneration;
use super::state::{HttpState, unix_seconds};
use super::text_frontend::TextFrontend;
use super::tools::CallDelta;
use super::usage::Usage;
use axum::Json;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use remoe_http::{ErrorBody, random_id};
use remoe_proto::ServiceError;
use serde::Serialize;

/// An answer, or a chunk of one.
#[derive(Debug, Serialize)]
pub(super) struct CompletionBody {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<ChoiceBody>,
    /// Absent, null or present: in streams with a usage chunk, it is null in all other chunks.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum ChoiceBody {
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
    /// Null for calls without content.
    content: Option<String>,
    /// Thoughts, under both names that clients know.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

#[derive(Debug, Serialize)]
struct ToolCall {
    /// Only in streams.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    /// Only in the first part of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: CalledFunction,
}

#[derive(Debug, Serialize)]
struct CalledFunction {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl ToolCall {
    fn new(call: CallDelta, is_part: bool) -> Self {
        let kind = call.start.is_some().then_some("function");
        let (id, name) = call.start.unzip();
        let function = CalledFunction { name, arguments: call.arguments };
        Self { index: is_part.then_some(call.index), id, kind, function }
    }
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
    /// Thoughts, under both names that clients know.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
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

/// Shape of one answer: all of its parts have the same id, time and model.
pub(super) struct ResponseIdentity {
    route: Route,
    options: AnswerOptions,
    id: String,
    created: u64,
}

impl AnswerShape for ResponseIdentity {
    fn prompt_field(&self) -> &'static str {
        match self.route {
            Route::Chat => "messages",
            Route::Completions => "prompt",
        }
    }

    fn operation(&self) -> &'static str {
        match self.route {
            Route::Chat => "chat",
            Route::Completions => "text_completion",
        }
    }

    fn piece(&mut self, state: &HttpState, piece: ChoicePiece) -> Result<Vec<Event>, ServiceError> {
        let choice = self.choice(state, piece)?;
        let chunk = self.envelope(state, vec![choice], self.options.include_usage.then_some(None));
        Ok(vec![event(None, &chunk)?])
    }

    /// Writes the usage chunk, if requested, and the end mark.
    fn end(&mut self, state: &HttpState, running: &RunningGeneration) -> Result<Vec<Event>, ServiceError> {
        let mut events = Vec::with_capacity(2);
        if self.options.include_usage {
            let usage = self.usage(state, running);
            events.push(event(None, &self.envelope(state, Vec::new(), Some(Some(usage))))?);
        }
        events.push(Event::default().data("[DONE]"));
        Ok(events)
    }

    fn failed(&mut self, _state: &HttpState, error: ServiceError) -> Result<Event, ServiceError> {
        event(None, &ErrorBody::from(error))
    }

    fn whole(
        &mut self,
        state: &HttpState,
        pieces: Vec<ChoicePiece>,
        running: &RunningGeneration,
    ) -> Result<Response, ServiceError> {
        let choices = pieces.into_iter().map(|piece| self.choice(state, piece));
        let choices = choices.collect::<Result<_, _>>()?;
        let usage = self.usage(state, running);
        Ok(Json(self.envelope(state, choices, Some(Some(usage)))).into_response())
    }
}

impl ResponseIdentity {
    pub(super) fn new(route: Route, options: AnswerOptions) -> Self {
        let prefix = match route {
            Route::Chat => "chatcmpl",
            Route::Completions => "cmpl",
        };
        Self { route, options, id: format!("{prefix}-{}", random_id()), created: unix_seconds() }
    }

    fn usage(&self, state: &HttpState, running: &RunningGeneration) -> Usage {
        // Completions have no thoughts.
        let reasoning_tokens = (self.route == Route::Chat).then_some(running.reasoning_tokens);
        let account = state.account();
        Usage::new(running, reasoning_tokens, self.options.include_figures, account.as_deref())
    }

    fn envelope(
        &self,
        state: &HttpState,
        choices: Vec<ChoiceBody>,
        usage: Option<Option<Usage>>,
    ) -> CompletionBody {
        CompletionBody {
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

    fn choice(&self, state: &HttpState, piece: ChoicePiece) -> Result<ChoiceBody, ServiceError> {
        let text: Option<&dyn TextFrontend> = state.text.as_deref();
        let ChoicePiece {
            index,
            first,
            text: added,
            reasoning,
            calls,
            logprobs,
            token_ids,
            finish: finish_reason,
            stopped_by: _,
        } = piece;
        let reasoning = Some(reasoning).filter(|reasoning| !reasoning.is_empty());
        let reasoning_content = reasoning.clone();
        let is_part = self.options.stream;
        let has_called = !calls.is_empty();
        let tool_calls = calls.into_iter().map(|call| ToolCall::new(call, is_part)).collect();
        let token_ids = self.options.token_ids.then_some(token_ids);
        // In a stream, only chunks with tokens have log-probabilities.
        let logged = self.options.logprobs && (!self.options.stream || !logprobs.is_empty());
        Ok(match (self.route, self.options.stream) {
            (Route::Completions, _) => ChoiceBody::Completion(CompletionChoice {
                index,
                text: self.options.text.then_some(added),
                logprobs: logged.then(|| for_completion(text, &logprobs)).transpose()?,
                finish_reason,
                token_ids,
            }),
            (Route::Chat, false) => ChoiceBody::Whole(ChatChoice {
                index,
                message: ChatMessage {
                    role: "assistant",
                    content: (!has_called || !added.is_empty()).then_some(added),
                    reasoning_content,
                    reasoning,
                    refusal: None,
                    tool_calls,
                },
                logprobs: logged.then(|| for_chat(text, &logprobs)).transpose()?,
                finish_reason,
                token_ids,
            }),
            (Route::Chat, true) => ChoiceBody::Delta(ChatDelta {
                index,
                delta: DeltaMessage {
                    role: first.then_some("assistant"),
                    // An answer that may have calls may lack content.
                    content: (first && !self.options.may_lack_content || !added.is_empty()).then_some(added),
                    reasoning_content,
                    reasoning,
                    tool_calls,
                },
                logprobs: logged.then(|| for_chat(text, &logprobs)).transpose()?,
                finish_reason,
                token_ids,
            }),
        })
    }
}
