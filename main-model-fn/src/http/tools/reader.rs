//! Reads an answer while it arrives: separates thoughts, content and calls.

use super::callable_tools::CallableTools;
use super::format::Format;
use super::harmony_reader::HarmonyReader;
use super::parsed_delta::ParsedDelta;
use super::section_reader::SectionReader;
use super::thoughts::{Thinking, ThoughtReader};

/// Reader of one choice.
#[derive(Debug)]
pub(in crate::http) struct ChoiceReader {
    /// `None` if the model has no thoughts, or if its format marks them as messages.
    thoughts: Option<ThoughtReader>,
    answer: AnswerReader,
    /// Number of tokens in thoughts so far.
    reasoning_tokens: usize,
    /// Number of tokens that may turn out to belong to a thought.
    undecided_tokens: usize,
}

/// Outcome of one step of a reader.
pub(super) enum Step {
    /// The reader can take another step.
    Again,
    /// The reader needs more text.
    Wait,
}

/// Reader of the text behind thoughts.
#[derive(Debug)]
enum AnswerReader {
    Harmony(HarmonyReader),
    Section(SectionReader),
    /// Content only: no tool may be called.
    Content,
}

impl ChoiceReader {
    /// Creates the reader of an answer in `format` that may call `tools`. `thinking` describes the thoughts before it.
    pub(in crate::http) fn new(format: &'static Format, tools: CallableTools, thinking: Thinking) -> Self {
        let answer = if format.is_harmony() {
            AnswerReader::Harmony(HarmonyReader::new(tools))
        } else if tools.is_empty() {
            AnswerReader::Content
        } else {
            AnswerReader::Section(SectionReader::new(format, tools))
        };
        let thoughts = thinking.map(|(thoughts, opening)| ThoughtReader::new(thoughts, opening));
        Self { thoughts, answer, reasoning_tokens: 0, undecided_tokens: 0 }
    }

    /// Reports if the choice has called a tool and its last call is complete.
    pub(in crate::http) fn has_called(&self) -> bool {
        match &self.answer {
            AnswerReader::Harmony(reader) => reader.has_called(),
            AnswerReader::Section(reader) => reader.has_called(),
            AnswerReader::Content => false,
        }
    }

    /// Returns the number of tokens in thoughts so far.
    pub(in crate::http) fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Adds the text of one token; it may be empty.
    pub(in crate::http) fn push_token(&mut self, text: &str) -> ParsedDelta {
        let was_thinking = self.is_thinking();
        let parsed = self.push(text);
        if was_thinking || self.is_thinking() || !parsed.reasoning.is_empty() {
            self.reasoning_tokens += 1 + std::mem::take(&mut self.undecided_tokens);
        } else if self.thoughts.as_ref().is_some_and(ThoughtReader::is_undecided) {
            self.undecided_tokens += 1;
        } else {
            self.undecided_tokens = 0;
        }
        parsed
    }

    /// Reports if the last text ended within a thought.
    fn is_thinking(&self) -> bool {
        match &self.answer {
            AnswerReader::Harmony(reader) => reader.is_thinking(),
            _ => self.thoughts.as_ref().is_some_and(ThoughtReader::is_thinking),
        }
    }

    /// Adds text of the answer.
    pub(in crate::http) fn push(&mut self, text: &str) -> ParsedDelta {
        let mut parsed = ParsedDelta::default();
        match &mut self.thoughts {
            Some(thoughts) => {
                let rest = thoughts.push(text, &mut parsed.reasoning);
                self.answer.push(&rest, &mut parsed);
            }
            None => self.answer.push(text, &mut parsed),
        }
        parsed
    }

    /// Returns the rest of the answer when no text follows. If the answer was cut off, leaves out a possible beginning of a
    /// marker, so that the output is a prefix of the complete output.
    pub(in crate::http) fn finish(&mut self, is_cut: bool) -> ParsedDelta {
        let mut parsed = ParsedDelta::default();
        if let Some(thoughts) = &mut self.thoughts {
            let rest = thoughts.finish(is_cut, &mut parsed.reasoning);
            self.answer.push(&rest, &mut parsed);
        }
        match &mut self.answer {
            AnswerReader::Harmony(reader) => reader.finish(is_cut, &mut parsed),
            AnswerReader::Section(reader) => reader.finish(is_cut, &mut parsed),
            AnswerReader::Content => (),
        }
        parsed
    }
}

impl AnswerReader {
    fn push(&mut self, text: &str, parsed: &mut ParsedDelta) {
        match self {
            Self::Harmony(reader) => reader.push(text, parsed),
            Self::Section(reader) => reader.push(text, parsed),
            Self::Content => parsed.content.push_str(text),
        }
    }
}
