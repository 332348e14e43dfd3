//! Reads an answer as it comes: thoughts, content and calls.

use super::callable_tools::CallableTools;
use super::format::Format;
use super::harmony_reader::HarmonyReader;
use super::parsed_delta::ParsedDelta;
use super::section_reader::SectionReader;
use super::thoughts::{Thinking, ThoughtReader};

/// Reads one choice.
#[derive(Debug)]
pub(in crate::http) struct ChoiceReader {
    /// `None`: the model has no thoughts, or their format tells them apart by itself.
    thoughts: Option<ThoughtReader>,
    answer: AnswerReader,
    /// Tokens of thoughts so far, and those that may turn out to be.
    reasoning_tokens: usize,
    undecided_tokens: usize,
}

/// Outcome of a step of a reader.
pub(super) enum Step {
    /// There may be more to do.
    Again,
    /// More text is needed.
    Wait,
}

/// Reads what follows thoughts.
#[derive(Debug)]
enum AnswerReader {
    Harmony(HarmonyReader),
    Section(SectionReader),
    /// No call may come.
    Content,
}

impl ChoiceReader {
    /// Makes a reader of an answer in `format` that calls what is `asked`; `thinking` is how it may think before.
    pub(in crate::http) fn new(format: &'static Format, asked: CallableTools, thinking: Thinking) -> Self {
        let answer = if format.is_harmony() {
            AnswerReader::Harmony(HarmonyReader::new(asked))
        } else if asked.is_empty() {
            AnswerReader::Content
        } else {
            AnswerReader::Section(SectionReader::new(format, asked))
        };
        let thoughts = thinking.map(|(thoughts, opening)| ThoughtReader::new(thoughts, opening));
        Self { thoughts, answer, reasoning_tokens: 0, undecided_tokens: 0 }
    }

    /// Returns true if the choice has called, and its last call is complete.
    pub(in crate::http) fn has_called(&self) -> bool {
        match &self.answer {
            AnswerReader::Harmony(reader) => reader.has_called(),
            AnswerReader::Section(reader) => reader.has_called(),
            AnswerReader::Content => false,
        }
    }

    /// Tokens of the thoughts so far.
    pub(in crate::http) fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Takes the text of a token, which may be empty.
    pub(in crate::http) fn push_token(&mut self, text: &str) -> ParsedDelta {
        let was_thinking = self.is_thinking();
        let said = self.push(text);
        if was_thinking || self.is_thinking() || !said.reasoning.is_empty() {
            self.reasoning_tokens += 1 + std::mem::take(&mut self.undecided_tokens);
        } else if self.thoughts.as_ref().is_some_and(ThoughtReader::is_undecided) {
            self.undecided_tokens += 1;
        } else {
            self.undecided_tokens = 0;
        }
        said
    }

    /// Returns true if the last text ended within a thought.
    fn is_thinking(&self) -> bool {
        match &self.answer {
            AnswerReader::Harmony(reader) => reader.is_thinking(),
            _ => self.thoughts.as_ref().is_some_and(ThoughtReader::is_thinking),
        }
    }

    /// Takes more of the answer.
    pub(in crate::http) fn push(&mut self, text: &str) -> ParsedDelta {
        let mut said = ParsedDelta::default();
        match &mut self.thoughts {
            Some(thoughts) => {
                let rest = thoughts.push(text, &mut said.reasoning);
                self.answer.push(&rest, &mut said);
            }
            None => self.answer.push(text, &mut said),
        }
        said
    }

    /// The rest of the answer, once no text follows. Where it was cut off, what may be the beginning of a marker is
    /// left out: what is said is a beginning of what would have been said.
    pub(in crate::http) fn finish(&mut self, is_cut: bool) -> ParsedDelta {
        let mut said = ParsedDelta::default();
        if let Some(thoughts) = &mut self.thoughts {
            let rest = thoughts.finish(is_cut, &mut said.reasoning);
            self.answer.push(&rest, &mut said);
        }
        match &mut self.answer {
            AnswerReader::Harmony(reader) => reader.finish(is_cut, &mut said),
            AnswerReader::Section(reader) => reader.finish(is_cut, &mut said),
            AnswerReader::Content => (),
        }
        said
    }
}

impl AnswerReader {
    fn push(&mut self, text: &str, said: &mut ParsedDelta) {
        match self {
            Self::Harmony(reader) => reader.push(text, said),
            Self::Section(reader) => reader.push(text, said),
            Self::Content => said.content.push_str(text),
        }
    }
}
