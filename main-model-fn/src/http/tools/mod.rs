//! Tools: shown to the model by its template, called by it in its family's format, read back as calls.
//!
//! ```text
//! tools, tool_choice -> asked (checked) -> template or prompt (no template for tools)
//!                                       -> format: the grammar of the calls that must come
//! text of an answer -> reader: content, reasoning and calls, as they come
//! ```

mod arguments;
mod asked;
mod calls;
mod format;
mod grammar;
mod prompt;
mod reader;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub(super) use asked::{Asked, ToolChoice, Tools};
pub(super) use calls::Calls;
pub(super) use format::Format;
pub(super) use prompt::in_messages;
pub(super) use reader::{CallDelta, Reader, Said};
