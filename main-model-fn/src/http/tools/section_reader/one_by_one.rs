//! Arguments that a model writes one by one.

use super::super::format::{Element, Parameters};
use super::super::parameters::Types;
use super::super::parsed_delta::ParsedDelta;
use super::super::reader::Step;
use super::{Literal, SectionReader, SectionState};
use serde_json::Value;

/// Longest name of an argument in bytes.
const KEY: usize = 256;

impl SectionReader {
    /// Ends arguments that are written one by one, where the model has stopped.
    pub(super) fn end_arguments(&mut self, said: &mut ParsedDelta) {
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
                self.end_value(parameters, value, types, said);
            }
            SectionState::Value(..) => self.calls.argue("\"\"", said),
            _ => (),
        }
        self.calls.argue("}", said);
        self.has_begun = false;
        self.state = SectionState::After;
    }

    /// Text that may follow the arguments that are written one by one: of the call, or else of its section.
    pub(super) fn follows(&self, index: usize) -> &'static str {
        let rest = self.elements().get(index + 1..).unwrap_or_default();
        let text = rest.iter().find_map(|element| match element {
            Element::Text(text) => Some(text.trim()),
            _ => None,
        });
        text.unwrap_or_else(|| self.section().map_or("", |section| section.after.trim()))
    }

    pub(super) fn next_parameter(
        &mut self,
        index: usize,
        parameters: &'static Parameters,
        said: &mut ParsedDelta,
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
            if !(is_next || is_end && self.asked.has(&self.name)) {
                return self.give_back(said);
            }
            let name = std::mem::take(&mut self.name);
            self.begin(name, said);
            self.calls.argue("{", said);
        }
        self.drop_blank();
        if is_next {
            self.take(parameters.open.len());
            return self.go(SectionState::Key(index));
        }
        self.calls.argue("}", said);
        self.go(SectionState::Element(index + 1))
    }

    pub(super) fn parameter(
        &mut self,
        index: usize,
        parameters: &'static Parameters,
        said: &mut ParsedDelta,
    ) -> Step {
        match self.state {
            SectionState::Key(_) => {
                let Some(at) = self.held.find(parameters.named).filter(|&at| at <= KEY) else {
                    if self.held.len() > KEY + parameters.named.len() {
                        // No argument has such a name: the rest is read as what follows the arguments.
                        return self.go(SectionState::Element(index));
                    }
                    return Step::Wait;
                };
                let key = self.take(at);
                self.take(parameters.named.len());
                let key = key.trim();
                let before = if std::mem::replace(&mut self.has_argument, true) { ", " } else { "" };
                self.calls.argue(&format!("{before}{}: ", Value::from(key)), said);
                let types = Types::of(self.asked.parameters(&self.name), key);
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
                self.looked_at = 0;
                if types.is_string() {
                    self.calls.argue("\"", said);
                }
                self.go(SectionState::Within(index, types))
            }
            SectionState::Within(_, types) => self.within(index, parameters, types, said),
            _ => self.go(SectionState::Element(index)),
        }
    }

    /// In a value, which ends where its closing text is followed by another argument or the end of the call.
    fn within(
        &mut self,
        index: usize,
        parameters: &'static Parameters,
        types: Types,
        said: &mut ParsedDelta,
    ) -> Step {
        let follows = self.follows(index);
        let mut open_end = None;
        let from = self.looked_at;
        let found = self.held[from..].match_indices(parameters.close).map(|(at, _)| from + at);
        for at in found {
            let rest = self.held[at + parameters.close.len()..].trim_start();
            if rest.starts_with(parameters.open) || rest.starts_with(follows) {
                let value = self.take(at);
                self.take(parameters.close.len());
                self.end_value(parameters, &value, types, said);
                return self.go(SectionState::Element(index));
            }
            if parameters.open.starts_with(rest) || follows.starts_with(rest) {
                open_end = Some(at);
                break;
            }
        }
        let mut looked_at =
            open_end.unwrap_or(self.held.len().saturating_sub(parameters.close.len())).max(from);
        while !self.held.is_char_boundary(looked_at) {
            looked_at -= 1;
        }
        self.looked_at = looked_at;
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
            self.looked_at = self.looked_at.saturating_sub(keep);
            self.calls.argue(&escaped(&text), said);
        }
        Step::Wait
    }

    fn end_value(&mut self, parameters: &Parameters, value: &str, types: Types, said: &mut ParsedDelta) {
        let value = value.strip_suffix(parameters.padding).unwrap_or(value);
        let json = if types.is_string() { escaped(value) + "\"" } else { types.json(value) };
        self.calls.argue(&json, said);
    }
}

/// `text` within a JSON string.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted.get(1..quoted.len() - 1).unwrap_or_default().to_owned()
}
