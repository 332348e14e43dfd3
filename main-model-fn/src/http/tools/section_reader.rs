//! Reads tool calls in marked sections, or unmarked ones, by the description of their format.

mod one_by_one;

use super::arguments::{Balance, Head, whole};
use super::callable_tools::{CallableTools, Mode};
use super::format::{Element, Format, Layout, Section};
use super::parameters::Types;
use super::parsed_delta::{CallWriter, ParsedDelta};
use super::reader::Step;
use super::thoughts::decided;

/// Position of the reader in an answer. Numbers are indices of the call's elements in the format.
#[derive(Debug, Clone, PartialEq)]
enum SectionState {
    /// In text, where a section may begin.
    Text,
    /// In text up to the end of the answer.
    Plain,
    /// Behind the marker of a section.
    Before,
    /// Before an element of a call.
    Element(usize),
    /// In the arguments.
    Arguments(usize, Balance),
    /// In an object with another order of keys. The search for its end continues at this byte.
    Whole(usize, Balance, usize),
    /// Behind the arguments, before the end of the call's object.
    Tail(usize),
    /// In the name of an argument.
    Key(usize),
    /// Between the name of an argument and its value.
    Value(usize, Types),
    /// In the value of an argument.
    Within(usize, Types),
    /// Behind a call.
    After,
}

/// Outcome of a comparison with a fixed text of the format.
#[derive(PartialEq)]
enum Literal {
    Found,
    Partial,
    Other,
}

/// Reader of one choice.
#[derive(Debug)]
pub(super) struct SectionReader {
    format: &'static Format,
    tools: CallableTools,
    state: SectionState,
    /// Text whose meaning is not decided yet.
    held: String,
    /// Text of a possible call that has not begun; it becomes content if it is no call.
    opened: String,
    name: String,
    number: Option<String>,
    id: Option<String>,
    /// True if the current call has begun.
    has_begun: bool,
    /// True if an argument of the current call was read.
    has_argument: bool,
    /// Bytes of `held` in which the end of a value was searched.
    searched_bytes: usize,
    calls: CallWriter,
}

/// Longest name, number or id of a call in bytes.
const MAX_WORD_BYTES: usize = 64;
/// Longest beginning of an object, up to its arguments, that is read incrementally; in bytes.
const MAX_HEAD_BYTES: usize = 1024;

impl SectionReader {
    pub(super) fn new(format: &'static Format, tools: CallableTools) -> Self {
        Self {
            format,
            tools,
            state: SectionState::Text,
            held: String::new(),
            opened: String::new(),
            name: String::new(),
            number: None,
            id: None,
            has_begun: false,
            has_argument: false,
            searched_bytes: 0,
            calls: CallWriter::new(format.ids),
        }
    }

    /// Reports if the choice has called a tool and its last call is complete.
    pub(super) fn has_called(&self) -> bool {
        let is_open = match self.state {
            SectionState::Arguments(..)
            | SectionState::Key(_)
            | SectionState::Value(..)
            | SectionState::Within(..) => true,
            SectionState::Element(index) => {
                self.has_begun && matches!(self.elements().get(index), Some(Element::Parameters(_)))
            }
            _ => false,
        };
        self.calls.begun > 0 && !is_open
    }

    /// Adds text of the answer.
    pub(super) fn push(&mut self, text: &str, parsed: &mut ParsedDelta) {
        self.held.push_str(text);
        while let Step::Again = self.step(parsed) {}
    }

    /// Adds the rest of the answer when no text follows. If the answer was cut off, leaves out a possible call.
    pub(super) fn finish(&mut self, is_cut: bool, parsed: &mut ParsedDelta) {
        let is_cut = is_cut || self.tools.mode == Mode::Required;
        if !is_cut && self.has_begun {
            self.end_arguments(parsed);
        }
        let held = std::mem::take(&mut self.held);
        match &self.state {
            SectionState::Text if is_cut => (),
            SectionState::Text if self.calls.begun > 0 && held.trim().is_empty() => (),
            SectionState::Text | SectionState::Plain => parsed.content.push_str(&held),
            // Behind a marker, the text is a call; an object without a marker may be anything.
            SectionState::Before | SectionState::Element(_) | SectionState::Whole(..)
                if is_cut && self.is_marked() => {}
            SectionState::Before | SectionState::Element(_) | SectionState::Whole(..) if !self.has_begun => {
                parsed.content.push_str(&std::mem::take(&mut self.opened));
                parsed.content.push_str(&held);
            }
            _ => (),
        }
    }

    fn elements(&self) -> &'static [Element] {
        match &self.format.layout {
            Layout::Sections(section) => section.call,
            Layout::Bare { call, .. } => call,
            Layout::Harmony => &[],
        }
    }

    fn section(&self) -> Option<&'static Section> {
        match &self.format.layout {
            Layout::Sections(section) => Some(section),
            _ => None,
        }
    }

    /// Reports if the opened text is a call, whatever follows.
    fn is_marked(&self) -> bool {
        // In a list of calls, another call follows.
        self.tools.mode == Mode::Required
            || self.calls.begun > 0
            || self.opened.contains(self.format.marker())
    }

    fn step(&mut self, parsed: &mut ParsedDelta) -> Step {
        match self.state.clone() {
            SectionState::Text if self.section().is_none() => self.bare_text(),
            SectionState::Text => self.text(parsed),
            SectionState::Plain => {
                parsed.content.push_str(&std::mem::take(&mut self.held));
                Step::Wait
            }
            SectionState::Before => {
                let before = self.section().map_or("", |section| section.before);
                match self.literal(before) {
                    Literal::Found => self.go(SectionState::Element(0)),
                    Literal::Partial => Step::Wait,
                    Literal::Other => self.give_back(parsed),
                }
            }
            SectionState::Element(index) => match self.elements().get(index) {
                Some(element) => self.element(index, element, parsed),
                None => {
                    self.has_begun = false;
                    self.go(SectionState::After)
                }
            },
            SectionState::Arguments(index, mut balance) => {
                let (length, is_complete) = balance.take(&self.held);
                let more = self.take(length);
                self.calls.append_arguments(&more, parsed);
                if !is_complete {
                    self.state = SectionState::Arguments(index, balance);
                    return Step::Wait;
                }
                match self.elements().get(index) {
                    Some(Element::Object(_)) => self.go(SectionState::Tail(index)),
                    _ => self.go(SectionState::Element(index + 1)),
                }
            }
            SectionState::Whole(index, balance, searched_bytes) => {
                self.whole(index, balance, searched_bytes, parsed)
            }
            SectionState::Tail(index) => self.tail(index),
            SectionState::Key(index) | SectionState::Value(index, _) | SectionState::Within(index, _) => {
                match self.elements().get(index) {
                    Some(Element::Parameters(parameters)) => self.parameter(index, parameters, parsed),
                    _ => self.go(SectionState::Element(index + 1)),
                }
            }
            SectionState::After => self.after(),
        }
    }

    fn go(&mut self, state: SectionState) -> Step {
        self.state = state;
        Step::Again
    }

    /// Reads text up to the marker of a section.
    fn text(&mut self, parsed: &mut ParsedDelta) -> Step {
        let marker = self.format.marker();
        if let Some(at) = self.held.find(marker) {
            // White space between text and calls belongs to neither.
            let text = self.held[..at].trim_end().len();
            parsed.content.push_str(&self.take(text));
            self.opened = self.take(at - text + marker.len());
            return self.go(SectionState::Before);
        }
        let keep = decided(&self.held, marker);
        parsed.content.push_str(&self.take(keep));
        Step::Wait
    }

    /// Reads the beginning of an answer in a format without sections: calls come first.
    fn bare_text(&mut self) -> Step {
        let marker = self.format.marker();
        let begun = self.held.trim_start();
        let call = begun.strip_prefix(marker).unwrap_or(begun).trim_start();
        if call.starts_with('{') {
            let before = self.held.len() - call.len();
            self.opened = self.take(before);
            self.go(SectionState::Element(0))
        } else if call.is_empty() || marker.starts_with(call) {
            Step::Wait
        } else {
            // Code behind the marker is no call of these functions, and the marker is no content.
            let before = if begun.starts_with(marker) { self.held.len() - call.len() } else { 0 };
            self.take(before);
            self.go(SectionState::Plain)
        }
    }

    fn element(&mut self, index: usize, element: &'static Element, parsed: &mut ParsedDelta) -> Step {
        match element {
            Element::Text(text) => match self.literal(text) {
                Literal::Found => self.go(SectionState::Element(index + 1)),
                Literal::Partial => Step::Wait,
                // The arguments are complete, but the model left out what closes them.
                Literal::Other if self.has_begun => {
                    self.has_begun = false;
                    self.go(SectionState::After)
                }
                Literal::Other => self.give_back(parsed),
            },
            Element::Name | Element::Number | Element::Id => {
                let belongs = |c: char| match element {
                    Element::Name => c.is_ascii_alphanumeric() || "_-.".contains(c),
                    Element::Number => c.is_ascii_digit(),
                    _ => c.is_ascii_alphanumeric(),
                };
                let word = self.held.trim_start();
                match word.find(|c| !belongs(c)) {
                    None if word.len() > MAX_WORD_BYTES => self.give_back(parsed),
                    None => Step::Wait,
                    Some(0) => self.give_back(parsed),
                    Some(end) => {
                        let word = word[..end].to_owned();
                        let blank = self.held.len() - self.held.trim_start().len();
                        self.open(blank + end);
                        match element {
                            Element::Name => self.name = word,
                            Element::Number => self.number = Some(word),
                            _ => self.id = Some(word),
                        }
                        self.go(SectionState::Element(index + 1))
                    }
                }
            }
            Element::Arguments => match self.held.trim_start().bytes().next() {
                None => Step::Wait,
                Some(b'{') => {
                    self.drop_blank();
                    let name = std::mem::take(&mut self.name);
                    self.begin(name, parsed);
                    self.go(SectionState::Arguments(index, Balance::default()))
                }
                Some(_) => self.give_back(parsed),
            },
            Element::Object(_) => self.object(index, parsed),
            Element::Parameters(parameters) => self.next_parameter(index, parameters, parsed),
        }
    }

    /// Reads an object with name and arguments.
    fn object(&mut self, index: usize, parsed: &mut ParsedDelta) -> Step {
        let blank = self.held.len() - self.held.trim_start().len();
        self.open(blank);
        match Head::of(&self.held) {
            // An object of another kind is content right away.
            Head::Other if self.section().is_none() && !begins_call(&self.held) => self.give_back(parsed),
            Head::Partial if self.held.len() <= MAX_HEAD_BYTES => Step::Wait,
            Head::Found(name, at) if self.may_call(&name) => {
                self.take(at);
                self.begin(name, parsed);
                self.go(SectionState::Arguments(index, Balance::default()))
            }
            _ if self.held.starts_with('{') => self.go(SectionState::Whole(index, Balance::default(), 0)),
            _ => self.give_back(parsed),
        }
    }

    /// Reads the rest of the object around the arguments. Models sometimes forget to close it.
    fn tail(&mut self, index: usize) -> Step {
        let begun = self.held.trim_start();
        match begun.bytes().next() {
            None => return Step::Wait,
            Some(b'}' | b',') => {
                let mut rest = Balance::within_object();
                let (length, is_complete) = rest.take(begun);
                if !is_complete {
                    return Step::Wait;
                }
                self.take(self.held.len() - begun.len() + length);
            }
            Some(_) => (),
        }
        self.go(SectionState::Element(index + 1))
    }

    /// Reads an object with another order of keys as a whole.
    fn whole(
        &mut self,
        index: usize,
        mut balance: Balance,
        searched_bytes: usize,
        parsed: &mut ParsedDelta,
    ) -> Step {
        let (more, is_complete) = balance.take(&self.held[searched_bytes..]);
        let length = searched_bytes + more;
        if !is_complete {
            self.state = SectionState::Whole(index, balance, length);
            return Step::Wait;
        }
        // Without a marker, an object is a call only if it has no other keys.
        let is_strict = self.section().is_none();
        match whole(&self.held[..length], is_strict).filter(|(name, _)| self.may_call(name)) {
            Some((name, arguments)) => {
                self.take(length);
                self.begin(name, parsed);
                self.calls.append_arguments(&arguments, parsed);
                self.go(SectionState::Element(index + 1))
            }
            None => {
                self.open(length);
                self.give_back(parsed)
            }
        }
    }

    /// Reads what follows a call: another call, the end of the section, or text.
    fn after(&mut self) -> Step {
        match &self.format.layout {
            Layout::Sections(section) => {
                let after = section.after.trim();
                if section.between.is_none() && after.is_empty() {
                    return self.go(SectionState::Text);
                }
                if let Some(step) = self.drop_surplus(after) {
                    return step;
                }
                match self.literal(after) {
                    Literal::Found if !after.is_empty() => return self.go(SectionState::Text),
                    Literal::Partial => return Step::Wait,
                    _ => (),
                }
                let Some(between) = section.between.map(str::trim) else {
                    return self.go(SectionState::Text);
                };
                if !between.is_empty() {
                    return match self.literal(between) {
                        Literal::Found => self.go(SectionState::Element(0)),
                        Literal::Partial => Step::Wait,
                        Literal::Other => self.go(SectionState::Text),
                    };
                }
                let first = match section.call.first() {
                    Some(Element::Text(text)) => text.trim(),
                    _ => "{",
                };
                let begun = self.held.trim_start();
                if begun.starts_with(first) {
                    self.go(SectionState::Element(0))
                } else if first.starts_with(begun) {
                    Step::Wait
                } else {
                    self.go(SectionState::Text)
                }
            }
            Layout::Bare { between, .. } => match self.literal(between) {
                Literal::Found => self.go(SectionState::Element(0)),
                Literal::Partial => Step::Wait,
                Literal::Other => self.go(SectionState::Plain),
            },
            Layout::Harmony => self.go(SectionState::Plain),
        }
    }

    /// Drops surplus braces before `after`, the end of a section. Returns a step if more text is needed to decide.
    fn drop_surplus(&mut self, after: &str) -> Option<Step> {
        let rest = self.held.trim_start_matches(|c: char| c.is_whitespace() || c == '}');
        let has_surplus = self.held[..self.held.len() - rest.len()].contains('}');
        if after.is_empty() || !has_surplus {
            return None;
        }
        if rest.starts_with(after) {
            self.take(self.held.len() - rest.len());
            None
        } else {
            after.starts_with(rest).then_some(Step::Wait)
        }
    }

    /// Reads the fixed `text`, with leading white space, if the held text begins with it.
    fn literal(&mut self, text: &str) -> Literal {
        let text = text.trim();
        let begun = self.held.trim_start();
        let blank = self.held.len() - begun.len();
        if begun.starts_with(text) {
            self.open(blank + text.len());
            Literal::Found
        } else if text.starts_with(begun) {
            Literal::Partial
        } else {
            Literal::Other
        }
    }

    /// Returns text that looked like a call to the content.
    fn give_back(&mut self, parsed: &mut ParsedDelta) -> Step {
        let opened = std::mem::take(&mut self.opened);
        let text = opened.trim_end();
        parsed.content.push_str(text);
        // Keeps white space, because it is no content before another marker.
        self.held.insert_str(0, &opened[text.len()..]);
        self.go(if self.section().is_some() { SectionState::Text } else { SectionState::Plain })
    }

    /// Reports if a call of `name` counts as a call. Behind a marker, unknown names count as well.
    fn may_call(&self, name: &str) -> bool {
        self.section().is_some() || self.tools.has(name)
    }

    fn begin(&mut self, name: String, parsed: &mut ParsedDelta) {
        self.opened.clear();
        self.has_begun = true;
        self.has_argument = false;
        self.name.clone_from(&name);
        self.calls.begin(name, self.id.take(), self.number.take(), parsed);
    }

    /// Takes `length` bytes of a call, and keeps them while they may turn out to be content.
    fn open(&mut self, length: usize) {
        let text = self.take(length);
        if !self.has_begun {
            self.opened.push_str(&text);
        }
    }

    fn drop_blank(&mut self) {
        let blank = self.held.len() - self.held.trim_start().len();
        self.take(blank);
    }

    fn take(&mut self, length: usize) -> String {
        let rest = self.held.split_off(length);
        std::mem::replace(&mut self.held, rest)
    }
}

/// Reports if the object that `text` begins may be a call, as far as its first key is complete.
fn begins_call(text: &str) -> bool {
    let Some(key) = text.strip_prefix('{').map(str::trim_start) else { return false };
    let keys = ["\"name\"", "\"type\"", "\"id\"", "\"function\"", "\"arguments\"", "\"parameters\""];
    keys.iter().any(|known| key.starts_with(known) || known.starts_with(key))
}
