//! `reasoning_effort`: how much the model is to think, where its template tells it.

use super::fields::Given;
use remoe_wire::ServiceError;

/// As OpenAI has them.
const EFFORTS: [&str; 5] = ["none", "minimal", "low", "medium", "high"];

/// What the chat `template` is told of what was `given`; none: nothing.
///
/// # Errors
/// It is none of [`EFFORTS`], or the template does not read it and it asks for any thinking.
pub(super) fn of(given: &Given, template: Option<&str>) -> Result<Option<&'static str>, ServiceError> {
    const FIELD: &str = "reasoning_effort";
    let effort = match given {
        Given::Nothing => return Ok(None),
        Given::Text(text) => EFFORTS.into_iter().find(|effort| effort == text),
        Given::Something => None,
    };
    let Some(effort) = effort else {
        let message = format!("invalid `{FIELD}`: expected one of {}", EFFORTS.join(", "));
        return Err(ServiceError::invalid(FIELD, message));
    };
    let is_read = template.is_some_and(|template| template.contains(FIELD));
    if !is_read && effort != "none" {
        let message = format!("`{FIELD}` is not supported by the model's chat template; omit it");
        return Err(ServiceError::invalid(FIELD, message));
    }
    Ok(is_read.then_some(effort))
}
