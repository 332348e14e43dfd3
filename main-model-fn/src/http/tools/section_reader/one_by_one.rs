//! Arguments that a model writes one by one, each with its own markers.

use super::super::format::{Element, Parameters};
use super::super::parameters::Types;
use super::super::parsed_delta::ParsedDelta;
use super::super::reader::Step;
use super::{Literal, SectionReader, SectionState};
use serde_json::Value;

/// Longest name of an argument in bytes.
const MAX_KEY_BYTES: usize = 256;

impl SectionReader {
    /// Completes arguments that are written one by one, if the model has stopped within them.
    pub(super) fn end_arguments(&mut self, parsed: &mut ParsedDelta) {
        let index = match self.state {
            SectionState::Element(index)
            | SectionState::Key(index)
            | SectionState::Value(index, _)
            | SectionState::Within(index, _) => index,
            _ => return,
        };
        let Some(Element::Parameters(parameters)) = self.elements().get(index) else { return };
        let held = std::mem::take(&mut self.held);
        match self.state {
            SectionState::Within(_, types) => {
                let value = held.trim_end().strip_suffix(parameters.close).unwrap_or(&held);
                self.end_value(parameters, value, types, parsed);
            }
            SectionState::Value(..) => self.calls.append_arguments("\"\"", parsed),
            _ => (),
        }
        self.calls.append_arguments("}", parsed);
        self.has_begun = false;
        self.state = SectionState::After;
    }

    /// Returns the fixed text behind the arguments: of the call, or else of its section.
    pub(super) fn follows(&self, index: usize) -> &'static str {
        let rest = self.elements().get(index + 1..).unwrap_or_default();
        let text = rest.iter().find_map(|element| match element {
            Element::Text(text) => Some(text.trim()),
            _ => None,
        });
        text.unwrap_or_else(|| self.section().map_or("", |section| section.after.trim()))
    }

    /// Reads the beginning of the next argument, or the end of the arguments.
    pub(super) fn next_parameter(
        &mut self,
        index: usize,
        parameters: &'static Parameters,
        parsed: &mut ParsedDelta,
    ) -> Step {
        let begun = self.held.trim_start();
        let follows = self.follows(index);
        let is_next = begun.starts_with(parameters.open);
        let is_end = begun.starts_with(follows);
        let is_partial = parameters.open.starts_with(begun) || follows.starts_with(begun);
        if !is_next && !is_end && is_partial {
            return Step::Wait;
        }
        if !self.has_begun {
            // A word between two markers may be anything.
            if !(is_next || is_end && self.tools.has(&self.name)) {
                return self.give_back(parsed);
            }
            let name = std::mem::take(&mut self.name);
            self.begin(name, parsed);
            self.calls.append_arguments("{", parsed);
        }
        self.drop_blank();
        if is_next {
            self.take(parameters.open.len());
            return self.go(SectionState::Key(index));
        }
        self.calls.append_arguments("}", parsed);
        self.go(SectionState::Element(index + 1))
    }

    /// Reads the name or the value of an argument.
    pub(super) fn parameter(
        &mut self,
        index: usize,
        parameters: &'static Parameters,
        parsed: &mut ParsedDelta,
    ) -> Step {
        match self.state {
            SectionState::Key(_) => {
                let Some(at) = self.held.find(parameters.named).filter(|&at| at <= MAX_KEY_BYTES) else {
                    if self.held.len() > MAX_KEY_BYTES + parameters.named.len() {
                        // No argument has such a name: the text is read as what follows the arguments.
                        return self.go(SectionState::Element(index));
                    }
                    return Step::Wait;
                };
                let key = self.take(at);
                self.take(parameters.named.len());
                let key = key.trim();
                let before = if std::mem::replace(&mut self.has_argument, true) { ", " } else { "" };
                self.calls.append_arguments(&format!("{before}{}: ", Value::from(key)), parsed);
                let types = Types::of(self.tools.parameters(&self.name), key);
                self.go(SectionState::Value(index, types))
            }
            SectionState::Value(_, types) => {
                if !parameters.value.is_empty() && self.literal(parameters.value) == Literal::Partial {
                    return Step::Wait;
                }
                if self.held.len() < parameters.padding.len() {
                    return Step::Wait;
                }
                if self.held.starts_with(parameters.padding) {
                    self.take(parameters.padding.len());
                }
                self.searched_bytes = 0;
                if types.is_string() {
                    self.calls.append_arguments("\"", parsed);
                }
                self.go(SectionState::Within(index, types))
            }
            SectionState::Within(_, types) => self.within(index, parameters, types, parsed),
            _ => self.go(SectionState::Element(index)),
        }
    }

    /// Reads a value. It ends at its closing text if another argument or the end of the call follows.
    fn within(
        &mut self,
        index: usize,
        parameters: &'static Parameters,
        types: Types,
        parsed: &mut ParsedDelta,
    ) -> Step {
        let follows = self.follows(index);
        let mut open_end = None;
        let from = self.searched_bytes;
        let found = self.held[from..].match_indices(parameters.close).map(|(at, _)| from + at);
        for at in found {
            let rest = self.held[at + parameters.close.len()..].trim_start();
            if rest.starts_with(parameters.open) || rest.starts_with(follows) {
                let value = self.take(at);
                self.take(parameters.close.len());
                self.end_value(parameters, &value, types, parsed);
                return self.go(SectionState::Element(index));
            }
            if parameters.open.starts_with(rest) || follows.starts_with(rest) {
                open_end = Some(at);
                break;
            }
        }
        let mut searched_bytes =
            open_end.unwrap_or(self.held.len().saturating_sub(parameters.close.len())).max(from);
        while !self.held.is_char_boundary(searched_bytes) {
            searched_bytes -= 1;
        }
        self.searched_bytes = searched_bytes;
        if types.is_string() {
            let mut keep = open_end.unwrap_or_else(|| {
                let begins = |at: &usize| parameters.close.starts_with(&self.held[*at..]);
                let starts = self.held.char_indices().map(|(at, _)| at);
                starts.into_iter().find(begins).unwrap_or(self.held.len())
            });
            if self.held[..keep].ends_with(parameters.padding) {
                keep -= parameters.padding.len();
            }
            let text = self.take(keep);
            self.searched_bytes = self.searched_bytes.saturating_sub(keep);
            self.calls.append_arguments(&escaped(&text), parsed);
        }
        Step::Wait
    }

    /// Writes the end of a value.
    fn end_value(&mut self, parameters: &Parameters, value: &str, types: Types, parsed: &mut ParsedDelta) {
        let value = value.strip_suffix(parameters.padding).unwrap_or(value);
        let json = if types.is_string() { escaped(value) + "\"" } else { types.json(value) };
        self.calls.append_arguments(&json, parsed);
    }
}

/// Escapes `text` for a JSON string.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted.get(1..quoted.len() - 1).unwrap_or_default().to_owned()
}
