//! Reads calls in sections, or alone, by the description of their format.

mod one_by_one;

use super::arguments::{Balance, Head, whole};
use super::callable_tools::{CallableTools, Mode};
use super::format::{Element, Format, Layout, Section};
use super::parameters::Types;
use super::parsed_delta::{CallWriter, ParsedDelta};
use super::reader::Step;
use super::thoughts::decided;

/// Where in an answer the reader is. Numbers are indices of the call's elements.
#[derive(Debug, Clone, PartialEq)]
enum SectionState {
    /// Text, in which a section may begin.
    Text,
    /// Text to the end.
    Plain,
    /// Behind a section's marker.
    Before,
    /// Before an element of a call.
    Element(usize),
    /// In the arguments.
    Arguments(usize, Balance),
    /// In an object that is written in an order of its own, whose end is looked for from this byte on.
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

/// Outcome of a comparison with a text that the format states.
#[derive(PartialEq)]
enum Literal {
    Found,
    Partial,
    Other,
}

/// Reads one choice.
#[derive(Debug)]
pub(super) struct SectionReader {
    format: &'static Format,
    asked: CallableTools,
    state: SectionState,
    /// Text that is not decided yet.
    held: String,
    /// Text of a call that has not begun yet, to be given back if it is none.
    opened: String,
    name: String,
    number: Option<String>,
    id: Option<String>,
    /// The call that is being read has begun.
    has_begun: bool,
    /// An argument of it was read.
    has_argument: bool,
    /// Bytes of what is held in which the end of a value has been looked for.
    looked_at: usize,
    calls: CallWriter,
}

/// Longest name, number or id of a call in bytes.
const WORD: usize = 64;
/// Longest beginning of an object up to its arguments in bytes, where it is read as it comes.
const HEAD: usize = 1024;

impl SectionReader {
    pub(super) fn new(format: &'static Format, asked: CallableTools) -> Self {
        Self {
            format,
            asked,
            state: SectionState::Text,
            held: String::new(),
            opened: String::new(),
            name: String::new(),
            number: None,
            id: None,
            has_begun: false,
            has_argument: false,
            looked_at: 0,
            calls: CallWriter::new(format.ids),
        }
    }

    /// Returns true if the choice has called, and its last call is complete.
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

    pub(super) fn push(&mut self, text: &str, said: &mut ParsedDelta) {
        self.held.push_str(text);
        while let Step::Again = self.step(said) {}
    }

    /// The rest, once no text follows. Where the answer was cut off, what may be the beginning of a call is left out.
    pub(super) fn finish(&mut self, is_cut: bool, said: &mut ParsedDelta) {
        let is_cut = is_cut || self.asked.mode == Mode::Required;
        if !is_cut && self.has_begun {
            self.end_arguments(said);
        }
        let held = std::mem::take(&mut self.held);
        match &self.state {
            SectionState::Text if is_cut => (),
            SectionState::Text if self.calls.begun > 0 && held.trim().is_empty() => (),
            SectionState::Text | SectionState::Plain => said.content.push_str(&held),
            // Behind a marker it is a call; an object without one may be anything.
            SectionState::Before | SectionState::Element(_) | SectionState::Whole(..)
                if is_cut && self.is_marked() => {}
            SectionState::Before | SectionState::Element(_) | SectionState::Whole(..) if !self.has_begun => {
                said.content.push_str(&std::mem::take(&mut self.opened));
                said.content.push_str(&held);
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

    /// Returns true if the text that was opened is a call, whatever follows.
    fn is_marked(&self) -> bool {
        // A list goes on with another call.
        self.asked.mode == Mode::Required
            || self.calls.begun > 0
            || self.opened.contains(self.format.marker())
    }

    fn step(&mut self, said: &mut ParsedDelta) -> Step {
        match self.state.clone() {
            SectionState::Text if self.section().is_none() => self.bare_text(),
            SectionState::Text => self.text(said),
            SectionState::Plain => {
                said.content.push_str(&std::mem::take(&mut self.held));
                Step::Wait
            }
            SectionState::Before => {
                let before = self.section().map_or("", |section| section.before);
                match self.literal(before) {
                    Literal::Found => self.go(SectionState::Element(0)),
                    Literal::Partial => Step::Wait,
                    Literal::Other => self.give_back(said),
                }
            }
            SectionState::Element(index) => match self.elements().get(index) {
                Some(element) => self.element(index, element, said),
                None => {
                    self.has_begun = false;
                    self.go(SectionState::After)
                }
            },
            SectionState::Arguments(index, mut balance) => {
                let (length, is_complete) = balance.take(&self.held);
                let more = self.take(length);
                self.calls.argue(&more, said);
                if !is_complete {
                    self.state = SectionState::Arguments(index, balance);
                    return Step::Wait;
                }
                match self.elements().get(index) {
                    Some(Element::Object(_)) => self.go(SectionState::Tail(index)),
                    _ => self.go(SectionState::Element(index + 1)),
                }
            }
            SectionState::Whole(index, balance, looked_at) => self.whole(index, balance, looked_at, said),
            SectionState::Tail(index) => self.tail(index),
            SectionState::Key(index) | SectionState::Value(index, _) | SectionState::Within(index, _) => {
                match self.elements().get(index) {
                    Some(Element::Parameters(parameters)) => self.parameter(index, parameters, said),
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

    /// Text up to the marker that opens a section.
    fn text(&mut self, said: &mut ParsedDelta) -> Step {
        let marker = self.format.marker();
        if let Some(at) = self.held.find(marker) {
            // White space between text and calls belongs to neither.
            let text = self.held[..at].trim_end().len();
            said.content.push_str(&self.take(text));
            self.opened = self.take(at - text + marker.len());
            return self.go(SectionState::Before);
        }
        let keep = decided(&self.held, marker);
        said.content.push_str(&self.take(keep));
        Step::Wait
    }

    /// Calls without a section begin the answer.
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
            // Code behind the marker is no call of these functions, and the marker no content.
            let before = if begun.starts_with(marker) { self.held.len() - call.len() } else { 0 };
            self.take(before);
            self.go(SectionState::Plain)
        }
    }

    fn element(&mut self, index: usize, element: &'static Element, said: &mut ParsedDelta) -> Step {
        match element {
            Element::Text(text) => match self.literal(text) {
                Literal::Found => self.go(SectionState::Element(index + 1)),
                Literal::Partial => Step::Wait,
                // The arguments are there: what closes them is missing.
                Literal::Other if self.has_begun => {
                    self.has_begun = false;
                    self.go(SectionState::After)
                }
                Literal::Other => self.give_back(said),
            },
            Element::Name | Element::Number | Element::Id => {
                let belongs = |c: char| match element {
                    Element::Name => c.is_ascii_alphanumeric() || "_-.".contains(c),
                    Element::Number => c.is_ascii_digit(),
                    _ => c.is_ascii_alphanumeric(),
                };
                let word = self.held.trim_start();
                match word.find(|c| !belongs(c)) {
                    None if word.len() > WORD => self.give_back(said),
                    None => Step::Wait,
                    Some(0) => self.give_back(said),
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
                    self.begin(name, said);
                    self.go(SectionState::Arguments(index, Balance::default()))
                }
                Some(_) => self.give_back(said),
            },
            Element::Object(_) => self.object(index, said),
            Element::Parameters(parameters) => self.next_parameter(index, parameters, said),
        }
    }

    fn object(&mut self, index: usize, said: &mut ParsedDelta) -> Step {
        let blank = self.held.len() - self.held.trim_start().len();
        self.open(blank);
        match Head::of(&self.held) {
            // An answer that is an object of another kind need not wait for its end.
            Head::Other if self.section().is_none() && !begins_call(&self.held) => self.give_back(said),
            Head::Partial if self.held.len() <= HEAD => Step::Wait,
            Head::Found(name, at) if self.may_call(&name) => {
                self.take(at);
                self.begin(name, said);
                self.go(SectionState::Arguments(index, Balance::default()))
            }
            _ if self.held.starts_with('{') => self.go(SectionState::Whole(index, Balance::default(), 0)),
            _ => self.give_back(said),
        }
    }

    /// The rest of the object around arguments; where the model forgets to close it, there is none.
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

    fn whole(
        &mut self,
        index: usize,
        mut balance: Balance,
        looked_at: usize,
        said: &mut ParsedDelta,
    ) -> Step {
        let (more, is_complete) = balance.take(&self.held[looked_at..]);
        let length = looked_at + more;
        if !is_complete {
            self.state = SectionState::Whole(index, balance, length);
            return Step::Wait;
        }
        // Without a marker, an object is a call only if it has nothing else.
        let is_strict = self.section().is_none();
        match whole(&self.held[..length], is_strict).filter(|(name, _)| self.may_call(name)) {
            Some((name, arguments)) => {
                self.take(length);
                self.begin(name, said);
                self.calls.argue(&arguments, said);
                self.go(SectionState::Element(index + 1))
            }
            None => {
                self.open(length);
                self.give_back(said)
            }
        }
    }

    /// Behind a call: another one, the end of the section, or text.
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

    /// Drops braces too many before `after`, the end of a section. Returns a step where more text decides.
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

    /// Takes `text`, and white space before it, where what is held begins so.
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

    /// Returns text to the content that was taken for a call.
    fn give_back(&mut self, said: &mut ParsedDelta) -> Step {
        let opened = std::mem::take(&mut self.opened);
        let text = opened.trim_end();
        said.content.push_str(text);
        // Another marker may follow, and white space before it is no text.
        self.held.insert_str(0, &opened[text.len()..]);
        self.go(if self.section().is_some() { SectionState::Text } else { SectionState::Plain })
    }

    /// Returns true if a call of `name` is one. Behind a marker the name need not be right.
    fn may_call(&self, name: &str) -> bool {
        self.section().is_some() || self.asked.has(name)
    }

    fn begin(&mut self, name: String, said: &mut ParsedDelta) {
        self.opened.clear();
        self.has_begun = true;
        self.has_argument = false;
        self.name.clone_from(&name);
        self.calls.begin(name, self.id.take(), self.number.take(), said);
    }

    /// Takes text of a call, kept as long as it may turn out to be none.
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

/// Returns true if the first key of the object that `text` begins may be one of a call, as far as it is there.
fn begins_call(text: &str) -> bool {
    let Some(key) = text.strip_prefix('{').map(str::trim_start) else { return false };
    let keys = ["\"name\"", "\"type\"", "\"id\"", "\"function\"", "\"arguments\"", "\"parameters\""];
    keys.iter().any(|known| key.starts_with(known) || known.starts_with(key))
}
