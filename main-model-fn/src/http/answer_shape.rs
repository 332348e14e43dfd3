//! Shapes of answers: each API formats the same pieces in its own way.

use super::pieces::ChoicePiece;
use super::running::RunningGeneration;
use super::state::HttpState;
use axum::response::Response;
use axum::response::sse::Event;
use remoe_proto::{ErrorCode, ServiceError};
use serde::Serialize;

/// Format of one answer, as a whole or as a stream of server-sent events.
pub(super) trait AnswerShape: Send + Sync {
    /// Returns the request field that holds the prompt.
    fn prompt_field(&self) -> &'static str;

    /// Returns the operation name of OpenTelemetry's semantic conventions.
    fn operation(&self) -> &'static str {
        "chat"
    }

    /// Returns the events before the first piece.
    ///
    /// # Errors
    /// Fails if an event cannot be written as JSON.
    fn begin(&mut self, _state: &HttpState) -> Result<Vec<Event>, ServiceError> {
        Ok(Vec::new())
    }

    /// Returns the events of one piece.
    ///
    /// # Errors
    /// Fails if the bytes of a token are unknown, or if an event cannot be written as JSON.
    fn piece(&mut self, state: &HttpState, piece: ChoicePiece) -> Result<Vec<Event>, ServiceError>;

    /// Returns the events after all choices have ended.
    ///
    /// # Errors
    /// Fails if an event cannot be written as JSON.
    fn end(&mut self, state: &HttpState, running: &RunningGeneration) -> Result<Vec<Event>, ServiceError>;

    /// Returns the last event of a failed stream.
    ///
    /// # Errors
    /// Fails if the event cannot be written as JSON.
    fn failed(&mut self, state: &HttpState, error: ServiceError) -> Result<Event, ServiceError>;

    /// Returns the whole answer. `pieces` has one joined piece per choice.
    ///
    /// # Errors
    /// Fails if the bytes of a token are unknown.
    fn whole(
        &mut self,
        state: &HttpState,
        pieces: Vec<ChoicePiece>,
        running: &RunningGeneration,
    ) -> Result<Response, ServiceError>;
}

/// Writes `data` as a server-sent event, with `name` if given.
///
/// # Errors
/// Fails if the data cannot be written as JSON.
pub(super) fn event(name: Option<&str>, data: &impl Serialize) -> Result<Event, ServiceError> {
    let event = name.map_or_else(Event::default, |name| Event::default().event(name));
    event.json_data(data).map_err(|error| {
        ServiceError::new(ErrorCode::Internal, format!("cannot write an event of the stream: {error}"))
    })
}
