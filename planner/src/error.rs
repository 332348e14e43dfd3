//! What can be wrong with a problem or a plan, and the answer that nothing fits.

use crate::answer::infeasible::Infeasible;

/// A field with a value that cannot be: which field, which value, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", render(field, message))]
pub struct FieldError {
    /// Where it stands, as `layers[0].expert_seconds.seconds[1][2]`; empty: the file as a whole.
    pub field: String,
    /// The value, what was expected, and what to do.
    pub message: String,
}

/// Longest field and longest message in bytes: they quote what somebody wrote.
const FIELD_BYTES: usize = 200;
const MESSAGE_BYTES: usize = 1000;

/// At most `limit` bytes of `text`, whole characters.
fn shown(mut text: String, limit: usize) -> String {
    let end = (0..=limit.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
    text
}

fn render(field: &str, message: &str) -> String {
    if field.is_empty() { message.to_owned() } else { format!("{field} {message}") }
}

impl FieldError {
    pub(crate) fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: shown(field.into(), FIELD_BYTES), message: shown(message.into(), MESSAGE_BYTES) }
    }

    /// From a parser that knows where it stood.
    pub(crate) fn from_json(error: serde_path_to_error::Error<serde_json::Error>) -> Self {
        let path = error.path().to_string();
        let path = if path == "." { String::new() } else { path };
        let message = error.into_inner().to_string();
        let missing = message.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        match missing {
            Some(name) if path.is_empty() => Self::new(name, "is missing; add it"),
            Some(name) => Self::new(format!("{path}.{name}"), "is missing; add it"),
            None if path.is_empty() => Self::new("", format!("invalid: {message}")),
            None => Self::new(path, format!("is invalid: {message}")),
        }
    }
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The problem states something that cannot be.
    #[error("problem: {0}")]
    Problem(FieldError),
    /// The plan does not belong to the problem.
    #[error("plan: {0}")]
    Plan(FieldError),
    /// No plan keeps every limit.
    #[error("{0}")]
    Infeasible(Box<Infeasible>),
}
