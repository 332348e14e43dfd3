//! Shapes of answers: every API makes its own of the same pieces.

use super::pieces::ChoicePiece;
use super::running::RunningGeneration;
use super::state::HttpState;
use axum::response::Response;
use axum::response::sse::Event;
use remoe_proto::{ErrorCode, ServiceError};
use serde::Serialize;

/// Shape of one answer, as a whole or as a stream of server-sent events.
pub(super) trait AnswerShape: Send + Sync {
    /// Field of requests that holds the prompt.
    fn prompt_field(&self) -> &'static str;

    /// Operation in the words of the semantic conventions.
    fn operation(&self) -> &'static str {
        "chat"
    }

    /// Returns the events before the first piece.
    ///
    /// # Errors
    /// An event cannot be written as JSON.
    fn begin(&mut self, _state: &HttpState) -> Result<Vec<Event>, ServiceError> {
        Ok(Vec::new())
    }

    /// Returns the events of one piece.
    ///
    /// # Errors
    /// A token's bytes cannot be told, or an event cannot be written as JSON.
    fn piece(&mut self, state: &HttpState, piece: ChoicePiece) -> Result<Vec<Event>, ServiceError>;

    /// Returns the events after all choices have ended.
    ///
    /// # Errors
    /// An event cannot be written as JSON.
    fn end(&mut self, state: &HttpState, running: &RunningGeneration) -> Result<Vec<Event>, ServiceError>;

    /// Returns the last event of a stream that failed.
    ///
    /// # Errors
    /// The event cannot be written as JSON.
    fn failed(&mut self, state: &HttpState, error: ServiceError) -> Result<Event, ServiceError>;

    /// Returns the whole answer of `pieces`, one of each choice.
    ///
    /// # Errors
    /// A token's bytes cannot be told.
    fn whole(
        &mut self,
        state: &HttpState,
        pieces: Vec<ChoicePiece>,
        running: &RunningGeneration,
    ) -> Result<Response, ServiceError>;
}

/// Writes `data` as an event, with a name where there is one.
///
/// # Errors
/// The data cannot be written as JSON.
pub(super) fn event(name: Option<&str>, data: &impl Serialize) -> Result<Event, ServiceError> {
    let event = name.map_or_else(Event::default, |name| Event::default().event(name));
    event.json_data(data).map_err(|error| {
        ServiceError::new(ErrorCode::Internal, format!("cannot write an event of the stream: {error}"))
    })
}
