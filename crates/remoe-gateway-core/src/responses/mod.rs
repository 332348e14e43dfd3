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
mod items;
mod recording;
mod request;
mod store;
mod stored;

pub use folder::ResponseFolderError;
pub(crate) use items::ID;
pub(crate) use recording::Recording;
pub(crate) use request::resolve;
pub use store::ResponseStore;
pub use stored::ResponseLimits;
