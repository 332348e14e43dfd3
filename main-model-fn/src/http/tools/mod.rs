//! Thoughts, tool calls and structure in answers of chats, for each family of models.
//!
//! ```text
//! chat template -> dialect: the call format, shown tools, markers of thoughts
//! tools, tool_choice -> callable_tools (checked) -> template, or prompt (if the template does not show tools)
//!                                                -> answer_form: grammar of required calls
//! text of an answer -> reader: reasoning, content and calls, as the text arrives
//! ```
//!
//! Formats are data ([`format`]): readers, grammars and writers interpret their descriptions.

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
pub(super) use prompt::adapt_messages;
pub(super) use reader::ChoiceReader;
pub(super) use thoughts::{Opening, Thinking};
