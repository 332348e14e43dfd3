//! Answers in one piece.

use super::answer_shape::AnswerShape;
use super::pieces::{ChoicePiece, Pieces};
use super::running::RunningGeneration;
use super::state::HttpState;
use axum::response::{IntoResponse, Response};
use remoe_proto::ServiceError;

/// Joins the pieces until all choices have ended. Memory is bounded by `max_tokens`.
///
/// # Errors
/// Fails if the engine does.
pub(super) async fn respond(
    state: &HttpState,
    shape: &mut dyn AnswerShape,
    mut pieces: Pieces,
    mut running: RunningGeneration,
) -> Result<Response, ServiceError> {
    let mut whole: Vec<ChoicePiece> = (0..pieces.total()).map(ChoicePiece::empty).collect();
    let mut join = |piece: ChoicePiece| {
        if let Some(choice) = whole.get_mut(piece.index) {
            choice.join(piece);
        }
    };
    pieces.opening().into_iter().for_each(&mut join);
    while let Some((prompt, event)) = running.next().await? {
        pieces.convert_event(state, prompt, event)?.into_iter().for_each(&mut join);
    }
    running.reasoning_tokens = pieces.reasoning_tokens();
    Ok((running.gateway_headers(), shape.whole(state, whole, &running)?).into_response())
}
