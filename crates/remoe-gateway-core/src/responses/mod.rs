//! Responses that later requests go on from: stored for each tenant, within bounds.
//!
//! ```text
//! request ─▶ request: previous_response_id becomes the items that it stands for ─▶ main function
//! client ◀── recording: the answer, as it passes ─▶ store (memory) ─▶ folder (files, written behind)
//! ```
//!
//! A stored response has all items up to its own: those of the responses before it, its input and its output. So none
//! needs another one, and the oldest can go at any time.

mod folder;
mod recording;
mod request;
mod routes;
mod store;

pub use folder::ResponseFolderError;
pub(crate) use recording::Recording;
pub(crate) use request::resolve;
pub(crate) use routes::{delete, get};
pub use store::{ResponseLimits, ResponseStore};

/// Longest id of a response.
const ID: usize = 80;

/// Returns whether `id` is one of a response, and so a name that a file may have.
fn is_id(id: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    id.len() <= ID
        && id.strip_prefix("resp_").is_some_and(|rest| !rest.is_empty() && rest.bytes().all(letter))
}

/// Joins the elements of JSON lists that are written without their brackets.
fn join(parts: &[&str]) -> String {
    parts.iter().copied().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(",")
}

/// Returns the elements of a list of JSON, without its brackets.
fn elements(list: &str) -> Option<&str> {
    Some(list.trim().strip_prefix('[')?.strip_suffix(']')?.trim())
}
