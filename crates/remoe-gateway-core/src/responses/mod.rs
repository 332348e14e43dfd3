//! Stored responses, which later requests of the same tenant can continue. Their number and size are bounded.
//!
//! ```text
//! request ─▶ request: previous_response_id becomes the items that it stands for ─▶ main function
//! client ◀── recording: the answer, as it passes ─▶ store (memory) ─▶ folder (files, written behind)
//! ```
//!
//! A stored response contains all items of the conversation: those of earlier responses, its input and its output. So
//! no response depends on another, and the oldest can be evicted at any time.

mod folder;
mod items;
mod recording;
mod request;
mod store;
mod stored;

pub use folder::ResponseFolderError;
pub(crate) use items::MAX_ID_BYTES;
pub(crate) use recording::Recording;
pub(crate) use request::resolve;
pub use store::ResponseStore;
pub use stored::ResponseLimits;
