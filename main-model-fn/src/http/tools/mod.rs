//! Answers of chats: thoughts, calls of tools and structure, in the words of each family of models.
//!
//! ```text
//! chat template -> dialect: the format that it writes, what it shows, how thoughts are marked
//! tools, tool_choice -> asked (checked) -> template, or prompt (where it has no place for them)
//!                                       -> answer form: the grammar of what must come
//! text of an answer -> reader: reasoning, content and calls, as they come
//! ```
//!
//! Formats are data (`format.rs`): the readers, the grammar and the writer are made for the description.

mod answer_form;
mod arguments;
mod callable_tools;
mod dialect;
mod format;
mod grammar;
mod harmony_reader;
mod parameters;
mod parsed_delta;
mod prompt;
mod reader;
mod section_reader;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod thoughts;
mod writing;

pub(super) use answer_form::AnswerForm;
pub(super) use callable_tools::{CallableTools, ToolChoice, Tools};
pub(super) use dialect::Dialect;
pub(super) use parsed_delta::{CallDelta, ParsedDelta};
pub(super) use prompt::in_messages;
pub(super) use reader::ChoiceReader;
pub(super) use thoughts::{Opening, Thinking};
